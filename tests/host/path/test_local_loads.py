"""Loads of the staged and of the block path on real files: whole or failed, and proven."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfusion.host.path.load_job import LoadJob, UnitRead
from meshfusion.host.path.spans import spans_of
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import LBA_BYTES
from tests.host.support.data_files import flip_bit, media_error
from tests.host.support.local_paths import LocalPath
from tests.host.support.staged_rig import MAX_UNITS, into, wait


@pytest.mark.parametrize("layout", ["layers", "blocks"])
@pytest.mark.parametrize("unit_count", [1, 3, 8])
def test_saved_units_come_back_bit_exact_in_other_blocks(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath, layout: str, unit_count: int
) -> None:
    kv = {"layers": local.layers, "blocks": local.blocks}[layout](blocks=20)
    with local.rig(tmp_path, kernels, kv) as r:
        sources = [11, 2, 7, 19, 0, 5, 13, 4][:unit_count]
        targets = [1, 3, 6, 8, 9, 10, 12, 14][:unit_count]
        expected = [r.kv.unit(block) for block in sources]
        reads = r.save(sources)
        raw = (tmp_path / "data").read_bytes()
        assert [raw[read.lba * LBA_BYTES :][: read.unit_bytes] for read in reads] == expected
        r.kv.fill(4)
        before = r.kv.memory.copy()
        result = wait(r.path.load(into(reads, targets), abandon_after_s=10))
        assert result.failures == ()
        assert result.load_bytes == unit_count * r.kv.layout.unit_bytes
        assert result.seconds > 0
        assert [r.kv.unit(block) for block in targets] == expected
        assert r.kv.untouched_except(before, targets)
        assert r.path.counters.loaded_bytes == r.path.counters.saved_bytes == result.load_bytes


def test_units_out_of_order_are_read_one_by_one(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    with local.rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (3, 2, 1)]
        r.file.reads.clear()
        assert wait(r.path.load(into(reads[::-1], [7, 8, 9]), abandon_after_s=10)).failures == ()
        stride_bytes = -(-r.kv.layout.unit_bytes // LBA_BYTES) * LBA_BYTES
        assert r.file.reads == [(read.lba, stride_bytes) for read in reads[::-1]]
        assert [r.kv.unit(block) for block in (7, 8, 9)] == expected


# ---- what fails ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_bytes", [64 << 10, LBA_BYTES])  # all units in one span, and each in its own
def test_a_flipped_bit_fails_exactly_its_unit(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath, read_bytes: int
) -> None:
    with local.rig(tmp_path, kernels, read_bytes=read_bytes) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (1, 2, 3)]
        flip_bit(tmp_path / "data", reads[1].lba * LBA_BYTES + reads[1].unit_bytes - 1)
        result = wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10))
        (failure,) = result.failures
        assert (failure.index, failure.is_mismatch) == (1, True)
        assert reads[1].digest.hex() in failure.reason
        assert r.path.counters.mismatches == 1
        assert [r.kv.unit(7), r.kv.unit(9)] == [expected[0], expected[2]]


def test_a_flipped_bit_behind_a_unit_is_no_damage(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    kv = local.layers()
    if kv.layout.unit_bytes % LBA_BYTES == 0:
        kv = local.layers(layers=1, page_granules=1)
    if kv.layout.unit_bytes % LBA_BYTES == 0:
        pytest.skip("needs hardware: a drive of blocks smaller than 4096 bytes, or units have no slack")
    with local.rig(tmp_path, kernels, kv) as r:
        reads = r.save([1])
        flip_bit(tmp_path / "data", reads[0].lba * LBA_BYTES + reads[0].unit_bytes)
        assert wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures == ()


def test_without_verification_the_flipped_bit_goes_through(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath
) -> None:
    """The negative control: it is the digest that catches it."""
    with local.rig(tmp_path, kernels, is_digest_right=lambda got, expected: True) as r:
        reads = r.save([1])
        wrong = UnitRead(reads[0].lba, reads[0].unit_bytes, 2, b"\0" * 8)
        assert wait(r.path.load([wrong], abandon_after_s=10)).failures == ()


@pytest.mark.parametrize("digest", [b"", b"\0" * 7, bytearray(8), "text", None])
def test_an_odd_digest_is_never_right(tmp_path: Path, kernels: DigestKernels, local: LocalPath, digest: Any) -> None:
    with local.rig(tmp_path, kernels) as r:
        reads = r.save([1])
        odd = UnitRead(reads[0].lba, reads[0].unit_bytes, 2, digest)
        (failure,) = wait(r.path.load([odd], abandon_after_s=10)).failures
        assert failure.index == 0


def test_a_truncated_file_is_a_failure_not_a_mismatch(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    with local.rig(tmp_path, kernels, read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2, 3])
        with (tmp_path / "data").open("r+b") as raw:
            raw.truncate(reads[2].lba * LBA_BYTES)
        (failure,) = wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures
        assert (failure.index, failure.is_mismatch) == (2, False)
        assert "ends at byte" in failure.reason


@pytest.mark.parametrize("error", [media_error("the drive is gone"), RuntimeError("a bug")])
def test_a_read_error_fails_the_span_and_the_threads_go_on(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath, error: Exception
) -> None:
    with local.rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2])
        r.file.read_error = error
        result = wait(r.path.load(into(reads, [7, 8]), abandon_after_s=10))
        assert sorted(f.index for f in result.failures) == [0, 1]
        assert not any(f.is_mismatch for f in result.failures)
        r.file.read_error = None
        assert wait(r.path.load(into(reads, [7, 8]), abandon_after_s=10)).failures == ()


@pytest.mark.parametrize("block_id", [99, -1])
def test_a_block_out_of_range_fails_the_load_and_the_thread_goes_on(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath, block_id: int
) -> None:
    with local.rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        before = r.kv.memory.copy()
        result = wait(r.path.load(into(reads, [7, block_id, 8]), abandon_after_s=10))
        assert sorted(f.index for f in result.failures) == [0, 1, 2], "the whole span, before any of it is placed"
        assert r.kv.untouched_except(before, [])
        assert wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures == ()


# ---- giving up -----------------------------------------------------------------------------------------------------


def test_abandoned_before_it_is_read_nothing_is(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    """The second span of a load that is given up while the first is under way."""
    with local.rig(tmp_path, kernels, load_threads=1, read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2])
        r.file.reads.clear()
        r.file.may_read.clear()
        before = r.kv.memory.copy()
        job = r.path.load(into(reads, [7, 8]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        job.abandon("preempted")
        r.file.may_read.set()
        assert 1 in [failure.index for failure in wait(job).failures]
        assert wait(r.path.load(into(reads[:1], [7]), abandon_after_s=10)).failures == ()  # the thread is past it
        stride_bytes = -(-reads[0].unit_bytes // LBA_BYTES) * LBA_BYTES
        assert r.file.reads == [(reads[0].lba, stride_bytes)] * 2
        assert r.kv.untouched_except(before, [7])


def test_abandoned_at_any_moment(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    """Memory stands still from the moment that the outcome is told: in the middle of a copy, or while the kernel
    writes it."""
    kv = local.large(40)
    with local.rig(tmp_path, kernels, kv, load_threads=4, read_bytes=128 << 10) as r:
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


def test_a_load_given_up_between_its_turn_and_its_write_touches_nothing(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath
) -> None:
    with local.rig(tmp_path, kernels) as r:
        reads = into(r.save([1, 2]), [7, 8])
        before = r.kv.memory.copy()
        job = LoadJob(reads, time.monotonic() + 60, time.monotonic())
        unit_lbas = -(-reads[0].unit_bytes // LBA_BYTES)
        (span,) = spans_of([read.lba for read in reads], unit_lbas=unit_lbas, read_lbas=r.medium.read_lbas)
        job.abandon("preempted")
        loader = r.medium.loader()
        loader.load(job, span)
        loader.close()
        assert r.kv.untouched_except(before, [])
        result = job.result(time.monotonic())
        assert result is not None
        assert [failure.reason for failure in result.failures] == ["preempted"] * 2


def test_an_empty_load_is_done(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    with local.rig(tmp_path, kernels) as r:
        result = r.path.load([], abandon_after_s=10).result(time.monotonic())
        assert result is not None
        assert (result.load_bytes, result.seconds, result.failures, result.descriptors) == (0, 0.0, (), 0)


# ---- many at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_bytes", [32 << 10, 128 << 10])
@pytest.mark.parametrize("seed", range(4))
def test_many_jobs_of_any_size_at_once(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath, seed: int, read_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    kv = local.any_of(rng, 160, bool(seed % 2))
    with local.rig(tmp_path, kernels, kv, load_threads=4, read_bytes=read_bytes) as r:
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
            assert digests is not None, results[write.save_id[1]].reason
            units += [(read, r.kv.unit(read.block_id)) for read in r.reads(write, digests)]
        targets = (80 + rng.permutation(80)).tolist()
        before = r.kv.memory.copy()
        jobs = []
        while targets:
            start = int(rng.integers(0, len(units)))
            chosen = (units[start:] + units[:start])[: min(len(targets), int(rng.integers(1, 12)))]
            blocks, targets = targets[: len(chosen)], targets[len(chosen) :]
            jobs.append((r.path.load(into([read for read, _ in chosen], blocks), abandon_after_s=30), blocks, chosen))
        for job, blocks, chosen in jobs:
            assert wait(job).failures == ()
            assert [r.kv.unit(block) for block in blocks] == [expected for _, expected in chosen]
        assert r.kv.untouched_except(before, list(range(80, 160)))
