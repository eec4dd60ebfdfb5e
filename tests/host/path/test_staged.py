"""The staged path on real files: bytes arrive whole or not at all, and never after they were given up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfusion.host.path.load_job import LoadResult, UnitRead
from meshfusion.host.path.staged import staged_path
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import (
    LBA_BYTES,
)
from tests.host.support.data_files import media_error
from tests.host.support.kv_memory import block_outermost, layer_outermost
from tests.host.support.staged_rig import MAX_UNITS, into, rig, wait


@pytest.mark.parametrize("make_kv", [layer_outermost, block_outermost])
@pytest.mark.parametrize("unit_count", [1, 3, 8])
def test_saved_units_come_back_bit_exact_in_other_blocks(
    tmp_path: Path, kernels: DigestKernels, make_kv: Any, unit_count: int
) -> None:
    with rig(tmp_path, kernels, make_kv(blocks=20)) as r:
        sources = [11, 2, 7, 19, 0, 5, 13, 4][:unit_count]
        targets = [1, 3, 6, 8, 9, 10, 12, 14][:unit_count]
        expected = [r.kv.unit(block) for block in sources]
        reads = r.save(sources)
        r.kv.fill(4)
        before = r.kv.memory.copy()
        result = wait(r.path.load(into(reads, targets), abandon_after_s=10))
        assert result.failures == ()
        assert result.load_bytes == unit_count * r.kv.layout.unit_bytes
        assert result.seconds > 0
        assert [r.kv.unit(block) for block in targets] == expected
        assert r.kv.untouched_except(before, targets)
        assert r.path.counters.loaded_bytes == r.path.counters.saved_bytes == result.load_bytes


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


def test_a_flipped_bit_fails_exactly_its_unit(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (1, 2, 3)]
        with (tmp_path / "data").open("r+b") as raw:
            at = reads[1].lba * LBA_BYTES + reads[1].unit_bytes - 1
            raw.seek(at)
            byte = raw.read(1)[0]
            raw.seek(at)
            raw.write(bytes([byte ^ 0x80]))
        result = wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10))
        (failure,) = result.failures
        assert (failure.index, failure.is_mismatch) == (1, True)
        assert reads[1].digest.hex() in failure.reason
        assert r.path.counters.mismatches == 1
        assert [r.kv.unit(7), r.kv.unit(9)] == [expected[0], expected[2]]


def test_without_verification_the_flipped_bit_goes_through(tmp_path: Path, kernels: DigestKernels) -> None:
    """The negative control: it is the digest that catches it."""
    with rig(tmp_path, kernels, is_digest_right=lambda got, expected: True) as r:
        reads = r.save([1])
        wrong = UnitRead(reads[0].lba, reads[0].unit_bytes, 2, b"\0" * 8)
        assert wait(r.path.load([wrong], abandon_after_s=10)).failures == ()


@pytest.mark.parametrize("digest", [b"", b"\0" * 7, bytearray(8), "text", None])
def test_an_odd_digest_is_never_right(tmp_path: Path, kernels: DigestKernels, digest: Any) -> None:
    with rig(tmp_path, kernels) as r:
        reads = r.save([1])
        odd = UnitRead(reads[0].lba, reads[0].unit_bytes, 2, digest)
        (failure,) = wait(r.path.load([odd], abandon_after_s=10)).failures
        assert failure.index == 0


def test_a_truncated_file_is_a_failure_not_a_mismatch(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2, 3])
        with (tmp_path / "data").open("r+b") as raw:
            raw.truncate(reads[2].lba * LBA_BYTES)
        (failure,) = wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures
        assert (failure.index, failure.is_mismatch) == (2, False)
        assert "ends at byte" in failure.reason


@pytest.mark.parametrize("error", [media_error("the drive is gone"), RuntimeError("a bug")])
def test_a_read_error_fails_the_span_and_the_threads_go_on(
    tmp_path: Path, kernels: DigestKernels, error: Exception
) -> None:
    with rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2])
        r.file.read_error = error
        result = wait(r.path.load(into(reads, [7, 8]), abandon_after_s=10))
        assert sorted(f.index for f in result.failures) == [0, 1]
        assert not any(f.is_mismatch for f in result.failures)
        r.file.read_error = None
        assert wait(r.path.load(into(reads, [7, 8]), abandon_after_s=10)).failures == ()


def test_a_block_out_of_range_fails_the_load_and_the_thread_goes_on(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        before = r.kv.memory.copy()
        result = wait(r.path.load(into(reads, [7, 99, 8]), abandon_after_s=10))
        assert sorted(f.index for f in result.failures) == [0, 1, 2], "the whole span, before any of it is placed"
        assert r.kv.untouched_except(before, [])
        assert wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures == ()


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


def test_abandoned_at_any_moment(tmp_path: Path, kernels: DigestKernels) -> None:
    """Also in the middle of a copy: memory stands still from the moment that the outcome is told."""
    kv = block_outermost(blocks=40, layers=4, page_bytes=16_000)
    with rig(tmp_path, kernels, kv, load_threads=4, read_bytes=128 << 10) as r:
        reads = r.save(list(range(8)))
        rng = np.random.default_rng(1)
        touched = 0
        for _ in range(60):
            r.kv.memory[r.kv.byte_places[8:].ravel()] = 0
            job = r.path.load(into(reads * 4, list(range(8, 40))), abandon_after_s=60)
            time.sleep(float(rng.uniform(0, 0.002)))
            job.abandon("now")
            wait(job)
            before = r.kv.memory.copy()
            touched += bool(before[r.kv.byte_places[8:].ravel()].any())
            time.sleep(0.002)
            assert np.array_equal(r.kv.memory, before)
        assert touched, "every load was abandoned before it began: nothing was tried"


def test_an_empty_load_is_done(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels) as r:
        result = r.path.load([], abandon_after_s=10).result(time.monotonic())
        assert result == LoadResult(0, 0.0, ())


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


def test_units_out_of_order_are_read_one_by_one(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (3, 2, 1)]
        r.file.reads.clear()
        assert wait(r.path.load(into(reads[::-1], [7, 8, 9]), abandon_after_s=10)).failures == ()
        assert [size for _, size in r.file.reads] == [LBA_BYTES] * 3
        assert [r.kv.unit(block) for block in (7, 8, 9)] == expected


def test_a_unit_larger_than_the_staging_wish(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, layer_outermost(page_bytes=5000, layers=4), read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2])
        expected = r.kv.unit(2)
        assert wait(r.path.load(into(reads, [7, 8]), abandon_after_s=10)).failures == ()
        assert r.kv.unit(8) == expected


# ---- many at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_many_jobs_of_any_size_at_once(tmp_path: Path, kernels: DigestKernels, seed: int) -> None:
    rng = np.random.default_rng(seed)
    make_kv = [layer_outermost, block_outermost][seed % 2]
    kv = make_kv(blocks=160, layers=int(rng.integers(1, 5)), page_bytes=4 * int(rng.integers(10, 2500)))
    with rig(tmp_path, kernels, kv, load_threads=4, read_bytes=32 << 10) as r:
        units: list[tuple[UnitRead, bytes]] = []
        writes = [
            r.shard_write(i, rng.choice(80, size=int(rng.integers(1, MAX_UNITS + 1)), replace=False).tolist())
            for i in range(12)
        ]
        for batch in (writes[:5], writes[5:6], writes[6:]):
            r.path.save(batch)
        results = r.written(len(writes))
        for write in writes:
            digests = results[write.save_id[1]].unit_digests
            assert digests is not None
            units += [(read, r.kv.unit(read.block_id)) for read in r.reads(write, digests)]
        targets = (80 + rng.permutation(80)).tolist()
        jobs = []
        while targets:
            size = min(len(targets), int(rng.integers(1, 12)))
            start = int(rng.integers(0, len(units)))
            chosen = (units[start:] + units[:start])[:size]
            size = len(chosen)
            blocks, targets = targets[:size], targets[size:]
            jobs.append((r.path.load(into([read for read, _ in chosen], blocks), abandon_after_s=30), blocks, chosen))
        before = r.kv.memory.copy()
        for job, blocks, chosen in jobs:
            assert wait(job).failures == ()
            assert [r.kv.unit(block) for block in blocks] == [expected for _, expected in chosen]
        assert r.kv.untouched_except(before, list(range(80, 160)))
