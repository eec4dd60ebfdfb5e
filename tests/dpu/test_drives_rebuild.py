"""The index of a pool of several drives is made anew: with all of them, without one, with a wrong one."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import AbortRequest, ChunkRecord
from meshfusion.dpu.drive_list import read_drive_list, write_drive_list
from meshfusion.dpu.pool import Pool, check_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import WrongDriveError, find_drives
from meshfusion.dpu.pool_place import DRIVE_LIST
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.dpu.pool_remove import remove_drive
from meshfusion.jbof.errors import FormatError, PoolBusyError
from meshfusion.jbof.format import encode_chunk_header
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu import pool_cases
from tests.dpu.pool_cases import DEADLINE_S, SEGMENT_BYTES, SEGMENT_COUNT, SIZE_BYTES, Holder, key, make_pool
from tests.dpu.test_pool_medium import summarize

DRIVES = 3
CHUNKS = 24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Drive 0 in the pool's directory, 1 and 2 outside."""
    outside = [tmp_path / "one", tmp_path / "two"]
    for file in outside:
        file.touch()
        os.truncate(file, SIZE_BYTES)
    create_pool_of_drives(
        tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, *outside]
    )
    return tmp_path / "pool"


def fill(path: Path) -> dict[bytes, ChunkRecord]:
    """Chunks of one shard and of two, some segments settled and some open; and what was given up half-way."""
    with Pool.open(path) as pool, Holder(pool) as holder:
        for i in range(CHUNKS):
            if i % 2:
                holder.put_shards(i)
            else:
                assert holder.put(i)
            if i == CHUNKS // 2:
                summarize(pool)
        given_up = holder.reserve(CHUNKS, shards=2)
        holder.write(CHUNKS, given_up, rank=1)
        pool.abort(AbortRequest(holder.id, holder.attachment.epoch, (given_up.grant_id,)), deadline_s=DEADLINE_S)
        return {k: chunk for k in map(key, range(CHUNKS)) if (chunk := pool.get_chunk(k, deadline_s=DEADLINE_S))}


def stored(path: Path) -> dict[bytes, ChunkRecord]:
    with Pool.open(path) as pool:
        return {k: chunk for k in map(key, range(200)) if (chunk := pool.get_chunk(k, deadline_s=DEADLINE_S))}


def drives_of(chunk: ChunkRecord) -> set[int]:
    return {drive_of_segment(shard.extent.segment) for shard in chunk.shards}


def assert_sound(path: Path, chunk_count: int) -> None:
    report = check_pool(path, lambda done, total: None)
    assert (report.chunks_checked, report.damaged, report.segments_damaged) == (chunk_count, (), ())


def test_a_lost_index_is_found_again_on_all_drives(path: Path) -> None:
    before = fill(path)
    assert len(before) == CHUNKS
    assert any(len(drives_of(chunk)) > 1 for chunk in before.values()), "shards lie on several drives"
    shutil.rmtree(path / "index")
    with pytest.raises(FormatError, match=r"the index of the pool .* is missing") as caught:
        Pool.open(path)
    assert "mfctl pool rebuild-index" in caught.value.next_step
    seen: list[tuple[int, int]] = []
    rebuilt = rebuild_index(path, lambda done, total: seen.append((done, total)))
    report = rebuilt.report
    assert (report.chunks_found, report.shards_left_out, report.chunks_refused) == (CHUNKS, 1, 0)
    assert report.segments_with_summary > 0
    assert report.segments_scanned > 0
    assert (rebuilt.drives_left_out, rebuilt.reads_failed, rebuilt.epoch) == ((), 0, 2)
    assert seen == sorted(seen), "one progress over all drives"
    assert seen[-1] == (2 * DRIVES * SEGMENT_COUNT,) * 2
    assert stored(path) == before
    assert_sound(path, CHUNKS)


def test_openings_go_on_after_those_of_all_drives(path: Path) -> None:
    fill(path)
    with Pool.open(path) as pool:
        records = pool._index.segment_records()
    shutil.rmtree(path / "index")
    rebuild_index(path)
    with Pool.open(path) as pool, Holder(pool) as holder:
        known = {record.segment: record for record in pool._index.segment_records()}
        assert all(replace(known[record.segment], is_summarized=record.is_summarized) == record for record in records)
        last = max(record.opened_seq for record in records)
        for i in range(100, 100 + 3 * DRIVES):
            holder.put_shards(i, units=15, shards=1)
        opened = [record for record in pool._index.segment_records() if record.opened_seq > last]
        assert len(opened) == 3 * DRIVES
        assert min(record.generation for record in opened) > last, "later than any that was seen, on whatever drive"


def test_a_drive_that_is_away_takes_its_chunks_and_is_not_used_before_it_is_indexed(path: Path) -> None:
    before = fill(path)
    away = path.parent / "one"
    away.rename(path.parent / "elsewhere")
    shutil.rmtree(path / "index")
    rebuilt = rebuild_index(path)
    assert rebuilt.drives_left_out == ((1, f"{away} is missing"),)
    left = {k: chunk for k, chunk in before.items() if 1 not in drives_of(chunk)}
    assert 0 < len(left) < CHUNKS
    assert stored(path) == left
    assert rebuilt.report.shards_left_out > 1, "of chunks that lie on it with a part"
    (path.parent / "elsewhere").rename(away)
    held = away.read_bytes()
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert dict(pool.status(deadline_s=DEADLINE_S).counters)["drives_away"] == 1
        holder.put_shards(150)
    assert away.read_bytes() == held, "its segments would count as never used"
    (absent,) = find_drives(PoolLayout(path)).absent
    assert "the index was made anew while" in absent.problem.message
    assert f"mfctl pool rebuild-index {path}" in absent.problem.next_step
    again = rebuild_index(path)
    assert again.drives_left_out == ()
    assert find_drives(PoolLayout(path)).absent == ()
    found = stored(path)
    assert {k: found[k] for k in before} == before, "all that it held is there again"
    assert key(150) in found
    assert_sound(path, CHUNKS + 1)


