"""What the service itself writes: headers before extents leave, summaries of settled segments, deallocations; and what
a medium that refuses one of these costs."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_dir import PoolLayout, geometry_of, read_label
from meshfusion.dpu.pool_medium import FileMedium
from meshfusion.jbof.epoch_record import last_epoch
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import Buffer, DataFile, open_data_file
from meshfusion.jbof.segment_format import SummaryEntry, decode_segment_header, decode_summary
from tests.dpu.pool_cases import DEADLINE_S, FULL_SEGMENT_UNITS, SEGMENT_COUNT, Holder, key, make_pool
from tests.jbof.loop_devices import loop_device_of

FULL_LBAS = 1 + 16 * FULL_SEGMENT_UNITS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_pool(tmp_path / "pool")
    return tmp_path / "pool"


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    with Pool.open(path) as opened:
        yield opened


def blocks(path: Path, lba: int, lba_count: int = 1) -> bytes:
    with PoolLayout(path).data.open("rb") as data:
        data.seek(lba * LBA_BYTES)
        return data.read(lba_count * LBA_BYTES)


def counter(pool: Pool, name: str) -> int:
    return dict(pool.status(deadline_s=DEADLINE_S).counters).get(name, 0)


def summarize(pool: Pool) -> None:
    """Now, instead of within a second."""
    with pool._mutex:
        step = pool._store.summarize(pool._clock())
        pool._transactions.submit(step)
    pool._transactions.wait(step, DEADLINE_S)


def broken(*_: object) -> None:
    raise DataFileError(MediaFault.IO, "writing failed", Path("data"), errno_=errno.EIO)


def data_of(pool: Pool) -> DataFile:
    """The service's own, of its only drive."""
    (sought,) = pool._drives.sought()
    assert sought.open is not None
    return sought.open.file._data


def test_the_header_is_there_when_extents_leave(path: Path, pool: Pool) -> None:
    label, geometry = read_label(PoolLayout(path)), geometry_of(read_label(PoolLayout(path)))
    with Holder(pool) as holder:
        extent = holder.reserve(0).extents[0]
        header = decode_segment_header(blocks(path, geometry.first_lba(extent.segment)))
        assert (header.pool_uuid, header.drive_uuid) == (label.pool_uuid, label.drive_uuid)
        assert (header.segment, header.generation, header.opened_seq) == (extent.segment, extent.generation, 1)
        assert (header.owner_epoch, header.lba) == (1, geometry.first_lba(extent.segment))
        assert extent.lba == header.lba + 1


def test_the_owners_epoch_is_on_the_medium(path: Path) -> None:
    for epoch in (1, 2, 3):
        with Pool.open(path):
            assert last_epoch((blocks(path, 2), blocks(path, 3)), read_label(PoolLayout(path))) == epoch


def test_a_settled_segment_has_a_summary(path: Path, pool: Pool) -> None:
    end_lba = geometry_of(read_label(PoolLayout(path))).end_lba(0)
    with Holder(pool) as holder:
        for i in range(3):
            assert holder.put(i, 3)
        held = holder.reserve(50, 1)  # in segment 0 too
        assert holder.put(3, FULL_SEGMENT_UNITS), "in segment 1"
        summarize(pool)
        assert not any(blocks(path, end_lba - 1)), "a writer is left"
        assert holder.commit(held, holder.write(50, held))
        summarize(pool)
    summary = decode_summary(blocks(path, end_lba - 1), end_lba)
    assert summary.entries == (
        *(SummaryEntry(1 + 49 * i, 49, key(i)[:8]) for i in range(3)),
        SummaryEntry(1 + 49 * 3, 17, key(50)[:8]),
    )
    assert (summary.segment, summary.generation, counter(pool, "segments_summarized")) == (0, 1, 1)


def test_what_was_open_is_summarized_after_a_restart_and_only_once(path: Path) -> None:
    end_lba = geometry_of(read_label(PoolLayout(path))).end_lba(0)
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(0)
    for expected in (1, 0):
        with Pool.open(path) as pool:
            summarize(pool)
            deadline_s = time.monotonic() + DEADLINE_S
            while counter(pool, "segments_summarized") < expected and time.monotonic() < deadline_s:
                time.sleep(0.01)  # the pool's own thread was there first
            assert counter(pool, "segments_summarized") == expected
    assert [entry.key_prefix for entry in decode_summary(blocks(path, end_lba - 1), end_lba).entries] == [key(0)[:8]]


def _can_zero_a_range(probe: Path) -> bool:
    """As a tool of others finds: were it asked of ours, a deallocation that never works would be a skip."""
    probe.write_bytes(bytes(1 << 20))
    command = ("fallocate", "--zero-range", "--length", str(1 << 16), str(probe))
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_a_reclaimed_segment_is_deallocated_behind_its_header(path: Path, pool: Pool) -> None:
    geometry = geometry_of(read_label(PoolLayout(path)))
    with Holder(pool) as holder:
        for i in range(SEGMENT_COUNT):
            assert holder.put(i, FULL_SEGMENT_UNITS)
        before_bytes = PoolLayout(path).data.stat().st_blocks * 512
        assert any(blocks(path, geometry.first_lba(0) + 1, FULL_LBAS))
        assert holder.reserve(10).extents[0].segment == 0
    if not _can_zero_a_range(path.parent / "probe"):
        pytest.skip("needs hardware: a filesystem that can zero a range")
    assert counter(pool, "deallocations_unsupported") == 0
    assert not any(blocks(path, geometry.first_lba(0) + 1, geometry.segment_lba_count - 1))
    assert decode_segment_header(blocks(path, geometry.first_lba(0))).generation == 2
    assert PoolLayout(path).data.stat().st_blocks * 512 == before_bytes, "its space stays its own"
    assert counter(pool, "deallocations_not_kept") == 0


