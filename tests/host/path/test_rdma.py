"""The direct path: data lands in the engine's blocks, and blocks are free only when nobody can reach them any more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.rdma import rdma_path
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.format import (
    LBA_BYTES,
    decode_chunk_header,
)
from tests.host.support.kv_memory import KvMemory, block_outermost, layer_outermost
from tests.host.support.memory_namespace import NSID, MemoryNamespace
from tests.host.support.shard_writes import reads_of, shard_write
from tests.host.support.staged_rig import into, wait
from tests.host.support.waiting import until

FIRST_LBA = 64
MAX_UNITS = 8


class Rig:
    def __init__(self, kv: KvMemory, kernels: DigestKernels, namespace: MemoryNamespace, **options: Any) -> None:
        self.kv = kv
        self.namespace = namespace
        self.path: DataPath = rdma_path(
            namespace,
            {NSID},
            HostKvMemory(kv.memory, kernels),
            (kv.layout,),
            lba_bytes=LBA_BYTES,
            load_threads=options.pop("load_threads", 2),
            read_bytes=options.pop("read_bytes", 64 << 10),
            max_units=MAX_UNITS,
            **options,
        )

    def shard(self, block_ids: list[int], save_id: int = 1, lba: int = FIRST_LBA) -> ShardWrite:
        return shard_write(self.kv.layout.unit_bytes, block_ids, lba, save_id)

    def written(self) -> ShardWritten:
        taken = until(self.path.take_written, what="for a save")
        assert taken is not None
        (result,) = taken
        return result

    def save(self, block_ids: list[int]) -> list[UnitRead]:
        write = self.shard(block_ids)
        self.path.save([write])
        digests = self.written().unit_digests
        assert digests is not None
        return reads_of(write, digests)


def aligned() -> KvMemory:
    """Runs of whole blocks: what a target that takes one piece a command can do."""
    return layer_outermost(page_bytes=2 * LBA_BYTES, layers=3)


@contextlib.contextmanager
def rig(kernels: DigestKernels, kv: KvMemory | None = None, max_descriptors: int = 1, **options: Any) -> Iterator[Rig]:
    made = Rig(kv or aligned(), kernels, MemoryNamespace(4 << 20, max_descriptors), **options)
    made.kv.fill(3)
    try:
        yield made
    finally:
        assert made.path.close()


@pytest.mark.parametrize(("make_kv", "descriptors"), [(aligned, 1), (layer_outermost, 16), (block_outermost, 16)])
def test_saved_units_come_back_bit_exact_in_other_blocks(
    kernels: DigestKernels, make_kv: Any, descriptors: int
) -> None:
    with rig(kernels, make_kv(), descriptors) as r:
        expected = [r.kv.unit(block) for block in (3, 1, 4)]
        reads = r.save([3, 1, 4])
        raw = bytes(r.namespace.medium)
        assert [raw[read.lba * LBA_BYTES :][: read.unit_bytes] for read in reads] == expected
        header = decode_chunk_header(raw[FIRST_LBA * LBA_BYTES :])
        assert header.unit_digests == tuple(read.digest for read in reads)
        r.kv.fill(4)
        before = r.kv.memory.copy()
        result = wait(r.path.load(into(reads, [0, 2, 5]), abandon_after_s=10))
        assert result.failures == ()
        assert [r.kv.unit(block) for block in (0, 2, 5)] == expected
        assert r.kv.untouched_except(before, [0, 2, 5])


def test_a_unit_that_is_not_whole_blocks_leaves_zeros_behind_it(kernels: DigestKernels) -> None:
    with rig(kernels, layer_outermost(), 16) as r:
        read = r.save([1])[0]
        end = read.lba * LBA_BYTES + read.unit_bytes
        slack = r.namespace.medium[end : end + -read.unit_bytes % LBA_BYTES]
        assert slack
        assert not any(slack)


def test_a_layout_the_target_cannot_take_is_refused(kernels: DigestKernels) -> None:
    namespace = MemoryNamespace(4 << 20, max_descriptors=1)
    with pytest.raises(UnsupportedError, match="not whole blocks of 4096"):
        Rig(layer_outermost(), kernels, namespace)
    assert namespace.is_closed


def test_other_bytes_fail_their_unit_only(kernels: DigestKernels) -> None:
    with rig(kernels) as r:
        reads = r.save([1, 2, 3])
        r.namespace.medium[reads[1].lba * LBA_BYTES + 5] ^= 1
        (failure,) = wait(r.path.load(into(reads, [5, 6, 7]), abandon_after_s=10)).failures
        assert (failure.index, failure.is_mismatch) == (1, True)
        assert r.path.counters.mismatches == 1


def test_a_read_that_fails_is_no_mismatch(kernels: DigestKernels) -> None:
    with rig(kernels) as r:
        reads = r.save([1, 2])
        r.namespace.error = MediaError("unrecovered read error", next_step="look at the drive")
        failures = wait(r.path.load(into(reads, [5, 6]), abandon_after_s=10)).failures
        assert sorted((f.index, f.is_mismatch, f.reason) for f in failures) == [
            (i, False, "unrecovered read error") for i in range(2)
        ]


def test_blocks_are_not_given_back_while_a_read_may_land(kernels: DigestKernels) -> None:
    """Neither a deadline nor giving up frees them: only the end of the queue pair (rule 3)."""
    with rig(kernels, load_threads=1) as r:
        reads = r.save([1])
        r.namespace.holds = True
        job = r.path.load(into(reads, [7]), abandon_after_s=0.05)
        assert r.namespace.waiting.acquire(timeout=5)
        (held,) = r.namespace.held
        time.sleep(0.1)
        assert job.result(time.monotonic()) is None, "its time is over, and it may still land"
        job.abandon("preempted")
        held.pending.doubt(MediaError("no answer", next_step="wait"))
        time.sleep(0.05)
        assert job.result(time.monotonic()) is None, "in doubt is not gone"
        held.land()  # late, and into memory that is still its own
        held.pending.free_memory()
        r.namespace.held.clear()
        result = wait(job)
        assert [f.index for f in result.failures] == [0]
        r.namespace.holds = False
        assert wait(r.path.load(into(reads, [6]), abandon_after_s=10)).failures == ()


def test_a_write_in_doubt_is_told_as_such(kernels: DigestKernels) -> None:
    with rig(kernels) as r:
        r.namespace.holds = True
        r.path.save([r.shard([1])])
        assert r.namespace.waiting.acquire(timeout=5)
        (held,) = r.namespace.held
        held.pending.doubt(MediaError("no answer", next_step="wait"))
        time.sleep(0.05)
        assert r.path.take_written() == [], "its blocks may still be read by the target"
        held.pending.free_memory()
        r.namespace.held.clear()
        result = r.written()
        assert (result.unit_digests, result.fate) == (None, WriteFate.UNKNOWN)


def test_a_write_that_failed_or_was_not_flushed(kernels: DigestKernels) -> None:
    with rig(kernels) as r:
        r.namespace.error = MediaError("write fault", next_step="look at the drive")
        r.path.save([r.shard([1])])
        result = r.written()
        assert (result.fate, result.reason) == (WriteFate.FAILED, "write fault")
        r.namespace.error, r.namespace.flush_error = None, MediaError("flush failed", next_step="look at the drive")
        r.path.save([r.shard([1], 2)])
        result = r.written()
        assert (result.fate, result.reason) == (WriteFate.FAILED, "flush failed")


def test_closing_kills_what_is_under_way(kernels: DigestKernels) -> None:
    with rig(kernels, load_threads=1) as r:
        reads = r.save([1])
        r.namespace.holds = True
        job = r.path.load(into(reads, [7]), abandon_after_s=60)
        assert r.namespace.waiting.acquire(timeout=5)
        assert r.path.close(deadline_s=5)
        assert r.namespace.is_closed
        result = job.result(time.monotonic())
        assert result is not None
        assert [f.index for f in result.failures] == [0]
