"""Runs in the guest, as ``python guest_hot_drives.py TARGET``: drives are added to and removed from a pool of two while
it is exported, and its host stores and loads. ``TARGET``: as of ``guest_pool_drives.py``.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.drive_types import AddDriveRequest, RemoveDriveRequest
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.export.opening import keeper_of
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.shards import ShardWrite
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device
from meshfusion.tools.lab.guest_setup.links import soft_roce_on_dummy
from tests.host.support.kv_memory import KvMemory
from tests.lab.guest_initiator import take_down
from tests.lab.guest_path import memory, save, wait
from tests.lab.guest_pool_drives import (
    DEADLINE_S,
    SEGMENT_BYTES,
    SIZE_MIB,
    attached,
    exports,
    header_of,
    key,
    opened,
    reads,
    try_to_store,
)

REMOVED = 1
SOURCES = 6
MOST_CHUNKS = 40
PATIENCE_S = 60.0
FAST = DriveOptions(check_interval_s=0.5, probation_s=0.0, drain_s=0.0)
MARK = b"another tenant's".ljust(LBA_BYTES, b".")


class Engine:
    """A host that stores a chunk and loads two, again and again, and follows the pool's drives."""

    def __init__(self, pool: Pool, kv: KvMemory) -> None:
        self._pool, self._kv = pool, kv
        kv.fill(5)
        self._expected = [kv.unit(2 * source) for source in range(SOURCES)]
        self.attachment = attached(pool)
        self.path = opened(kv, self.attachment)
        self._reached: api.Reached | None = None
        self.extents: list[api.Extent] = []  # of each chunk
        self.loaded = self.failed = self.wrong = self.missed = 0
        self.given_up: set[int] = set()  # drives on which something was written, and not committed

    @property
    def drives(self) -> list[int]:
        return [drive_of_segment(extent.segment) for extent in self.extents]

    @property
    def reached(self) -> tuple[int, ...]:
        return () if self._reached is None else self._reached.namespaces

    def step(self) -> None:
        self._follow()
        chunk = len(self.extents)
        if chunk < MOST_CHUNKS:
            first = 2 * (chunk % SOURCES)
            extent, is_committed = try_to_store(self._pool, self.attachment, self.path, self._kv, chunk, first)
            if is_committed:
                self.extents.append(extent)
            else:
                self.given_up.add(drive_of_segment(extent.segment))
        for known in (len(self.extents) - 1, len(self.extents) // 2):
            self.load(known)

    def _follow(self) -> None:
        """As the connector does."""
        request = api.HeartbeatRequest(self.attachment.holder_id, self.attachment.epoch, (), self._reached)
        reply = self._pool.heartbeat(request, deadline_s=DEADLINE_S)
        if self._reached is not None and reply.drives_version == self.attachment.drives_version:
            return
        self.attachment = attached(self._pool)
        exported = self.path.exported
        assert exported is not None
        exported.reach(self.attachment)
        self._reached = api.Reached(self.attachment.drives_version, tuple(sorted(exported.nsids)))

    def load(self, chunk: int) -> None:
        """The chunk for itself."""
        group = api.GroupKeys(0, (b"",) * chunk + (key(chunk),), (*range(1, chunk + 1), chunk))
        request = api.MatchRequest(self.attachment.holder_id, "r", 16, (group,))
        found = self._pool.match(request, deadline_s=DEADLINE_S)
        if not found.chunks:
            self.missed += 1
            return
        result = wait(self.path.load(reads(found), abandon_after_s=20))
        self.loaded += 1
        self.failed += len(result.failures)
        self.wrong += not result.failures and self._kv.unit(12) != self._expected[chunk % SOURCES]
        release = api.ReleaseRequest(self.attachment.holder_id, (found.lease_id,))
        self._pool.release(release, deadline_s=DEADLINE_S)

    def work_until(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end_s, (self.drives, self.attachment, self._pool.status(deadline_s=DEADLINE_S))
            self.step()

    def work_beside(self, change: Callable[[], object]) -> None:
        """Raises what the change raises."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                change()
            except BaseException as error:  # told where it is seen
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.work_until(lambda: not thread.is_alive())
        if failures:
            raise failures[0]


def write_late(late: DataPath, engine: Engine, kv: KvMemory, device: Path) -> tuple[str, bool]:
    """A host that has heard of nothing writes where it had a place; is what the next owner has there whole?"""
    extent = next(extent for extent in engine.extents if drive_of_segment(extent.segment) == REMOVED)
    descriptor = os.open(device, os.O_RDWR)
    try:
        for block in range(extent.lba_count):
            os.pwrite(descriptor, MARK, (extent.lba + block) * LBA_BYTES)
        os.fsync(descriptor)
        written = save(late, ShardWrite((0, 999), extent, header_of(engine.attachment, kv, 0, extent), (0, 1)))
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        there = os.pread(descriptor, extent.lba_count * LBA_BYTES, extent.lba * LBA_BYTES)
    finally:
        os.close(descriptor)
    return "refused" if written.unit_digests is None else "written", there == MARK * extent.lba_count


def main(target: str) -> dict[str, object]:
    link = soft_roce_on_dummy()
    devices = [make_memory_device(MemoryDevice(f"mf{number}", SIZE_MIB)) for number in range(3)]
    folder = Path(tempfile.mkdtemp()) / "pool"
    create_pool_of_drives(folder, size_bytes=SIZE_MIB << 20, segment_bytes=SEGMENT_BYTES, data_paths=devices[:2])
    kv = memory()
    with (
        exports(target, link.address) as config,
        Pool.open(folder, exports=partial(keeper_of, config), drive_options=FAST) as pool,
    ):
        engine = Engine(pool, kv)
        engine.work_until(lambda: set(engine.drives) == {0, 1})
        late = opened(kv, engine.attachment)
        add = AddDriveRequest(SIZE_MIB << 20, str(devices[2]), "")
        engine.work_beside(lambda: pool.drive_admin.add_drive(add, deadline_s=PATIENCE_S))
        engine.work_until(lambda: 2 in engine.drives)
        engine.load(engine.drives.index(2))
        with_three, stored = engine.reached, len(engine.extents)
        remove = RemoveDriveRequest(REMOVED)
        engine.work_beside(lambda: pool.drive_admin.remove_drive(remove, deadline_s=PATIENCE_S))
        late_write, is_whole = write_late(late, engine, kv, devices[REMOVED])
        engine.work_until(lambda: engine.reached == (1, 3))
        missed = engine.missed
        for chunk in range(len(engine.extents)):
            engine.load(chunk)
        is_quiet = [path.close() for path in (engine.path, late)]
    return {
        "with_three": with_three,
        "without": engine.reached,
        "stored_before_removal": stored,
        "failed": engine.failed,
        "wrong": engine.wrong,
        "loaded": engine.loaded,
        "given_up": sorted(engine.given_up),
        "on_removed": engine.drives.count(REMOVED),
        "missed_at_last": engine.missed - missed,
        "late_write": late_write,
        "is_whole": is_whole,
        "is_quiet": is_quiet,
        "left": take_down(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