def test_a_drive_that_cannot_be_read_is_left_out(path: Path) -> None:
    before = fill(path)
    with (path.parent / "two").open("r+b") as data:
        data.write(bytes(2 * 4096))  # both copies of its label
    rebuilt = rebuild_index(path)
    ((number, problem),) = rebuilt.drives_left_out
    assert (number, "not a MeshFusion pool's label" in problem) == (2, True), problem
    assert stored(path) == {k: chunk for k, chunk in before.items() if 2 not in drives_of(chunk)}


def test_a_drive_in_anothers_place_is_refused(path: Path, tmp_path: Path) -> None:
    before = fill(path)
    other = tmp_path / "other"
    other.touch()
    os.truncate(other, SIZE_BYTES)
    make_pool(tmp_path / "another", other)
    one, two = tmp_path / "one", tmp_path / "two"
    for wrong, message in ((two, "is drive 2 of this pool"), (other, "belongs to the pool")):
        kept = one.read_bytes()
        one.write_bytes(wrong.read_bytes())
        with pytest.raises(WrongDriveError, match=message):
            rebuild_index(path)
        assert stored(path) == before, "the index is the old one"
        one.write_bytes(kept)
    listed = read_drive_list(path)
    assert listed is not None
    drive = listed.find(1)
    assert drive is not None
    write_drive_list(path, listed.with_drive(replace(drive, path=two)))
    with pytest.raises(WrongDriveError, match="is drive 2 of this pool"):
        rebuild_index(path)


def test_without_any_drive_nothing_is_made(path: Path) -> None:
    fill(path)
    index = (path / "index" / "data.mdb").read_bytes()
    for file in (path / "data", path.parent / "one", path.parent / "two"):
        file.rename(file.with_name(f"{file.name}-away"))
    with pytest.raises(FormatError, match="is missing"):
        rebuild_index(path)
    assert (path / "index" / "data.mdb").read_bytes() == index


def test_killed_before_the_new_index_is_in_its_place_it_is_done_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fill(path)

    def killed(layout: PoolLayout) -> None:
        raise KeyboardInterrupt

    (path.parent / "one").rename(path.parent / "elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr("meshfusion.dpu.pool_rebuild._swap", killed)
        with pytest.raises(KeyboardInterrupt):
            rebuild_index(path)
    (path.parent / "elsewhere").rename(path.parent / "one")
    (absent,) = find_drives(PoolLayout(path)).absent
    assert absent.number == 1, "nobody knows which index it will be"
    rebuild_index(path)
    assert stored(path) == before


def test_a_drive_that_was_left_out_can_be_given_up(path: Path) -> None:
    fill(path)
    away = path.parent / "one"
    away.rename(path.parent / "elsewhere")
    rebuild_index(path)
    (path.parent / "elsewhere").rename(away)
    left = stored(path)
    assert remove_drive(path, 1) == 0
    assert find_drives(PoolLayout(path)).numbers == {0, 2}
    assert stored(path) == left


def test_shards_of_two_writes_are_never_one_chunk(path: Path) -> None:
    with Pool.open(path) as pool, Holder(pool) as holder:
        first = holder.reserve(0, shards=2)
        holder.write(0, first, rank=0, seed=1)
        pool.abort(AbortRequest(holder.id, holder.attachment.epoch, (first.grant_id,)), deadline_s=DEADLINE_S)
        second = holder.reserve(0, shards=2)
        assert second.grant_id != first.grant_id
        holder.write(0, second, rank=1, seed=2)
        holder.put_shards(1)
    report = rebuild_index(path).report
    assert (report.chunks_found, report.shards_left_out) == (1, 2)
    assert stored(path).keys() == {key(1)}


def test_a_shard_whose_header_names_another_write_is_told_by_the_check(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    with Pool.open(path) as pool, Holder(pool) as holder, monkeypatch.context() as patch:
        real = encode_chunk_header
        patch.setattr(pool_cases, "encode_chunk_header", lambda header: real(replace(header, first_generation=77)))
        holder.put_shards(0)
    (wrong,) = check_pool(path, lambda done, total: None).damaged
    assert "disagrees with the index in first_generation" in wrong


def test_nobody_may_use_a_drive_meanwhile(path: Path) -> None:
    with Pool.open(path), pytest.raises(PoolBusyError):
        rebuild_index(path)


def test_a_list_of_before_says_that_all_drives_are_indexed(path: Path) -> None:
    text = (path / DRIVE_LIST).read_text()
    assert text.count('"is_unindexed": false') == DRIVES
    lines = [line for line in text.splitlines() if "is_unindexed" not in line]
    (path / DRIVE_LIST).write_text("\n".join(lines).replace('"is_draining": false,', '"is_draining": false'))
    assert find_drives(PoolLayout(path)).absent == ()
