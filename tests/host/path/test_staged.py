"""The staged path on real files: bytes arrive whole or not at all, and never after they were given up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfusion.dpu.api.types import Extent
from meshfusion.host.path.kernel_mover import KernelMover
from meshfusion.host.path.load_job import LoadJob, LoadResult, UnitRead
from meshfusion.host.path.staged import ShardWrite, ShardWritten, StagedPath
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import (
    LBA_BYTES,
    ChunkHeader,
    decode_chunk_header,
    header_lba_count,
    shard_lba_count,
    unit_lba_count,
)
from tests.host.support.data_files import UnrulyFile, media_error, open_new_file
from tests.host.support.kv_memory import BLOCK_TOKENS, KvMemory, block_outermost, layer_outermost

FIRST_LBA = 256
MAX_UNITS = 8


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(64 << 10)


class Rig:
    """A path over its own file and memory."""

    def __init__(self, path: Path, kv: KvMemory, kernels: DigestKernels, **options: Any) -> None:
        self.kv = kv
        self.file: UnrulyFile = open_new_file(path, kind=UnrulyFile)
        self.next_lba = FIRST_LBA
        self.path = StagedPath(
            self.file,
            kv.memory,
            kv.layout,
            kernels,
            lba_bytes=LBA_BYTES,
            load_threads=options.pop("load_threads", 2),
            read_bytes=options.pop("read_bytes", 64 << 10),
            write_bytes=shard_lba_count(kv.layout.unit_bytes, MAX_UNITS) * LBA_BYTES,
            **options,
        )

    def shard_write(self, save_id: int, block_ids: list[int]) -> ShardWrite:
        lba_count = shard_lba_count(self.kv.layout.unit_bytes, len(block_ids))
        lba, self.next_lba = self.next_lba, self.next_lba + lba_count
        header = ChunkHeader(
            pool_uuid=b"p" * 16,
            identity=b"i" * 32,
            key=save_id.to_bytes(32, "big"),
            tenant="default",
            group=0,
            rank=0,
            position_tokens=0,
            token_count=BLOCK_TOKENS * len(block_ids),
            segment=0,
            generation=1,
            lba=lba,
            unit_bytes=self.kv.layout.unit_bytes,
            unit_digests=(),
        )
        return ShardWrite((0, save_id), Extent(1, 0, lba, lba_count, 1), header, tuple(block_ids))

    def written(self, count: int) -> dict[int, ShardWritten]:
        results: dict[int, ShardWritten] = {}
        end_s = time.monotonic() + 10
        while len(results) < count:
            assert time.monotonic() < end_s, "saves did not end"
            for result in self.path.take_written():
                _, save_id = result.save_id
                assert save_id not in results
                results[save_id] = result
            time.sleep(0.001)
        return results

    def save(self, block_ids: list[int], save_id: int = 1) -> list[UnitRead]:
        """Saves and returns how to read the units back, for the same blocks."""
        write = self.shard_write(save_id, block_ids)
        self.path.save([write])
        digests = self.written(1)[save_id].unit_digests
        assert digests is not None
        return self.reads(write, digests)

    def reads(self, write: ShardWrite, digests: tuple[bytes, ...]) -> list[UnitRead]:
        unit_bytes = self.kv.layout.unit_bytes
        first = write.extent.lba + header_lba_count(len(digests))
        return [
            UnitRead(first + i * unit_lba_count(unit_bytes), unit_bytes, block_id, digest)
            for i, (block_id, digest) in enumerate(zip(write.block_ids, digests, strict=True))
        ]


def into(reads: list[UnitRead], block_ids: list[int]) -> list[UnitRead]:
    return [UnitRead(r.lba, r.unit_bytes, b, r.digest) for r, b in zip(reads, block_ids, strict=True)]


def wait(job: LoadJob, limit_s: float = 10.0) -> LoadResult:
    end_s = time.monotonic() + limit_s
    while (result := job.result(time.monotonic())) is None:
        assert time.monotonic() < end_s, "the load did not end"
        time.sleep(0.001)
    return result


@contextlib.contextmanager
def rig(tmp_path: Path, kernels: DigestKernels, kv: KvMemory | None = None, **options: Any) -> Iterator[Rig]:
    made = Rig(tmp_path / "data", kv or layer_outermost(), kernels, **options)
    made.kv.fill(3)
    try:
        yield made
    finally:
        made.file.may_read.set()
        made.file.may_write.set()
        assert made.path.close()


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
        reader = StagedPath(
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


def test_the_header_on_the_medium_tells_what_was_written(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels) as r:
        write = r.shard_write(9, [1, 2, 3])
        r.path.save([write])
        digests = r.written(1)[9].unit_digests
        raw = (tmp_path / "data").read_bytes()[write.extent.lba * LBA_BYTES :]
        header = decode_chunk_header(raw)
        assert header.unit_digests == digests
        assert (header.key, header.lba, header.unit_bytes) == (
            write.header.key,
            write.extent.lba,
            r.kv.layout.unit_bytes,
        )
        # Between the end of a unit and its block boundary nothing of an earlier save may show.
        slack = raw[LBA_BYTES + r.kv.layout.unit_bytes : 2 * LBA_BYTES]
        assert slack
        assert not any(slack)


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
    """Also in the middle of a copy: memory stands still from the moment that abandoning returns."""
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


# ---- saves that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [media_error("no space"), RuntimeError("a bug")])
def test_a_write_error_fails_that_save_only(tmp_path: Path, kernels: DigestKernels, error: Exception) -> None:
    with rig(tmp_path, kernels) as r:
        writes = [r.shard_write(i, [i, i + 1]) for i in range(3)]
        r.file.write_error[writes[1].extent.lba] = error
        r.path.save(writes)
        results = r.written(3)
        assert [results[i].unit_digests is None for i in range(3)] == [False, True, False]
        assert results[1].reason
        assert r.file.flush_count == 1


@pytest.mark.parametrize("error", [media_error("the flush failed"), RuntimeError("a bug")])
def test_a_flush_error_fails_the_whole_batch(tmp_path: Path, kernels: DigestKernels, error: Exception) -> None:
    with rig(tmp_path, kernels) as r:
        r.file.flush_error = error
        r.path.save([r.shard_write(i, [i]) for i in range(3)])
        results = r.written(3)
        assert all(result.unit_digests is None and result.reason for result in results.values())
        r.file.flush_error = None
        assert r.save([1], 9)  # the next batch is not affected


def test_nothing_is_reported_before_it_is_flushed(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels) as r:
        r.file.may_write.clear()
        r.path.save([r.shard_write(1, [1])])
        assert r.file.waiting_writers.acquire(timeout=5)
        assert r.path.take_written() == []
        assert r.file.flush_count == 0
        r.file.may_write.set()
        r.written(1)
        assert r.file.flush_count == 1


def test_an_extent_of_another_size_fails_the_save(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels) as r:
        write = r.shard_write(1, [1, 2])
        odd = Extent(1, 0, write.extent.lba, write.extent.lba_count + 1, 1)
        r.path.save([ShardWrite((0, 1), odd, write.header, write.block_ids)])
        assert r.written(1)[1].unit_digests is None


# ---- closing -------------------------------------------------------------------------------------------------------


def test_closing_reports_queued_saves_and_ends_queued_loads(tmp_path: Path, kernels: DigestKernels) -> None:
    made = Rig(tmp_path / "data", layer_outermost(), kernels, load_threads=1)
    reads = made.save([1])
    made.file.may_write.clear()
    made.file.may_read.clear()
    made.path.save([made.shard_write(10, [1])])
    made.path.save([made.shard_write(11, [2]), made.shard_write(12, [3])])
    jobs = [made.path.load(into(reads, [7]), abandon_after_s=60) for _ in range(2)]
    assert made.file.waiting_writers.acquire(timeout=5)
    assert made.file.waiting_readers.acquire(timeout=5)
    assert made.path.close(deadline_s=0.05) is False  # a write is in flight
    assert not made.file.is_closed
    made.file.may_write.set()
    made.file.may_read.set()
    assert made.path.close() is True
    assert made.file.is_closed
    results = made.written(3)
    assert results[10].unit_digests is not None  # it was being written already
    assert results[11].reason == results[12].reason == "the engine is shutting down"
    ends = [job.result(time.monotonic()) for job in jobs]
    assert all(end is not None for end in ends)
    assert ends[1] is not None
    assert ends[1].failures[0].reason == "the engine is shutting down"


def test_closing_an_idle_path(tmp_path: Path, kernels: DigestKernels) -> None:
    made = Rig(tmp_path / "data", layer_outermost(), kernels)
    assert made.path.close()
    assert made.file.is_closed


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


# ---- the self-test's mover -----------------------------------------------------------------------------------------


def test_the_kernel_mover_moves_what_loads_and_saves_move(kernels: DigestKernels) -> None:
    kv, mover = layer_outermost(), KernelMover(kernels)
    kv.fill(8)
    expected, before = kv.unit(5), kv.memory.copy()
    unit = np.zeros(kv.layout.unit_bytes, dtype=np.uint8)
    mover.gather(kv.memory, kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
    assert unit.tobytes() == expected
    assert np.array_equal(kv.memory, before)
    mover.scatter(kv.memory, kv.layout.run_offsets(6), kv.layout.run_bytes, unit)
    assert kv.unit(6) == expected
    assert kv.untouched_except(before, [6])


class _DisagreeingKernels(DigestKernels):
    def digest_runs(self, *args: Any) -> bytes:
        return b"\0" * 8


def test_kernels_that_disagree_refuse_to_start(kernels: DigestKernels) -> None:
    kv = layer_outermost()
    kv.fill(8)
    mover = KernelMover(_DisagreeingKernels(kernels._keys, kernels._kernels))
    unit = np.zeros(kv.layout.unit_bytes, dtype=np.uint8)
    with pytest.raises(UnsupportedError, match="disagree"):
        mover.gather(kv.memory, kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
    with pytest.raises(UnsupportedError, match="disagree"):
        mover.scatter(kv.memory, kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
