"""Saves of the staged and of the block path, and their end: nothing is told before it is flushed, or forgotten."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import Extent
from meshfusion.host.path.shards import ShardWrite, WriteFate
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES, decode_chunk_header
from meshfusion.jbof.media.fabrics import FabricsLink
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from tests.host.support.data_files import media_error
from tests.host.support.local_paths import LocalPath
from tests.host.support.staged_rig import into


def test_the_header_and_the_slack_on_the_medium(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    with local.rig(tmp_path, kernels) as r:
        with (tmp_path / "data").open("r+b") as file:  # what an earlier save left there
            file.write(b"\xee" * (4 << 20))
        write = r.shard_write(9, [1, 2, 3])
        r.path.save([write])
        digests = r.written(1)[9].unit_digests
        raw = (tmp_path / "data").read_bytes()
        header = decode_chunk_header(raw[write.extent.lba * LBA_BYTES :])
        unit_bytes = r.kv.layout.unit_bytes
        assert header.unit_digests == digests
        assert (header.key, header.lba, header.unit_bytes) == (write.header.key, write.extent.lba, unit_bytes)
        first, end = write.extent.lba * LBA_BYTES, (write.extent.lba + write.extent.lba_count) * LBA_BYTES
        stride = -(-unit_bytes // LBA_BYTES) * LBA_BYTES
        for unit in range(3):
            slack = raw[first + LBA_BYTES + unit * stride + unit_bytes : first + LBA_BYTES + (unit + 1) * stride]
            assert len(slack) == stride - unit_bytes
            assert slack or local.name == "block", "drives may ask for units without any"
            assert not any(slack)
        assert raw[first - LBA_BYTES : first] == raw[end : end + LBA_BYTES] == b"\xee" * LBA_BYTES, "and nothing else"


# ---- saves that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [media_error("no space"), RuntimeError("a bug")])
def test_a_write_error_fails_that_save_only(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath, error: Exception
) -> None:
    with local.rig(tmp_path, kernels) as r:
        writes = [r.shard_write(i, [i, i + 1]) for i in range(3)]
        r.file.write_error[writes[1].extent.lba] = error
        r.path.save(writes)
        results = r.written(3)
        assert [results[i].unit_digests is None for i in range(3)] == [False, True, False]
        assert results[1].reason
        assert r.file.flush_count == 1


FABRICS = (FabricsLink("nvme0", "tcp", 5),)
LOST = DataFileError(MediaFault.IO, "writing failed", Path("/dev/nvme0n1"), errno_=errno.EIO)
GONE = DataFileError(MediaFault.MISSING, "writing failed", Path("/dev/nvme0n1"), errno_=errno.ENXIO)
SHORT = DataFileError(MediaFault.SHORT, "it ends inside a write", Path("/dev/nvme0n1"))


@pytest.mark.parametrize(
    ("fabrics", "error", "fate"),
    [
        ((), LOST, WriteFate.FAILED),  # a drive of this machine: the call has returned, nothing is under way
        (FABRICS, LOST, WriteFate.UNKNOWN),
        (FABRICS, GONE, WriteFate.UNKNOWN),
        (FABRICS, SHORT, WriteFate.FAILED),  # it was not begun
        (FABRICS, media_error("no digests"), WriteFate.FAILED),
    ],
)
def test_what_is_known_of_a_write_that_failed(
    tmp_path: Path,
    kernels: DigestKernels,
    local: LocalPath,
    fabrics: tuple[FabricsLink, ...],
    error: MediaError,
    fate: WriteFate,
) -> None:
    with local.rig(tmp_path, kernels) as r:
        r.file.fabrics = fabrics
        write = r.shard_write(1, [1, 2])
        r.file.write_error[write.extent.lba] = error
        r.path.save([write, r.shard_write(2, [3])])
        results = r.written(2)
        assert (results[1].fate, results[1].unit_digests) == (fate, None)
        assert error.message in results[1].reason
        assert ("nvme0 it may still be done" in results[1].reason) == (fate is WriteFate.UNKNOWN)
        assert results[2].fate is WriteFate.DURABLE


def test_a_write_in_doubt_stays_so_when_its_batch_is_not_flushed(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath
) -> None:
    with local.rig(tmp_path, kernels) as r:
        r.file.fabrics = FABRICS
        write = r.shard_write(1, [1])
        r.file.write_error[write.extent.lba] = LOST
        r.file.flush_error = media_error("the flush failed")
        r.path.save([write, r.shard_write(2, [3])])
        assert [result.fate for _, result in sorted(r.written(2).items())] == [WriteFate.UNKNOWN, WriteFate.FAILED]


@pytest.mark.parametrize("error", [media_error("the flush failed"), RuntimeError("a bug")])
def test_a_flush_error_fails_the_whole_batch(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath, error: Exception
) -> None:
    with local.rig(tmp_path, kernels) as r:
        r.file.flush_error = error
        r.path.save([r.shard_write(i, [i]) for i in range(3)])
        results = r.written(3)
        assert all(result.unit_digests is None and result.reason for result in results.values())
        r.file.flush_error = None
        assert r.save([1], 9)  # the next batch is not affected


def test_nothing_is_told_before_it_is_written_and_flushed(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath
) -> None:
    """On the block path the blocks themselves are what is written from."""
    with local.rig(tmp_path, kernels) as r:
        r.file.may_write.clear()
        r.path.save([r.shard_write(1, [1])])
        assert r.file.waiting_writers.acquire(timeout=5)
        assert r.path.take_written() == []
        assert r.file.flush_count == 0
        r.file.may_write.set()
        r.written(1)
        assert r.file.flush_count == 1


def test_an_extent_of_another_size_fails_the_save(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    with local.rig(tmp_path, kernels) as r:
        write = r.shard_write(1, [1, 2])
        odd = Extent(1, 0, write.extent.lba, write.extent.lba_count + 1, 1)
        before = (tmp_path / "data").read_bytes()
        r.path.save([ShardWrite((0, 1), odd, write.header, write.block_ids)])
        assert r.written(1)[1].unit_digests is None
        assert (tmp_path / "data").read_bytes() == before


def test_a_shard_behind_the_end_is_not_written(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    with local.rig(tmp_path, kernels) as r:
        r.next_lba = r.file.lba_count - 1
        r.path.save([r.shard_write(1, [1, 2])])
        assert "inside a write" in r.written(1)[1].reason
        assert (tmp_path / "data").stat().st_size == r.file.size_bytes


# ---- closing -------------------------------------------------------------------------------------------------------


def test_closing_reports_queued_saves_and_ends_queued_loads(
    tmp_path: Path, kernels: DigestKernels, local: LocalPath
) -> None:
    made = local.made(tmp_path, kernels, load_threads=1)
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


def test_closing_an_idle_path(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> None:
    made = local.made(tmp_path, kernels)
    assert made.path.close()
    assert made.file.is_closed
