"""A pool's index made anew from its drive, when it is lost or damaged.

Nobody else may have the pool: its locks are taken, and no process of a former holder may live, since what it still
writes would land in space that a new owner hands out (rule 3). Hosts of a target cannot be told from here: where the
pool was ever exported, its target is asked. All former holders are then gone for good, and the new index begins a later
epoch than any owner had: than that of the owner's record on the drive, and those of the segments' headers.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from meshfusion.dpu.api.liveness import forget_liveness, take_liveness_away
from meshfusion.dpu.index_files import create_index, open_index
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import LIVENESS_SUFFIX, PoolLayout, geometry_of, read_data_label
from meshfusion.dpu.pool_drives import only_drive
from meshfusion.dpu.pool_medium import FileMedium
from meshfusion.dpu.pool_place import sync_directory
from meshfusion.dpu.rebuild import RebuildReport, rebuild
from meshfusion.jbof.epoch_record import last_epoch
from meshfusion.jbof.errors import ConfigError, MediaError, PoolBusyError
from meshfusion.jbof.format import OWNER_LBAS
from meshfusion.jbof.label import Label
from meshfusion.jbof.recovery import Drive, Reading
from meshfusion.jbof.unit_digests import UnitDigests

READ_THREADS: Final = 8
_NEW, _OLD = ".rebuilding", ".replaced"

Found = TypeVar("Found")
# (the pool, how it was exported) -> does its target still serve a host?
HasHosts = Callable[[uuid.UUID, str], bool]


@dataclass(frozen=True, slots=True)
class RebuiltIndex:
    """``epoch``: the new index's. ``reads`` and ``blocks_read``: what it took. ``reads_failed``: passed over."""

    report: RebuildReport
    epoch: int
    reads: int
    blocks_read: int
    reads_failed: int


def rebuild_index(
    path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    has_hosts: HasHosts | None = None,
    read_threads: int = READ_THREADS,
) -> RebuiltIndex:
    """Replace the index of the pool at ``path``, which may be gone. ``progress(done, total)`` counts segments, twice.

    Until the new index is whole, the old one stays. Raises PoolBusyError while somebody has the pool, FormatError when
    the drive is not a pool's, MediaError, and ConfigError when ``has_hosts`` is needed: None, it is not known.
    """
    layout = PoolLayout(path.absolute())
    only_drive(
        layout,
        "making the index anew",
        "make the pool anew: remove its directory, then mfctl pool create on one of its drives and mfctl jbof add for "
        "each other, with --force; only cached chunks are lost",
    )
    label, _, _ = read_data_label(layout)
    owner = OwnerLock.take(layout)
    try:
        refuse_holders(layout, uuid.UUID(bytes=label.pool_uuid), has_hosts)
        medium = FileMedium.open(layout.data)
        try:
            if medium.is_writable:
                medium.flush()  # what is found now shall still be there after a power cut
            rebuilt = _build(layout, label, _Reader(medium, read_threads), progress)
        finally:
            medium.close()
        _swap(layout)
        for left in layout.holders.glob("*"):  # liveness files and keys of holders that nobody knows any more
            forget_liveness(left)
        return rebuilt
    except OSError as error:
        raise MediaError(
            f"the index of {path} cannot be made: {error}", next_step="check space and permissions there"
        ) from error
    finally:
        owner.release()


def _build(layout: PoolLayout, label: Label, reader: _Reader, progress: Callable[[int, int], None]) -> RebuiltIndex:
    """The new index, beside the old one."""
    new, geometry = layout.directory / _NEW, geometry_of(label)
    shutil.rmtree(new, ignore_errors=True)
    pool_uuid = str(uuid.UUID(bytes=label.pool_uuid))
    create_index(new, pool_uuid, geometry.capacity_bytes)
    with open_index(new, pool_uuid, geometry.capacity_bytes) as index:
        report = rebuild(Drive(label, geometry), UnitDigests().digest_of, reader.run_all, index.apply, progress)
        known = last_epoch([reader.read(lba, 1) or b"" for lba in OWNER_LBAS], label)
        epoch = max(known, report.last_epoch) + 1
        index.begin_epoch(epoch)
    sync_directory(new)
    return RebuiltIndex(report, epoch, reader.reads, reader.blocks_read, reader.reads_failed)


def refuse_holders(layout: PoolLayout, pool_uuid: uuid.UUID, has_hosts: HasHosts | None) -> None:
    """Raises when somebody may still write to the pool's drives: see :func:`rebuild_index`."""
    alive = [
        file.name.removesuffix(LIVENESS_SUFFIX)
        for file in sorted(layout.holders.glob(f"*{LIVENESS_SUFFIX}"))
        if not take_liveness_away(file)
    ]
    if alive:
        raise PoolBusyError(
            f"processes that may write to {layout.directory} live: {', '.join(alive)}",
            next_step="stop the engines that use this pool, then try again",
        )
    if not layout.exported.exists():
        return
    exported_as = layout.exported.read_text().strip()
    if has_hosts is None:
        raise ConfigError(
            f"{layout.directory} was exported ({exported_as}), and only its target can say whether a host may write",
            next_step="name the service's configuration: mfctl pool rebuild-index --config FILE",
        )
    if has_hosts(pool_uuid, exported_as):
        raise PoolBusyError(
            f"the target ({exported_as}) still serves hosts that may write to {layout.directory}",
            next_step="stop these engines, remove the pool's subsystems from the target or restart it, then try again",
        )


def _swap(layout: PoolLayout) -> None:
    """Killed in between, the pool has no index: then this is to be done again."""
    old = layout.directory / _OLD
    shutil.rmtree(old, ignore_errors=True)
    if layout.index.exists():
        layout.index.rename(old)
    (layout.directory / _NEW).rename(layout.index)
    sync_directory(layout.directory)
    shutil.rmtree(old, ignore_errors=True)


class _Reader:
    """Runs readings on threads, a few more at a time than there are threads, so that memory is bounded."""

    def __init__(self, medium: FileMedium, threads: int) -> None:
        self._medium = medium
        self._threads = threads
        self._mutex = threading.Lock()
        self.reads = self.blocks_read = self.reads_failed = 0

    def read(self, lba: int, lba_count: int) -> bytes | None:
        try:
            data = self._medium.read_blocks(lba, lba_count)
        except MediaError:
            data = None
        with self._mutex:
            self.reads += 1
            self.blocks_read += lba_count
            self.reads_failed += data is None
        return data

    def run_all(self, readings: Iterable[Callable[[], Reading[Found]]]) -> Iterator[Found]:
        waiting = iter(readings)
        with ThreadPoolExecutor(self._threads, "meshfusion-rebuild") as threads:
            begun: deque[Future[Found]] = deque(
                threads.submit(self._run, r) for r in islice(waiting, 2 * self._threads)
            )
            while begun:
                found = begun.popleft().result()
                begun.extend(threads.submit(self._run, r) for r in islice(waiting, 1))
                yield found

    def _run(self, begin: Callable[[], Reading[Found]]) -> Found:
        reading = begin()
        data = None
        while True:
            try:
                asked = reading.send(data)
            except StopIteration as ended:
                found: Found = ended.value
                return found
            data = self.read(asked.lba, asked.lba_count)


__all__ = ["HasHosts", "RebuiltIndex", "rebuild_index", "refuse_holders"]
