"""A pool's index made anew from its drives, when it is lost or damaged.

Nobody else may have the pool: its locks are taken, and no process of a former holder may live, since what it still
writes would land in space that a new owner hands out (rule 3). Hosts of a target cannot be told from here: where the
pool was ever exported, its target is asked. All former holders are then gone for good, and the new index begins a later
epoch than any owner had: than those of the owner's record on each drive, and those of the segments' headers.

A drive of several that is away is left out, with every chunk that has a shard on it. It is not used again before the
index is made anew with it, or it is removed and added as a new one: the list of drives says so, durably, before the new
index is the pool's.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from meshfusion.dpu.api.liveness import forget_liveness, take_liveness_away
from meshfusion.dpu.budgets import SpentBudgets, spent_budgets
from meshfusion.dpu.drive_list import read_drive_list, write_drive_list
from meshfusion.dpu.index_files import create_index, open_index
from meshfusion.dpu.index_scan import refuse_other_pool
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import LIVENESS_SUFFIX, PoolLayout
from meshfusion.dpu.pool_drives import AbsentDrive, PoolDrives, find_drives_to_index
from meshfusion.dpu.pool_medium import FileMedium
from meshfusion.dpu.pool_place import sync_directory
from meshfusion.dpu.rebuild import DriveReading, RebuildReport, rebuild
from meshfusion.dpu.store.effects import NoteBudget
from meshfusion.jbof.epoch_record import last_epoch
from meshfusion.jbof.errors import ConfigError, MediaError, PoolBusyError
from meshfusion.jbof.format import OWNER_LBAS
from meshfusion.jbof.recovery import Drive
from meshfusion.jbof.unit_digests import UnitDigests

READ_THREADS: Final = 8  # for each drive
MAX_READ_THREADS: Final = 64
_NEW, _OLD = ".rebuilding", ".replaced"

Found = TypeVar("Found")
# (the pool, how it was exported) -> does its target still serve a host?
HasHosts = Callable[[uuid.UUID, str], bool]


@dataclass(frozen=True, slots=True)
class RebuiltIndex:
    """``epoch``: the new index's. ``reads`` and ``blocks_read``: what it took. ``reads_failed``: passed over.
    ``drives_left_out``: their numbers, and why each is away. ``budgets``: what was written in the last day, the medium
    does not tell, so all of it counts as spent."""

    report: RebuildReport
    epoch: int
    reads: int
    blocks_read: int
    reads_failed: int
    budgets: SpentBudgets
    drives_left_out: tuple[tuple[int, str], ...] = ()


def rebuild_index(
    path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    has_hosts: HasHosts | None = None,
    read_threads: int = READ_THREADS,
) -> RebuiltIndex:
    """Replace the index of the pool at ``path``, which may be gone. ``progress(done, total)`` counts segments, twice.

    Until the new index is whole, the old one stays. Raises PoolBusyError while somebody has the pool, FormatError when
    no drive is a pool's, WrongDriveError or OtherPoolError when one is in another's place, MediaError, and ConfigError
    when ``has_hosts`` is needed: None, it is not known.
    """
    layout = PoolLayout(path.absolute())
    drives = find_drives_to_index(layout)
    owner = OwnerLock.take(layout, drives.paths)
    try:
        if layout.index.exists():
            refuse_other_pool(layout.index, drives.pool_uuid, drives.capacity_bytes)
        refuse_holders(layout, uuid.UUID(drives.pool_uuid), has_hosts)
        with contextlib.ExitStack() as stack:
            drives, media = _opened(drives, stack)
            rebuilt = _build(layout, drives, _Reader(media, read_threads), progress)
        left_out = frozenset(drive.number for drive in drives.absent)
        _note_unindexed(layout, left_out, frozenset())
        _swap(layout)
        _note_unindexed(layout, left_out, frozenset(media))
        for left in layout.holders.glob("*"):  # liveness files and keys of holders that nobody knows any more
            forget_liveness(left)
        return rebuilt
    except OSError as error:
        raise MediaError(
            f"the index of {path} cannot be made: {error}", next_step="check space and permissions there"
        ) from error
    finally:
        owner.release()


def _opened(drives: PoolDrives, stack: contextlib.ExitStack) -> tuple[PoolDrives, dict[int, FileMedium]]:
    """The drives that are here and can be opened, by their numbers. Raises MediaError when none can."""
    media: dict[int, FileMedium] = {}
    failed: list[AbsentDrive] = []
    for drive in drives.here:
        try:
            medium = FileMedium.open(drive.path)
            stack.callback(medium.close)
            if medium.is_writable:
                medium.flush()  # what is found now shall still be there after a power cut
        except MediaError as error:
            failed.append(AbsentDrive(drive.number, error, drive.label.drive_name))
        else:
            media[drive.number] = medium
    if not media:
        raise failed[0].problem
    here = tuple(drive for drive in drives.here if drive.number in media)
    return replace(drives, here=here, absent=(*drives.absent, *failed)), media


def _build(
    layout: PoolLayout, drives: PoolDrives, reader: _Reader, progress: Callable[[int, int], None]
) -> RebuiltIndex:
    """The new index, beside the old one."""
    new = layout.directory / _NEW
    shutil.rmtree(new, ignore_errors=True)
    create_index(new, drives.pool_uuid, drives.capacity_bytes)
    with open_index(new, drives.pool_uuid, drives.capacity_bytes) as index:
        looked_at = [Drive(drive.label, drive.geometry) for drive in drives.here]
        report = rebuild(looked_at, UnitDigests().digest_of, reader.run_all, index.apply, progress)
        epoch = max(report.last_epoch, *(_last_epoch(reader, drive) for drive in looked_at)) + 1
        index.begin_epoch(epoch)
        # What was written in the last day, the medium does not tell: their budgets begin with nothing.
        index.apply(NoteBudget(number, 0) for number in sorted(drives.numbers))
    sync_directory(new)
    left_out = tuple(sorted((drive.number, drive.problem.message) for drive in drives.absent))
    budgets = spent_budgets(drives.geometries)
    return RebuiltIndex(report, epoch, reader.reads, reader.blocks_read, reader.reads_failed, budgets, left_out)


def _last_epoch(reader: _Reader, drive: Drive) -> int:
    copies = [reader.read(drive.label.drive_number, lba, 1) or b"" for lba in OWNER_LBAS]
    return last_epoch(copies, drive.label)


def _note_unindexed(layout: PoolLayout, unindexed: frozenset[int], indexed: frozenset[int]) -> None:
    """In the list of drives, durably. Of the others it stays as it is."""
    listed = read_drive_list(layout.directory)
    if listed is None:
        return
    noted = listed
    for drive in listed.drives:
        if drive.number in unindexed | indexed:
            noted = noted.with_drive(replace(drive, is_unindexed=drive.number in unindexed))
    if noted != listed:
        write_drive_list(layout.directory, noted)


def refuse_holders(
    layout: PoolLayout, pool_uuid: uuid.UUID, has_hosts: HasHosts | None, *, command: str = "mfctl pool rebuild-index"
) -> None:
    """Raises when somebody may still write to the pool's drives: see :func:`rebuild_index`. ``command``: what is being
    done, to be told with the next step."""
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
            next_step=f"name the service's configuration: {command} --config FILE",
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
    """Runs readings on threads, a few more at a time than there are threads, so that memory is bounded. ``media``: by
    their drives' numbers."""

    def __init__(self, media: Mapping[int, FileMedium], threads_per_drive: int) -> None:
        self._media = media
        self._threads = min(threads_per_drive * len(media), MAX_READ_THREADS)
        self._mutex = threading.Lock()
        self.reads = self.blocks_read = self.reads_failed = 0

    def read(self, drive_number: int, lba: int, lba_count: int) -> bytes | None:
        try:
            data = self._media[drive_number].read_blocks(lba, lba_count)
        except MediaError:
            data = None
        with self._mutex:
            self.reads += 1
            self.blocks_read += lba_count
            self.reads_failed += data is None
        return data

    def run_all(self, readings: Iterable[DriveReading[Found]]) -> Iterator[Found]:
        waiting = iter(readings)
        with ThreadPoolExecutor(self._threads, "meshfusion-rebuild") as threads:
            begun: deque[Future[Found]] = deque(
                threads.submit(self._run, r) for r in islice(waiting, 2 * self._threads)
            )
            while begun:
                found = begun.popleft().result()
                begun.extend(threads.submit(self._run, r) for r in islice(waiting, 1))
                yield found

    def _run(self, wanted: DriveReading[Found]) -> Found:
        reading = wanted.begin()
        data = None
        while True:
            try:
                asked = reading.send(data)
            except StopIteration as ended:
                found: Found = ended.value
                return found
            data = self.read(wanted.drive_number, asked.lba, asked.lba_count)


__all__ = ["HasHosts", "RebuiltIndex", "rebuild_index", "refuse_holders"]
