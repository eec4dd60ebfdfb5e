"""The direct path on a pool of two drives: each unit from its own namespace, flushed where it was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.rdma import rdma_path
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.nvme.memory import RegionPart
from meshfusion.jbof.nvme.pending import PendingTransfer
from meshfusion.jbof.pool_addresses import pool_lba
from tests.host.path.test_rdma import MAX_UNITS, aligned
from tests.host.support.memory_namespace import MemoryNamespace
from tests.host.support.shard_writes import reads_of, shard_write
from tests.host.support.staged_rig import into, wait
from tests.host.support.waiting import until

FIRST, SECOND = 1, 3  # the namespaces of drives 0 and 2
FIRST_LBA = 64


class TwoNamespaces:
    """One initiator's; memory is registered with both at once, under the first one's keys."""

    def __init__(self) -> None:
        self.each = {nsid: MemoryNamespace(4 << 20, 16, nsid=nsid) for nsid in (FIRST, SECOND)}

    def begin_read(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self.each[nsid].begin_read(nsid, lba, memory, timeout_s=timeout_s)

    def begin_write(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self.each[nsid].begin_write(nsid, lba, memory, timeout_s=timeout_s)

    def flush(self, nsid: int, *, timeout_s: float) -> None:
        self.each[nsid].flush(nsid, timeout_s=timeout_s)

    def close(self, *, timeout_s: float) -> None:
        for namespace in self.each.values():
            namespace.close(timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.each[FIRST], name)


class Rig:
    def __init__(self, kernels: DigestKernels) -> None:
        self.kv = aligned()
        self.kv.fill(3)
        self.target: Any = TwoNamespaces()
        self.path = rdma_path(
            self.target,
            {FIRST, SECOND},
            HostKvMemory(self.kv.memory, kernels),
            (self.kv.layout,),
            lba_bytes=LBA_BYTES,
            load_threads=2,
            read_bytes=64 << 10,
            max_units=MAX_UNITS,
        )

    def write(self, nsid: int, save_id: int, block_ids: list[int]) -> ShardWrite:
        """At the same place of whatever drive."""
        write = shard_write(self.kv.layout.unit_bytes, block_ids, FIRST_LBA, save_id)
        return replace(write, extent=replace(write.extent, namespace=nsid))

    def written(self, count: int) -> list[ShardWritten]:
        found: list[ShardWritten] = []
        while len(found) < count:
            found += until(self.path.take_written, what="for a save")
        return found

    def save(self, nsid: int, save_id: int, block_ids: list[int]) -> list[UnitRead]:
        write = self.write(nsid, save_id, block_ids)
        self.path.save([write])
        (result,) = self.written(1)
        assert result.unit_digests is not None
        reads = reads_of(write, result.unit_digests)
        return [read._replace(lba=pool_lba(nsid, read.lba)) for read in reads]

    def flushes(self) -> list[int]:
        return [[what for what, _ in namespace.log].count("flush") for namespace in self.target.each.values()]


@pytest.fixture
def two(kernels: DigestKernels) -> Iterator[Rig]:
    made = Rig(kernels)
    yield made
    assert made.path.close()


def test_units_of_both_drives_come_back_in_one_load(two: Rig) -> None:
    first, second = two.save(FIRST, 1, [1, 2]), two.save(SECOND, 2, [3, 4])
    assert [read.lba for read in first] == [read.lba - (2 << 40) for read in second], "the same places on two drives"
    expected = [two.kv.unit(block) for block in (1, 3, 2, 4)]
    mixed = [first[0], second[0], first[1], second[1]]
    assert wait(two.path.load(into(mixed, [7, 5, 6, 0]), abandon_after_s=10)).failures == ()
    assert [two.kv.unit(block) for block in (7, 5, 6, 0)] == expected
    raw, at = bytes(two.target.each[SECOND].medium), first[0].lba * LBA_BYTES
    assert raw[at : at + first[0].unit_bytes] == expected[1]


def test_each_drive_is_flushed_when_it_was_written_to(two: Rig) -> None:
    two.save(FIRST, 1, [1])
    assert two.flushes() == [1, 0]
    two.path.save([two.write(FIRST, 2, [2]), two.write(SECOND, 3, [3])])
    assert [result.fate for result in two.written(2)] == [WriteFate.DURABLE] * 2
    assert two.flushes() == [2, 1]


def test_a_drive_that_cannot_be_flushed_makes_its_batch_fail_and_is_flushed_later(two: Rig) -> None:
    two.target.each[SECOND].flush_error = MediaError("flush", next_step="-")
    two.path.save([two.write(FIRST, 1, [1]), two.write(SECOND, 2, [2])])
    assert {result.fate for result in two.written(2)} == {WriteFate.FAILED}
    two.target.each[SECOND].flush_error = None
    before = two.flushes()[1]
    two.save(FIRST, 3, [3])
    assert two.flushes()[1] == before + 1


def test_a_drive_that_is_not_reached_fails_what_lies_there_and_nothing_else(two: Rig) -> None:
    (read,) = two.save(FIRST, 1, [1])
    there = read._replace(lba=pool_lba(2, FIRST_LBA + 1))
    (failure,) = wait(two.path.load(into([read, there], [7, 5]), abandon_after_s=10)).failures
    assert (failure.index, failure.is_mismatch) == (1, False)
    assert "drive 1 of the pool is not reached here" in failure.reason
    two.path.save([two.write(2, 2, [2])])
    (result,) = two.written(1)
    assert (result.fate, "not reached" in result.reason) == (WriteFate.FAILED, True)
    assert two.flushes() == [1, 0]


def test_damage_on_one_drive_fails_its_units_only(two: Rig) -> None:
    first, second = two.save(FIRST, 1, [1]), two.save(SECOND, 2, [2])
    two.target.each[SECOND].medium[first[0].lba * LBA_BYTES + 5] ^= 1
    (failure,) = wait(two.path.load(into([*first, *second], [7, 5]), abandon_after_s=10)).failures
    assert (failure.index, failure.is_mismatch) == (1, True)
