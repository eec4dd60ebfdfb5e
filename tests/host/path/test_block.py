"""The block path on real files: straight into KV memory, whole or failed, and never after it was said to be over."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfusion.dpu.api.types import Extent
from meshfusion.host.path.block import block_path
from meshfusion.host.path.block_layout import check_direct
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.shards import ShardWrite
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES, decode_chunk_header
from meshfusion.jbof.media.file import create_data_file, open_data_file
from meshfusion.jbof.media.vectors import MAX_VECTORS
from tests.host.support.block_rig import BlockRig, block_rig, blocks_of, granule_or_skip, layers_of
from tests.host.support.data_files import media_error
from tests.host.support.kv_memory import KvMemory
from tests.host.support.shard_writes import reads_of, shard_write
from tests.host.support.staged_rig import FIRST_LBA, MAX_UNITS, into, wait
from tests.host.support.waiting import until
from tests.jbof.loop_devices import loop_device_of

MakeKv = Callable[..., KvMemory]


@pytest.fixture
def granule(tmp_path: Path) -> int:
    return granule_or_skip(tmp_path)


@pytest.mark.parametrize("make_kv", [layers_of, blocks_of])
@pytest.mark.parametrize("unit_count", [1, 3, 8])
def test_saved_units_come_back_bit_exact_in_other_blocks(
    tmp_path: Path, kernels: DigestKernels, granule: int, make_kv: MakeKv, unit_count: int
) -> None:
    with block_rig(tmp_path, kernels, make_kv(granule, blocks=20)) as r:
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
        assert [r.kv.unit(block) for block in targets] == expected
        assert r.kv.untouched_except(before, targets)
        assert r.path.counters.loaded_bytes == r.path.counters.saved_bytes == result.load_bytes


def test_the_header_and_the_slack_on_the_medium(tmp_path: Path, kernels: DigestKernels, granule: int) -> None:
    kv = layers_of(granule)
    with block_rig(tmp_path, kernels, kv) as r:
        with (tmp_path / "data").open("r+b") as file:  # what an earlier save left there
            file.write(b"\xee" * (4 << 20))
        write = r.shard_write(9, [1, 2, 3])
        r.path.save([write])
        digests = r.written(1)[9].unit_digests
        raw = (tmp_path / "data").read_bytes()
        header = decode_chunk_header(raw[write.extent.lba * LBA_BYTES :])
        assert header.unit_digests == digests
        assert (header.key, header.lba, header.unit_bytes) == (write.header.key, write.extent.lba, kv.layout.unit_bytes)
        first, end = write.extent.lba * LBA_BYTES, (write.extent.lba + write.extent.lba_count) * LBA_BYTES
        stride = -(-kv.layout.unit_bytes // LBA_BYTES) * LBA_BYTES
        slack = raw[first + LBA_BYTES + kv.layout.unit_bytes : first + LBA_BYTES + stride]
        assert len(slack) == stride - kv.layout.unit_bytes
        assert not any(slack)
        assert raw[first - LBA_BYTES : first] == raw[end : end + LBA_BYTES] == b"\xee" * LBA_BYTES, "and nothing else"


# ---- in one call ---------------------------------------------------------------------------------------------------


def test_neighbours_are_read_in_one_call_and_headers_to_nowhere(
    tmp_path: Path, kernels: DigestKernels, granule: int
) -> None:
    """Chunks of one unit each, one behind the other: between two units lies a header."""
    kv = layers_of(granule, page_granules=5 * LBA_BYTES // granule)  # units of 15 blocks: a header is a small gap
    with block_rig(tmp_path, kernels, kv, load_threads=1, read_bytes=1 << 20) as r:
        reads = [r.save([block], save_id=block)[0] for block in (1, 2, 3)]
        assert [b.lba - a.lba for a, b in itertools.pairwise(reads)] == [16, 16]
        expected = [r.kv.unit(block) for block in (1, 2, 3)]
        r.file.reads.clear()
        before = r.kv.memory.copy()
        assert wait(r.path.load(into(reads, [7, 9, 8]), abandon_after_s=10)).failures == ()
        assert r.file.reads == [(reads[0].lba, 47 * LBA_BYTES)]
        assert [r.kv.unit(block) for block in (7, 9, 8)] == expected
        assert r.kv.untouched_except(before, [7, 8, 9])


def test_units_out_of_order_are_read_one_by_one(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (3, 2, 1)]
        r.file.reads.clear()
        assert wait(r.path.load(into(reads[::-1], [7, 8, 9]), abandon_after_s=10)).failures == ()
        assert [lba for lba, _ in r.file.reads] == [read.lba for read in reads[::-1]]
        assert [r.kv.unit(block) for block in (7, 8, 9)] == expected


def test_more_runs_than_one_call_takes(
    tmp_path: Path, kernels: DigestKernels, granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return preadv(fd, buffers, offset)

    layers = 64 << 10 >> granule.bit_length() - 1  # units of 64 KiB, the most that the kernels have keys for
    kv = layers_of(granule, layers=layers, page_granules=1, blocks=20)
    with block_rig(tmp_path, kernels, kv, load_threads=1, read_bytes=1 << 20) as r:
        reads = r.save([0, 1, 2, 3, 4, 5, 6, 7], 1) + r.save([8, 9], 2)
        expected = [r.kv.unit(block) for block in range(8)]
        monkeypatch.setattr(os, "preadv", counting)
        targets = [19, 18, 17, 16, 15, 14, 13, 12]
        assert wait(r.path.load(into(reads[:8], targets), abandon_after_s=10)).failures == ()
        assert [r.kv.unit(block) for block in targets] == expected
        assert max(calls) <= MAX_VECTORS
        assert sum(calls) == 8 * layers


# ---- what fails ----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_fails_exactly_its_unit(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (1, 2, 3)]
        _flip(tmp_path / "data", reads[1].lba * LBA_BYTES + reads[1].unit_bytes - 1)
        result = wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10))
        (failure,) = result.failures
        assert (failure.index, failure.is_mismatch) == (1, True)
        assert reads[1].digest.hex() in failure.reason
        assert r.path.counters.mismatches == 1
        assert [r.kv.unit(7), r.kv.unit(9)] == [expected[0], expected[2]]


def test_a_flipped_bit_behind_a_unit_is_no_damage(tmp_path: Path, kernels: DigestKernels, granule: int) -> None:
    kv = layers_of(granule)
    if kv.layout.unit_bytes % LBA_BYTES == 0:
        kv = layers_of(granule, layers=1, page_granules=1)
    if kv.layout.unit_bytes % LBA_BYTES == 0:
        pytest.skip("needs hardware: a drive of blocks smaller than 4096 bytes, or units have no slack")
    with block_rig(tmp_path, kernels, kv) as r:
        reads = r.save([1])
        _flip(tmp_path / "data", reads[0].lba * LBA_BYTES + reads[0].unit_bytes)
        assert wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures == ()


def test_without_verification_the_flipped_bit_goes_through(tmp_path: Path, kernels: DigestKernels) -> None:
    """The negative control: it is the digest that catches it."""
    with block_rig(tmp_path, kernels, is_digest_right=lambda got, expected: True) as r:
        reads = r.save([1])
        wrong = UnitRead(reads[0].lba, reads[0].unit_bytes, 2, b"\0" * 8)
        assert wait(r.path.load([wrong], abandon_after_s=10)).failures == ()


def test_a_truncated_file_is_a_failure_not_a_mismatch(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels, read_bytes=LBA_BYTES) as r:
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
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2])
        r.file.read_error = error
        job = r.path.load(into(reads, [7, 8]), abandon_after_s=10)
        result = wait(job)
        assert sorted(f.index for f in result.failures) == [0, 1]
        assert not any(f.is_mismatch for f in result.failures)
        r.file.read_error = None
        assert wait(r.path.load(into(reads, [7, 8]), abandon_after_s=10)).failures == ()


@pytest.mark.parametrize("block_id", [99, -1])
def test_a_block_out_of_range_fails_the_load_before_anything_is_read(
    tmp_path: Path, kernels: DigestKernels, block_id: int
) -> None:
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        r.file.reads.clear()
        before = r.kv.memory.copy()
        result = wait(r.path.load(into(reads, [7, block_id, 8]), abandon_after_s=10))
        assert sorted(f.index for f in result.failures) == [0, 1, 2]
        assert r.kv.untouched_except(before, [])
        assert r.file.reads == []
        assert wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures == ()


def test_on_a_block_device_and_when_it_fails(tmp_path: Path, kernels: DigestKernels) -> None:
    """EIO from the kernel itself: the file below the device ends where the device does not."""
    below = tmp_path / "below"
    create_data_file(below, 4 << 20)
    with loop_device_of(below) as device:
        data = open_data_file(device, writable=True)
        try:
            alignment = check_direct(data)
        except UnsupportedError as error:
            data.close()
            pytest.skip(f"needs hardware: a loop device with O_DIRECT: {error.message}")
        kv = layers_of(alignment.granule_bytes)
        path = block_path(
            data,
            kv.memory,
            kv.layout,
            kernels,
            lba_bytes=LBA_BYTES,
            load_threads=1,
            read_bytes=LBA_BYTES,
            max_units=MAX_UNITS,
        )
        try:
            kv.fill(3)
            expected = kv.unit(2)
            write = shard_write(kv.layout.unit_bytes, [1, 2, 3], FIRST_LBA)
            path.save([write])
            (written,) = until(path.take_written)
            assert written.unit_digests is not None
            reads = reads_of(write, written.unit_digests)
            assert wait(path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures == ()
            assert kv.unit(8) == expected
            os.truncate(below, reads[1].lba * LBA_BYTES)
            failures = wait(path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures
            assert [(failure.index, failure.is_mismatch) for failure in failures] == [(1, False), (2, False)]
            assert all("EIO" in failure.reason for failure in failures)
        finally:
            assert path.close()


# ---- giving up -----------------------------------------------------------------------------------------------------


def test_memory_is_not_told_free_before_the_read_returned(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (1, 2, 3)]
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7, 8, 9]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        started_s = time.monotonic()
        job.abandon("preempted")
        assert time.monotonic() - started_s < 1.0, "abandoning waited for the medium"
        assert job.result(time.monotonic()) is None, "the kernel may still write there"
        assert job.result(job.deadline_s + 3600) is None, "and no time that passes makes it safe"
        r.file.may_read.set()
        result = wait(job)
        assert [(f.index, f.is_mismatch) for f in result.failures] in ([], [(i, False) for i in range(3)])
        after = r.kv.memory.copy()
        assert [r.kv.unit(block) for block in (7, 8, 9)] == expected, "it landed before the outcome was told"
        time.sleep(0.02)
        assert np.array_equal(r.kv.memory, after)
        assert wait(r.path.load(into(reads, [0, 4, 5]), abandon_after_s=10)).failures == ()  # the thread went on


def test_an_abandoned_load_whose_read_fails_is_told_when_it_did(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1])
        r.file.read_error = media_error("Input/output error (EIO)")
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        job.abandon("preempted")
        assert job.result(time.monotonic()) is None
        r.file.may_read.set()
        (failure,) = wait(job).failures
        assert failure.index == 0


def test_abandoned_before_it_is_read_nothing_is(tmp_path: Path, kernels: DigestKernels) -> None:
    """The second span of a load that is given up while the first is under way."""
    with block_rig(tmp_path, kernels, load_threads=1, read_bytes=LBA_BYTES) as r:
        reads = r.save([1, 2])
        r.file.reads.clear()
        r.file.may_read.clear()
        before = r.kv.memory.copy()
        job = r.path.load(into(reads, [7, 8]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        job.abandon("preempted")
        r.file.may_read.set()
        assert 1 in [failure.index for failure in wait(job).failures]
        assert r.file.reads == [(reads[0].lba, -(-reads[0].unit_bytes // LBA_BYTES) * LBA_BYTES)]
        assert r.kv.untouched_except(before, [7])


def test_abandoned_at_any_moment(tmp_path: Path, kernels: DigestKernels, granule: int) -> None:
    """Memory stands still from the moment that the outcome is told, whatever the kernel had under way."""
    kv = blocks_of(granule, blocks=40, layers=1, page_granules=(64 << 10) // granule)
    with block_rig(tmp_path, kernels, kv, load_threads=4, read_bytes=128 << 10) as r:
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


# ---- saves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [media_error("no space"), RuntimeError("a bug")])
def test_a_write_error_fails_that_save_only(tmp_path: Path, kernels: DigestKernels, error: Exception) -> None:
    with block_rig(tmp_path, kernels) as r:
        writes = [r.shard_write(i, [i, i + 1]) for i in range(3)]
        r.file.write_error[writes[1].extent.lba] = error
        r.path.save(writes)
        results = r.written(3)
        assert [results[i].unit_digests is None for i in range(3)] == [False, True, False]
        assert results[1].reason
        assert r.file.flush_count == 1


def test_a_flush_error_fails_the_whole_batch(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels) as r:
        r.file.flush_error = media_error("the flush failed")
        r.path.save([r.shard_write(i, [i]) for i in range(3)])
        assert all(result.unit_digests is None and result.reason for result in r.written(3).values())


def test_blocks_stay_pinned_until_their_write_returned(tmp_path: Path, kernels: DigestKernels) -> None:
    """They are what is written from: nothing is told before."""
    with block_rig(tmp_path, kernels) as r:
        r.file.may_write.clear()
        r.path.save([r.shard_write(1, [1])])
        assert r.file.waiting_writers.acquire(timeout=5)
        assert r.path.take_written() == []
        assert r.file.flush_count == 0
        r.file.may_write.set()
        r.written(1)
        assert r.file.flush_count == 1


def test_an_extent_of_another_size_fails_the_save(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels) as r:
        write = r.shard_write(1, [1, 2])
        odd = Extent(1, 0, write.extent.lba, write.extent.lba_count + 1, 1)
        before = (tmp_path / "data").read_bytes()
        r.path.save([ShardWrite((0, 1), odd, write.header, write.block_ids)])
        assert r.written(1)[1].unit_digests is None
        assert (tmp_path / "data").read_bytes() == before


def test_a_shard_behind_the_end_is_not_written(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels) as r:
        r.next_lba = r.file.lba_count - 1
        r.path.save([r.shard_write(1, [1, 2])])
        assert "inside a write" in r.written(1)[1].reason
        assert (tmp_path / "data").stat().st_size == r.file.size_bytes


# ---- closing and many at once --------------------------------------------------------------------------------------


def test_closing_waits_for_what_the_kernel_has_under_way(tmp_path: Path, kernels: DigestKernels) -> None:
    made = BlockRig(tmp_path / "data", layers_of(granule_or_skip(tmp_path)), kernels, load_threads=1)
    reads = made.save([1])
    made.file.may_read.clear()
    jobs = [made.path.load(into(reads, [block]), abandon_after_s=60) for block in (7, 8)]
    assert made.file.waiting_readers.acquire(timeout=5)
    assert made.path.close(deadline_s=0.05) is False
    assert not made.file.is_closed
    assert jobs[0].result(time.monotonic()) is None
    made.file.may_read.set()
    assert made.path.close() is True
    assert made.file.is_closed
    assert wait(jobs[0]).failures == ()
    assert wait(jobs[1]).failures[0].reason == "the engine is shutting down"


@pytest.mark.parametrize("seed", range(4))
def test_many_jobs_of_any_size_at_once(tmp_path: Path, kernels: DigestKernels, granule: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    make_kv: Any = [layers_of, blocks_of][seed % 2]
    page_granules = int(rng.integers(1, 1 + (16 << 10) // granule))
    kv = make_kv(granule, blocks=160, layers=int(rng.integers(1, 5)), page_granules=page_granules)
    with block_rig(tmp_path, kernels, kv, load_threads=4, read_bytes=128 << 10) as r:
        writes = [
            r.shard_write(i, rng.choice(80, size=int(rng.integers(1, MAX_UNITS + 1)), replace=False).tolist())
            for i in range(8)
        ]
        r.path.save(writes)
        results = r.written(len(writes))
        units: list[tuple[UnitRead, bytes]] = []
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


def _flip(path: Path, at_byte: int) -> None:
    with path.open("r+b") as raw:
        raw.seek(at_byte)
        byte = raw.read(1)[0]
        raw.seek(at_byte)
        raw.write(bytes([byte ^ 0x80]))
        raw.flush()
        os.fsync(raw.fileno())
