"""Pools of several drives: made, served, without one, with a wrong one, one more and one less."""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.drive_list import read_drive_list, write_drive_list
from meshfusion.dpu.pool import Pool, PoolOptions, check_pool, inspect_pool
from meshfusion.dpu.pool_create import add_drive, create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.pool_place import DRIVE_LIST
from meshfusion.dpu.pool_remove import remove_drive, set_draining
from meshfusion.dpu.pool_repair import repair_pool
from meshfusion.dpu.pool_tending import Policy
from meshfusion.jbof.errors import ConfigError, FormatError, PoolBusyError
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segment_format import decode_segment_header
from tests.dpu.pool_cases import (
    DEADLINE_S,
    FULL_SEGMENT_UNITS,
    SEGMENT_BYTES,
    SEGMENT_COUNT,
    SIZE_BYTES,
    Holder,
    key,
    make_pool,
)

DRIVES = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Drive 0 in the pool's directory, 1 and 2 outside."""
    outside = []
    for name in ("one", "two"):
        outside.append(tmp_path / name)
        outside[-1].touch()
        os.truncate(outside[-1], SIZE_BYTES)
    pool = tmp_path / "pool"
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, *outside])
    return pool


def put(path: Path, count: int, first: int = 0) -> Counter[int]:
    """Full segments of chunks; on which drives they lie."""
    drives: Counter[int] = Counter()
    # In a full pool what is worth no more than what it displaces is declined.
    with Pool.open(path, PoolOptions(policy=Policy.EVERYTHING)) as pool, Holder(pool) as holder:
        for i in range(first, first + count):
            result = holder.reserve(i, FULL_SEGMENT_UNITS)
            assert result.outcome is ReserveOutcome.GRANTED
            assert holder.commit(result, holder.write(i, result))
            (extent,) = result.extents
            assert extent.namespace == drive_of_segment(extent.segment) + 1
            drives[drive_of_segment(extent.segment)] += 1
    return drives


def found(path: Path, count: int) -> int:
    """How many of the chunks can be matched, each for itself."""
    with Pool.open(path) as pool, Holder(pool) as holder:
        return sum(len(holder.match_alone(i).chunks) for i in range(count))


def counters(path: Path) -> dict[str, int]:
    with Pool.open(path) as pool:
        return dict(pool.status(deadline_s=DEADLINE_S).counters)


def test_chunks_are_spread_over_the_drives_and_are_all_there(path: Path) -> None:
    drives = put(path, 12)
    assert sorted(drives) == [0, 1, 2]
    assert max(drives.values()) - min(drives.values()) <= 2
    assert found(path, 12) == 12
    report = check_pool(path, lambda done, total: None)
    assert (report.chunks_checked, report.damaged, report.segments_damaged) == (12, (), ())
    status = inspect_pool(path)
    assert (status.segment_count, status.segments_sealed) == (DRIVES * SEGMENT_COUNT, 12)
    assert status.capacity_bytes == DRIVES * SEGMENT_COUNT * SEGMENT_BYTES


def test_headers_say_which_drive_they_are_of(path: Path) -> None:
    put(path, 6)
    for drive in find_drives(PoolLayout(path)).here:
        with drive.path.open("rb") as data:
            data.seek(drive.label.data_start_lba * 4096)
            header = decode_segment_header(data.read(4096))
        assert header.segment == drive.number << 24
        assert (header.drive_number, header.drive_uuid) == (drive.number, drive.label.drive_uuid)


def test_openings_are_numbered_over_all_drives(path: Path) -> None:
    put(path, 9)
    with Pool.open(path) as pool:
        seqs = [record.opened_seq for record in pool._index.segment_records()]
    assert sorted(seqs) == list(range(1, 10))


def test_the_whole_pool_is_reclaimed_before_a_chunk_is_refused(path: Path) -> None:
    count = DRIVES * SEGMENT_COUNT
    assert sum(put(path, 2 * count).values()) == 2 * count
    assert found(path, 2 * count) == count


