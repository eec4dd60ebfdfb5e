"""Saves of the staged path, and its end: nothing is reported before it is flushed, nothing is forgotten."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import Extent
from meshfusion.host.path.shards import ShardWrite
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import (
    LBA_BYTES,
    decode_chunk_header,
)
from tests.host.support.data_files import media_error
from tests.host.support.kv_memory import layer_outermost
from tests.host.support.staged_rig import Rig, into, rig


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