def test_a_medium_that_cannot_deallocate_is_counted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_of(pool), "deallocate", lambda lba, lba_count: False)
    with Holder(pool) as holder:
        assert holder.put(0)
    assert (counter(pool, "deallocations_unsupported"), counter(pool, "segments_deallocated")) == (1, 0)


def test_a_promise_of_zeros_that_is_not_kept_is_counted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Holder(pool) as holder:
        for i in range(SEGMENT_COUNT):
            assert holder.put(i, FULL_SEGMENT_UNITS)
        monkeypatch.setattr(data_of(pool), "deallocate", lambda lba, lba_count: True)
        assert holder.put(10)
    assert counter(pool, "deallocations_not_kept") == 1


@pytest.mark.parametrize("operation", ["write_from", "flush", "deallocate"])
def test_a_failing_opening_costs_one_segment_at_most(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The header, its flush, or the deallocation: no extent leaves, hits go on, and all space comes back."""
    with Holder(pool) as holder:
        for i in range(SEGMENT_COUNT):
            assert holder.put(i, FULL_SEGMENT_UNITS)
        with monkeypatch.context() as patch:
            patch.setattr(data_of(pool), operation, broken)
            for i in range(3):
                with pool._mutex:
                    pool._store.saves._refused_until_s = 0.0  # as if its time were over
                with pytest.raises(MediaError, match="EIO"):
                    holder.reserve(10 + i)
        assert "EIO" in pool.status(deadline_s=1).saves_stopped_reason
        kept = [i for i in range(SEGMENT_COUNT) if pool.get_chunk(key(i), deadline_s=1)]
        assert kept == [1, 2, 3, 4, 5]
        record = pool.get_chunk(key(5), deadline_s=1)
        assert record is not None
        assert pool._store.is_readable(record)
        assert pool.status(deadline_s=1).grant_count == 0
        with pool._mutex:
            pool._store.saves._refused_until_s = 0.0
        result = holder.reserve(20)
        assert result.outcome is ReserveOutcome.GRANTED
        assert (result.extents[0].segment, result.extents[0].generation) == (0, 5)
        assert holder.commit(result, holder.write(20, result))


def test_a_failing_summary_stops_nothing(path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Holder(pool) as holder:
        assert holder.put(0, FULL_SEGMENT_UNITS)
        assert holder.put(1, FULL_SEGMENT_UNITS)
        with monkeypatch.context() as patch:
            patch.setattr(pool._parts.taken.medium, "write_summaries", broken)
            with pytest.raises(MediaError, match="EIO"):
                summarize(pool)
        assert pool.status(deadline_s=1).saves_stopped_reason == ""
        assert holder.put(2, FULL_SEGMENT_UNITS)
        with pool._mutex:
            pool._store._summarizing._from_s = 0.0
        summarize(pool)
        assert counter(pool, "segments_summarized") == 2


def test_a_read_only_medium_serves_hits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(0)

    def read_only(_: type[FileMedium], data: Path) -> FileMedium:
        return FileMedium(open_data_file(data, writable=False))

    monkeypatch.setattr(FileMedium, "open", classmethod(read_only))
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert len(holder.match(0).chunks) == 1
        assert holder.reserve(1).outcome is ReserveOutcome.NO_SPACE
        assert counter(pool, "drives_only_read") == 1
        assert len(holder.match(0).chunks) == 1, "and nothing was reclaimed for it"


def test_on_a_block_device(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.touch()
    data.write_bytes(bytes((SEGMENT_COUNT + 1) << 20))
    with loop_device_of(data) as device:
        make_pool(tmp_path / "pool", device)
        with Pool.open(tmp_path / "pool") as pool, Holder(pool) as holder:
            for i in range(2 * SEGMENT_COUNT):
                assert holder.put(i, FULL_SEGMENT_UNITS)
            assert counter(pool, "segments_deallocated") + counter(pool, "deallocations_unsupported") == 12


def test_a_file_stays_open_until_its_last_user_is_done(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data_file(PoolLayout(path).data, writable=True)
    medium = FileMedium(data)
    is_reading, may_read = threading.Event(), threading.Event()
    read_into = data.read_into

    def slow(lba: int, buffer: Buffer) -> None:
        is_reading.set()
        assert may_read.wait(DEADLINE_S)
        read_into(lba, buffer)

    monkeypatch.setattr(data, "read_into", slow)
    with ThreadPoolExecutor(1) as pool:
        label = pool.submit(medium.read_blocks, 0, 1)
        assert is_reading.wait(DEADLINE_S)
        medium.close()
        with pytest.raises(DataFileError, match="not in use any more"):
            medium.flush()
        may_read.set()
        assert label.result() == PoolLayout(path).data.read_bytes()[:LBA_BYTES]
    with pytest.raises(AssertionError, match="used after close"):
        data.flush()
    medium.close()