def test_a_drive_that_is_away_costs_its_chunks_until_it_is_back(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drives = put(path, 12)
    away = path.parent / "one"
    away.rename(path.parent / "elsewhere")
    with caplog.at_level(logging.ERROR):
        assert found(path, 12) == 12 - drives[1]
    assert f"drive 1 is away, and what it holds is not found: {away} is missing" in caplog.text
    assert "mfctl jbof remove" in caplog.text
    assert counters(path)["drives_away"] == 1
    report = check_pool(path, lambda done, total: None)
    assert (report.chunks_checked, report.damaged, report.chunks_away) == (12 - drives[1], (), drives[1])
    repaired = repair_pool(path, lambda done, total: None)
    assert (repaired.chunks_checked, repaired.chunks_dropped, repaired.chunks_away) == (12 - drives[1], (), drives[1])
    assert 1 not in put(path, 4, first=100), "saves go on, elsewhere"
    (path.parent / "elsewhere").rename(away)
    assert found(path, 12) >= drives[1]
    assert "drives_away" not in counters(path)


def test_without_any_drive_the_pool_does_not_open(path: Path) -> None:
    for file in (path / "data", path.parent / "one", path.parent / "two"):
        file.unlink()
    with pytest.raises(FormatError, match="data is missing"):
        Pool.open(path)


def test_a_wrong_drive_is_away_and_nothing_is_written_to_it(path: Path, tmp_path: Path) -> None:
    put(path, 6)
    one, two = tmp_path / "one", tmp_path / "two"
    other = tmp_path / "other"
    other.mkdir()
    (other / "data").touch()
    os.truncate(other / "data", SIZE_BYTES)
    make_pool(other / "pool", other / "data")
    for i, (wrong, message) in enumerate(
        (
            (two.read_bytes(), "is drive 2 of this pool"),
            ((other / "data").read_bytes(), "belongs to the pool"),
            (bytes(SIZE_BYTES), "not a MeshFusion pool's label"),
            (one.read_bytes()[: SIZE_BYTES // 2], "truncated"),
        )
    ):
        kept = one.read_bytes()
        one.write_bytes(wrong)
        (absent,) = find_drives(PoolLayout(path)).absent
        assert (absent.number, message in absent.problem.message) == (1, True), absent.problem.message
        assert absent.problem.next_step
        put(path, 1, first=50 + i)
        assert one.read_bytes() == wrong
        one.write_bytes(kept)


def test_a_drive_that_is_drained_is_read_and_not_written(path: Path) -> None:
    drives = put(path, 12)
    set_draining(path, 1, is_draining=True)
    assert found(path, 12) == 12
    assert counters(path)["drives_only_read"] == 1
    assert set(put(path, 20, first=100)) == {0, 2}
    assert found(path, 12) >= drives[1], "its chunks are not reclaimed"
    set_draining(path, 1, is_draining=False)
    assert set(put(path, 9, first=200)) == {0, 1, 2}


def test_a_removed_drive_takes_its_chunks_along(path: Path) -> None:
    drives = put(path, 12)
    assert remove_drive(path, 1) == drives[1]
    assert found(path, 12) == 12 - drives[1]
    assert (path.parent / "one").exists(), "its data is not ours to delete"
    assert inspect_pool(path).segment_count == 2 * SEGMENT_COUNT
    assert check_pool(path, lambda done, total: None).damaged == ()
    assert remove_drive(path, 0) == drives[0], "the first one is as any other"
    assert not (path / "data").exists()
    assert found(path, 12) == drives[2]
    with pytest.raises(ConfigError, match="has one drive"):
        remove_drive(path, 2)


def test_a_removal_that_was_killed_is_done_again(path: Path) -> None:
    drives = put(path, 12)
    listed = read_drive_list(path)
    assert listed is not None
    write_drive_list(path, listed.without_drive(1))  # as far as it came
    with pytest.raises(FormatError, match="segments of drive 1"):
        Pool.open(path)
    assert remove_drive(path, 1) == drives[1]
    assert found(path, 12) == 12 - drives[1]


def test_a_drive_that_is_added_is_used_and_has_a_new_number(path: Path, tmp_path: Path) -> None:
    put(path, 12)
    remove_drive(path, 2)
    with pytest.raises(FormatError, match="not blank") as refused:
        add_drive(path, size_bytes=SIZE_BYTES, data_path=tmp_path / "two")
    assert "--force --serial two" in refused.value.next_step
    label = add_drive(path, size_bytes=SIZE_BYTES, data_path=tmp_path / "two", overwrite_serial="two")
    assert label.drive_number == 3
    assert 3 in put(path, 9, first=100)
    assert check_pool(path, lambda done, total: None).damaged == ()


def test_a_pool_of_one_drive_gets_a_second(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    make_pool(path)
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(1)
        with pytest.raises(PoolBusyError):
            add_drive(path, size_bytes=SIZE_BYTES)
    assert add_drive(path, size_bytes=2 * SIZE_BYTES).drive_number == 1
    assert set(put(path, 6, first=10)) == {0, 1}
    assert inspect_pool(path).segment_count == SEGMENT_COUNT + 2 * SEGMENT_COUNT + 1
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert len(holder.match_alone(1).chunks) == 1


def test_what_cannot_be_added(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        add_drive(path, size_bytes=SIZE_BYTES, data_path=tmp_path / "none")
    with pytest.raises(ConfigError, match="is drive 1 of this pool"):
        add_drive(path, size_bytes=SIZE_BYTES, data_path=tmp_path / "one", overwrite_serial="one")
    with pytest.raises(ConfigError, match="too small"):
        add_drive(path, size_bytes=SEGMENT_BYTES)
    other = tmp_path / "other"
    other.touch()
    os.truncate(other, SIZE_BYTES)
    with pytest.raises(ConfigError, match="named twice"):
        create_pool_of_drives(
            tmp_path / "new", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[other, other]
        )
    make_pool(tmp_path / "served", other)
    with Pool.open(tmp_path / "served"), pytest.raises(PoolBusyError):
        add_drive(path, size_bytes=SIZE_BYTES, data_path=other, overwrite_serial="other")
    assert len(find_drives(PoolLayout(path)).here) == DRIVES


def test_nobody_who_may_still_write_loses_a_drive(path: Path) -> None:
    with Pool.open(path) as pool:
        holder = Holder(pool)
    with pytest.raises(PoolBusyError, match="may write"):
        remove_drive(path, 1)
    os.close(holder.lock)
    assert remove_drive(path, 1) == 0


def test_unknown_numbers_are_refused(path: Path, tmp_path: Path) -> None:
    for number in (-1, 3, 300):
        with pytest.raises(ConfigError, match=f"no drive {number}"):
            remove_drive(path, number)
        with pytest.raises(ConfigError, match=f"no drive {number}"):
            set_draining(path, number, is_draining=True)
    make_pool(tmp_path / "single")
    with pytest.raises(ConfigError, match="has one drive") as told:
        remove_drive(tmp_path / "single", 0)
    assert told.value.next_step == f"add another first: mfctl jbof add {tmp_path}/single --size SIZE"
    with pytest.raises(ConfigError, match="has one drive"):
        set_draining(tmp_path / "single", 0, is_draining=True)
    set_draining(tmp_path / "single", 0, is_draining=False)
    for number in (1, 9):
        with pytest.raises(ConfigError, match=f"has no drive {number}"):
            remove_drive(tmp_path / "single", number)
        with pytest.raises(ConfigError, match=f"has no drive {number}"):
            set_draining(tmp_path / "single", number, is_draining=False)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "drives": []}'])
def test_a_damaged_list_is_refused(path: Path, text: str) -> None:
    (path / DRIVE_LIST).write_text(text)
    with pytest.raises(FormatError, match="drives is damaged"):
        Pool.open(path)


def test_repair_reaches_every_drive(path: Path) -> None:
    put(path, 6)
    with Pool.open(path) as pool:
        record = next(
            record
            for i in range(6)
            if (record := pool.get_chunk(key(i), deadline_s=DEADLINE_S)) and record.shards[0].extent.namespace == 2
        )
    with (path.parent / "one").open("r+b") as data:
        data.seek((record.shards[0].extent.lba + 1) * 4096)
        data.write(b"rot")
        data.seek(4096)
        data.write(b"rot")  # a copy of its label
    report = repair_pool(path, lambda done, total: None)
    assert [line.split(":")[0] for line in report.chunks_dropped] == [record.key.hex()]
    assert len(report.labels_repaired) == 1
    assert check_pool(path, lambda done, total: None).label_problems == ()


def test_a_copy_of_the_directory_cannot_be_served_beside_it(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    with Pool.open(path), pytest.raises(PoolBusyError):
        Pool.open(tmp_path / "copy")


def test_the_last_drive_is_where_it_was_listed_and_not_where_the_pool_was_made(tmp_path: Path) -> None:
    """Device names change: of several drives the list is corrected, and when the others have left it still counts."""
    first, pool = tmp_path / "nvme1n1", tmp_path / "pool"
    first.touch()
    os.truncate(first, SIZE_BYTES)
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[first, None])
    moved = first.rename(tmp_path / "nvme2n1")
    drives = read_drive_list(pool)
    assert drives is not None
    write_drive_list(pool, drives.with_drive(replace(drives.drives[0], path=moved)))
    remove_drive(pool, 1)
    with Pool.open(pool) as opened, Holder(opened) as holder:
        assert holder.put(1)
    only = read_drive_list(pool)
    assert only is not None
    assert [drive.path for drive in only.drives] == [moved]


def test_a_last_drive_in_the_pools_directory_needs_no_pointer(tmp_path: Path) -> None:
    first, pool = tmp_path / "nvme1n1", tmp_path / "pool"
    first.touch()
    os.truncate(first, SIZE_BYTES)
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[first, None])
    drives = read_drive_list(pool)
    assert drives is not None
    moved = first.rename(pool / "data")
    write_drive_list(pool, drives.with_drive(replace(drives.drives[0], path=moved)))
    remove_drive(pool, 1)
    elsewhere = pool.rename(tmp_path / "elsewhere")
    with Pool.open(elsewhere) as opened, Holder(opened) as holder:
        assert holder.put(1)
