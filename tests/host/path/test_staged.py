"""What only the staged path does: bytes that come late stay in its buffer, and neighbours are read as far as it goes.

What it has in common with the block path is in ``test_local_loads`` and ``test_local_saves``.
"""

from __future__ import annotations

import time
from pathlib import Path

from meshfusion.host.path.staged import staged_path
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import (
    LBA_BYTES,
)
from tests.host.support.kv_memory import block_outermost, layer_outermost
from tests.host.support.staged_rig import into, rig, wait


def test_layer_and_block_outermost_read_each_others_units(tmp_path: Path, kernels: DigestKernels) -> None:
    """The medium holds one canonical order, whatever the engine's layout."""
    with rig(tmp_path, kernels, layer_outermost()) as writer:
        reads = writer.save([3, 4])
        expected = [writer.kv.unit(3), writer.kv.unit(4)]
        raw = (tmp_path / "data").read_bytes()
        assert [raw[r.lba * LBA_BYTES :][: r.unit_bytes] for r in reads] == expected
        reader_kv = block_outermost()
        reader = staged_path(
            writer.file,
            reader_kv.memory,
            reader_kv.layout,
            kernels,
            lba_bytes=LBA_BYTES,
            load_threads=1,
            read_bytes=LBA_BYTES,
            write_bytes=1 << 20,
        )
        assert wait(reader.load(into(reads, [0, 9]), abandon_after_s=10)).failures == ()
        assert [reader_kv.unit(0), reader_kv.unit(9)] == expected
        assert reader.close()


# ---- giving up -----------------------------------------------------------------------------------------------------


def test_after_abandoning_nothing_is_written_even_when_the_read_returns(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7, 8, 9]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        assert job.result(time.monotonic()) is None
        started_s = time.monotonic()
        job.abandon("preempted")
        assert time.monotonic() - started_s < 1.0, "abandoning waited for the medium"
        result = job.result(time.monotonic())
        assert result is not None
        assert [(f.index, f.is_mismatch, f.reason) for f in result.failures] == [
            (i, False, "preempted") for i in range(3)
        ]
        r.kv.fill(5)  # the engine uses its blocks for something else
        before = r.kv.memory.copy()
        r.file.may_read.set()
        assert r.file.readers_done.acquire(timeout=5)
        assert wait(r.path.load(into(reads, [0, 4, 5]), abandon_after_s=10)).failures == ()  # the same thread went on
        assert r.kv.untouched_except(before, [0, 4, 5])
        assert job.result(time.monotonic()) == result  # and the outcome did not change
        job.abandon("twice")
        assert job.result(time.monotonic()) == result


def test_past_the_deadline_what_is_missing_has_failed(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, load_threads=1, read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2, 3])
        first = wait(r.path.load(into(reads[:1], [7]), abandon_after_s=10))
        assert first.failures == ()
        job = r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)
        assert wait(job).failures == ()
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7, 8, 9]), abandon_after_s=0.05)
        assert job.result(job.deadline_s - 0.001) is None
        result = job.result(job.deadline_s)
        assert result is not None
        assert [f.index for f in result.failures] == [0, 1, 2]
        assert all("ran over its time" in f.reason for f in result.failures)


def test_only_the_units_that_did_not_arrive_in_time_have_failed(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, load_threads=1, read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2, 3])
        expected = r.kv.unit(1)
        r.file.reads.clear()
        r.file.held_lbas = {reads[1].lba}
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7, 8, 9]), abandon_after_s=60)
        while len(r.file.reads) < 2:
            time.sleep(0.001)
        result = job.result(job.deadline_s)
        assert result is not None
        assert [f.index for f in result.failures] == [1, 2]
        assert r.kv.unit(7) == expected


# ---- reading in one go ---------------------------------------------------------------------------------------------


def test_neighbours_are_read_together_up_to_the_staging_size(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, load_threads=1, read_bytes=3 * LBA_BYTES) as r:  # units of one block each
        first, second = r.save([1, 2, 3, 4, 5], 1), r.save([6, 7], 2)
        expected = [r.kv.unit(block) for block in (1, 2, 3, 4, 5, 6, 7)]
        r.file.reads.clear()
        targets = [8, 9, 10, 11, 0, 1, 2]
        assert wait(r.path.load(into(first + second, targets), abandon_after_s=10)).failures == ()
        assert r.file.reads == [
            (first[0].lba, 3 * LBA_BYTES),
            (first[3].lba, 2 * LBA_BYTES),  # a header lies behind it
            (second[0].lba, 2 * LBA_BYTES),
        ]
        assert [r.kv.unit(block) for block in targets] == expected


def test_a_unit_larger_than_the_staging_wish(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, layer_outermost(page_bytes=5000, layers=4), read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2])
        expected = r.kv.unit(2)
        assert wait(r.path.load(into(reads, [7, 8]), abandon_after_s=10)).failures == ()
        assert r.kv.unit(8) == expected
