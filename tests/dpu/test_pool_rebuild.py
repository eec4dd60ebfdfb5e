"""A lost index is made anew from the drive, a damaged pool is repaired, and neither under anybody who uses it."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.index_errors import OtherPoolError
from meshfusion.dpu.pool import Pool, PoolOptions, check_pool, inspect_pool
from meshfusion.dpu.pool_dir import PoolLayout, geometry_of, note_exported, read_label
from meshfusion.dpu.pool_drives import WrongDriveError
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.dpu.pool_repair import repair_pool
from meshfusion.dpu.pool_tending import Policy
from meshfusion.jbof.errors import ConfigError, FormatError, PoolBusyError
from meshfusion.jbof.format import LBA_BYTES, encode_chunk_header
from meshfusion.jbof.policy.write_budget import DAY_S
from tests.dpu import pool_cases
from tests.dpu.pool_cases import FULL_SEGMENT_UNITS, SEGMENT_COUNT, SIZE_BYTES, Holder, key, make_pool
from tests.dpu.test_pool_faults import commit_and_kill, fill_completely
from tests.dpu.test_pool_medium import summarize
from tests.jbof.loop_devices import loop_device_of

KILLS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_pool(tmp_path / "pool")
    return tmp_path / "pool"


def quiet(done: int, total: int) -> None:
    assert done <= total


def fill(path: Path) -> dict[bytes, object]:
    """Segments 0 and 1 settled, with a dropped chunk; 2 open; the others new. What is stored, by key."""
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(0, 3)
        assert holder.put(1, 3)
        assert holder.put(2, FULL_SEGMENT_UNITS)
        assert holder.put(3, 7)
        half = holder.reserve(4, 3)
        assert half.outcome is ReserveOutcome.GRANTED
        assert holder.put(5, 1)
        summarize(pool)
        keys = (key(i) for i in (0, 1, 2, 3, 5))
        found: dict[bytes, object] = {k: pool.get_chunk(k, deadline_s=1) for k in keys}
    assert None not in found.values()
    return found


def stored(path: Path) -> dict[bytes, object]:
    with Pool.open(path) as pool:
        return {k: chunk for k in map(key, range(40)) if (chunk := pool.get_chunk(k, deadline_s=1)) is not None}


def spoil(path: Path, lba: int) -> None:
    with PoolLayout(path).data.open("r+b") as data:
        data.seek(lba * LBA_BYTES + 20)
        byte = data.read(1)[0]
        data.seek(lba * LBA_BYTES + 20)
        data.write(bytes([byte ^ 0x10]))


def test_a_lost_index_is_found_again(path: Path) -> None:
    before = fill(path)
    epoch = inspect_pool(path).epoch
    shutil.rmtree(path / "index")
    with pytest.raises(FormatError, match=r"the index of the pool .* is missing") as caught:
        Pool.open(path)
    assert "mfctl pool rebuild-index" in caught.value.next_step
    rebuilt = rebuild_index(path, quiet)
    report = rebuilt.report
    assert (report.chunks_found, report.segments_with_summary, report.segments_scanned) == (5, 2, 1)
    assert (report.segments_free, rebuilt.reads_failed) == (SEGMENT_COUNT - 3, 0)
    assert rebuilt.epoch == epoch + 1
    assert stored(path) == before
    assert check_pool(path, quiet).damaged == ()
    assert inspect_pool(path).epoch == epoch + 2
    with Pool.open(path) as pool:
        fill_completely(pool)


@pytest.mark.parametrize("made", [[], ["letters"], ["data"]])
def test_nobody_is_told_to_remove_a_directory_that_is_no_pool(tmp_path: Path, made: list[str]) -> None:
    mine = tmp_path / "mine"
    if made:
        mine.mkdir()
    for name in made:
        (mine / name).write_text("not to be lost")
    with pytest.raises(FormatError, match="is not a MeshFusion pool") as told:
        rebuild_index(mine)
    assert "rm -r" not in told.value.next_step
    assert not (mine / "owner.lock").exists()


def test_a_new_index_does_not_fill_budgets_anew(path: Path) -> None:
    now_s = [0.0]
    options = PoolOptions(drive_writes_per_day=1.0, policy=Policy.EVERYTHING)  # six segments, and 1.5 at once
    with Pool.open(path, options, clock=lambda: now_s[0]) as pool, Holder(pool) as holder:
        assert holder.put(0, FULL_SEGMENT_UNITS)
        assert holder.reserve(1, FULL_SEGMENT_UNITS).outcome is ReserveOutcome.NO_SPACE
    spent = rebuild_index(path).budgets
    with Pool.open(path, options, clock=lambda: now_s[0]) as pool, Holder(pool) as holder:
        assert holder.reserve(1, FULL_SEGMENT_UNITS).outcome is ReserveOutcome.NO_SPACE
        now_s[0] += spent.first_segment_s_at_1_dwpd - 60
        assert holder.reserve(1, FULL_SEGMENT_UNITS).outcome is ReserveOutcome.NO_SPACE
        now_s[0] += 61
        assert holder.put(1, FULL_SEGMENT_UNITS), "and they fill with time, as was told"
    assert spent.first_segment_s_at_1_dwpd == pytest.approx(DAY_S / 0.75 / SEGMENT_COUNT)


def test_reads_are_counted(path: Path) -> None:
    """A header for each of 6 segments; two summaries and their three chunks; one scan of 254 blocks with two chunks."""
    fill(path)
    rebuilt = rebuild_index(path, quiet, read_threads=1)
    assert rebuilt.reads == 6 + (2 + 3) + (1 + 1 + 2) + 2, "and the owner's two records"


def test_a_damaged_index_is_replaced(path: Path) -> None:
    before = fill(path)
    (path / "index" / "data.mdb").write_bytes(b"nonsense" * 1000)
    with pytest.raises(FormatError, match="damaged") as caught:
        Pool.open(path)
    assert "rebuild-index" in caught.value.next_step
    rebuild_index(path)
    assert stored(path) == before
    assert {entry.name for entry in path.iterdir()} == {
        *("data", "drives", "holders", "index", "owner.lock", "service.id")
    }


def test_a_chunk_that_was_half_written_or_rotted_is_left_out(path: Path) -> None:
    fill(path)
    lba = geometry_of(read_label(PoolLayout(path))).first_lba
    spoil(path, lba(0) + 1)  # the header of chunk 0, in a summary
    spoil(path, lba(2) + 2)  # a unit of chunk 3, in the open segment
    shutil.rmtree(path / "index")
    report = rebuild_index(path).report
    assert report.chunks_refused == 2
    assert stored(path).keys() == {key(1), key(2), key(5)}


@pytest.mark.parametrize("changes", [{"shard_count": 2}, {"rank": 1, "shard_count": 2}], ids=("first", "second"))
def test_one_shard_never_stands_for_a_chunk_of_several(
    path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    real = encode_chunk_header
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(0)
        with monkeypatch.context() as patch:
            patch.setattr(pool_cases, "encode_chunk_header", lambda header: real(replace(header, **changes)))
            assert holder.put(1)
    (wrong,) = check_pool(path, quiet).damaged
    assert "disagrees with the index in" in wrong
    assert "shard_count" in wrong
    report = rebuild_index(path).report
    assert (report.chunks_found, report.shards_left_out, report.chunks_refused) == (1, 1, 0)
    assert stored(path).keys() == {key(0)}


def test_a_lost_header_takes_its_segment_and_gives_a_later_generation(path: Path) -> None:
    fill(path)
    spoil(path, geometry_of(read_label(PoolLayout(path))).first_lba(1))
    shutil.rmtree(path / "index")
    assert rebuild_index(path).report.segments_free == SEGMENT_COUNT - 2
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert {i for i in range(6) if pool.get_chunk(key(i), deadline_s=1)} == {0, 1, 3, 5}
        results = [holder.reserve(10 + i, FULL_SEGMENT_UNITS) for i in range(4)]
        assert {r.extents[0].segment: r.extents[0].generation for r in results} == {1: 5, 3: 5, 4: 5, 5: 5}, (
            "three openings were seen: 4 is later than any generation, and each is opened once more"
        )


def test_an_index_put_back_from_a_copy_is_refused(path: Path, tmp_path: Path) -> None:
    fill(path)
    shutil.copytree(path / "index", tmp_path / "copy")
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(10, FULL_SEGMENT_UNITS)
    shutil.rmtree(path / "index")
    shutil.copytree(tmp_path / "copy", path / "index")
    with pytest.raises(FormatError, match="is an old copy: it ends with epoch 1, the drive with 2") as caught:
        Pool.open(path)
    assert "rebuild-index" in caught.value.next_step
    rebuild_index(path)
    assert key(10) in stored(path)


def test_nobody_may_use_the_pool_meanwhile(path: Path) -> None:
    with Pool.open(path) as pool:
        with pytest.raises(PoolBusyError, match="in use by process"):
            rebuild_index(path)
        with pytest.raises(PoolBusyError, match="in use by process"):
            repair_pool(path, quiet)
        holder = Holder(pool)
    with pytest.raises(PoolBusyError, match=f"processes that may write .* live: {holder.id}"):
        rebuild_index(path)
    os.close(holder.lock)
    rebuild_index(path)
    assert list((path / "holders").iterdir()) == []


def test_hosts_of_a_target_are_asked_for(path: Path) -> None:
    note_exported(PoolLayout(path), "nvmet, NQNs x")
    with pytest.raises(ConfigError, match=r"was exported .*nvmet, NQNs x") as caught:
        rebuild_index(path)
    assert "--config" in caught.value.next_step
    asked: list[tuple[uuid.UUID, str]] = []

    def has_hosts(pool_uuid: uuid.UUID, exported_as: str) -> bool:
        asked.append((pool_uuid, exported_as))
        return len(asked) == 1

    with pytest.raises(PoolBusyError, match="still serves hosts"):
        rebuild_index(path, has_hosts=has_hosts)
    rebuild_index(path, has_hosts=has_hosts)
    assert asked == [(uuid.UUID(bytes=read_label(PoolLayout(path)).pool_uuid), "nvmet, NQNs x")] * 2


def test_killed_at_any_moment_and_without_the_index(path: Path) -> None:
    rng = random.Random(3)
    for kill in range(KILLS):
        commit_and_kill(path, kill, after_s=rng.uniform(0.0, 0.25))
        committed = inspect_pool(path).committed_chunk_count
        shutil.rmtree(path / "index")
        assert rebuild_index(path).report.chunks_found >= committed
        report = check_pool(path, quiet)
        assert (report.damaged, report.segments_damaged, report.index_damaged) == ((), (), 0)
    with Pool.open(path) as pool:
        fill_completely(pool)


def test_on_a_block_device(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes((SEGMENT_COUNT + 1) << 20))
    with loop_device_of(data) as device:
        make_pool(tmp_path / "pool", device)
        before = fill(tmp_path / "pool")
        shutil.rmtree(tmp_path / "pool" / "index")
        rebuild_index(tmp_path / "pool")
        assert stored(tmp_path / "pool") == before


def test_check_and_repair(path: Path) -> None:
    before = fill(path)
    layout, lba = PoolLayout(path), geometry_of(read_label(PoolLayout(path))).first_lba
    spoil(path, lba(2) + 2)  # a unit of chunk 3
    spoil(path, lba(0))  # a segment's header
    spoil(path, 1)  # a copy of the label
    report = check_pool(path, quiet)
    assert [line.split(":")[0] for line in report.damaged] == [key(3).hex()]
    assert [line.split(":")[0] for line in report.segments_damaged] == ["segment 0"]
    assert len(report.label_problems) == 1
    repaired = repair_pool(path, quiet)
    assert [line.split(":")[0] for line in repaired.chunks_dropped] == [key(3).hex()]
    assert repaired.segments_repaired == report.segments_damaged
    assert repaired.labels_repaired == report.label_problems
    again = check_pool(path, quiet)
    assert (again.damaged, again.segments_damaged, again.label_problems) == ((), (), ())
    assert stored(path) == {k: chunk for k, chunk in before.items() if k != key(3)}
    shutil.rmtree(layout.index)
    assert rebuild_index(path).report.chunks_found == 4, "the repaired segment is found again"


def test_a_check_keeps_to_its_rate(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    report = check_pool(path, quiet, rate_bytes_s=report_bytes(path) / 100.0)
    assert report.chunks_checked == 5
    assert max(slept) == pytest.approx(100.0, abs=20.0), "all of it takes 100 s"


def report_bytes(path: Path) -> int:
    return check_pool(path, quiet).bytes_checked


@pytest.mark.parametrize("is_listed", [True, False])  # pools of before are not
def test_another_pools_drive_is_not_taken_for_ones_own(tmp_path: Path, *, is_listed: bool) -> None:
    """As when device names change: told by whoever meets it, and no index is made anew of it."""
    drives = [tmp_path / "ga", tmp_path / "gb"]
    for i, drive in enumerate(drives):
        drive.touch()
        os.truncate(drive, SIZE_BYTES)
        make_pool(tmp_path / f"pool{i}", drive)
        with Pool.open(tmp_path / f"pool{i}") as pool, Holder(pool) as holder:
            assert holder.put(i)
        if not is_listed:
            (tmp_path / f"pool{i}" / "drives").unlink()
    drives[0].rename(tmp_path / "moved")
    drives[1].rename(drives[0])
    (tmp_path / "moved").rename(drives[1])
    for act in (Pool.open, rebuild_index):
        error = WrongDriveError if is_listed else OtherPoolError
        with pytest.raises(error, match=r"belongs to (the )?pool") as caught:
            act(tmp_path / "pool0")
        assert "put the pool's own drive in its place" in caught.value.next_step
    drives[0].rename(tmp_path / "moved")
    drives[1].rename(drives[0])
    (tmp_path / "moved").rename(drives[1])
    for i in range(2):
        with Pool.open(tmp_path / f"pool{i}") as pool, Holder(pool) as holder:
            assert holder.match_alone(i).chunk_count == i + 1
