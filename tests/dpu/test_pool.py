"""The pool on real files: what it survives, what it refuses, and how it says so."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.index_files import create_index
from meshfusion.dpu.pool import DAMAGE_LINES_PER_MINUTE, Pool, PoolOptions, check_pool, create_pool, inspect_pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import (
    ConfigError,
    FormatError,
    MediaError,
    PoolBusyError,
    ServiceUnavailableError,
    StaleHolderError,
)
from tests.dpu.pool_cases import (
    DEADLINE_S,
    FULL_SEGMENT_UNITS,
    SEGMENT_BYTES,
    SEGMENT_COUNT,
    SIZE_BYTES,
    UNIT_BYTES,
    Holder,
    key,
    make_pool,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_pool(tmp_path / "pool")
    return tmp_path / "pool"


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    with Pool.open(path) as opened:
        yield opened


def quiet(checked: int, total: int) -> None:
    assert checked <= total


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def in_child(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import pathlib, sys; path = pathlib.Path(sys.argv[1]); {code}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def status(pool: Pool) -> api.PoolStatus:
    found = pool.status(deadline_s=DEADLINE_S)
    total = found.segments_free + found.segments_open + found.segments_sealed + found.segments_reclaiming
    assert total == found.segment_count == SEGMENT_COUNT
    return found


def test_chunks_survive_reopening(path: Path) -> None:
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert all(holder.put(i) for i in range(3))
        before = holder.match(0, 1, 2, 3).chunks
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.match(0, 1, 2).chunks == before
        assert [chunk.key for chunk in before] == [key(0), key(1), key(2)]
        assert pool.get_chunk(key(1), deadline_s=1) == before[1]
        assert (status(pool).epoch, status(pool).committed_payload_bytes) == (2, 9 * UNIT_BYTES)
    assert check_pool(path, quiet).damaged == ()
    assert inspect_pool(path).committed_chunk_count == 3


def test_groups_are_committed_together_and_looked_up_together(pool: Pool) -> None:
    """Of chunk 1 nothing is stored in group 0, and nothing needed in group 1: there is nothing to resume with."""
    with Holder(pool) as holder:
        epoch = holder.attachment.epoch
        items = tuple(api.ReserveItem(key(g), g, 0, 16, (api.ShardSize(0, UNIT_BYTES, 3),)) for g in (0, 1))
        grants = pool.reserve(api.ReserveRequest(holder.id, epoch, items), deadline_s=DEADLINE_S).results
        digests = ((b"8 bytes!",) * 3,)
        bundle = tuple(api.CommitItem(grant.grant_id, digests, bundle=5) for grant in grants)
        committed = pool.commit(api.CommitRequest(holder.id, epoch, bundle), deadline_s=DEADLINE_S).committed
        assert committed == (True, True)
        groups = (api.GroupKeys(0, (key(0), b""), (0, 2)), api.GroupKeys(1, (key(1), key(99)), (0, 2)))
        reply = pool.match(api.MatchRequest(holder.id, "r", 16, groups), deadline_s=DEADLINE_S)
        assert (reply.chunk_count, [chunk.key for chunk in reply.chunks]) == (1, [key(0), key(1)])
        first = tuple(api.GroupKeys(group.group, group.keys[:1], group.first_needed[:1]) for group in groups)
        reply = pool.match(api.MatchRequest(holder.id, "r", 16, first), deadline_s=DEADLINE_S)
        assert (reply.chunk_count, [chunk.key for chunk in reply.chunks]) == (1, [key(0), key(1)])


def test_a_full_pool_reclaims_the_least_recently_used_segment(pool: Pool) -> None:
    with Holder(pool) as holder:
        for i in range(SEGMENT_COUNT):
            assert holder.put(i, FULL_SEGMENT_UNITS)
        lease = holder.match(0).lease_id
        pool.release(api.ReleaseRequest(holder.id, (lease,)), deadline_s=1)
        assert holder.put(10, FULL_SEGMENT_UNITS)
        kept = [i for i in range(SEGMENT_COUNT) if pool.get_chunk(key(i), deadline_s=1)]
        assert kept == [0, 2, 3, 4, 5], "1 was the oldest, 0 has been asked for since"
        assert status(pool).committed_chunk_count == SEGMENT_COUNT


def test_nothing_outlives_its_holder(pool: Pool) -> None:
    with Holder(pool) as holder:
        holder.put(0)
        holder.match(0)
        holder.reserve(1)
        assert (status(pool).lease_count, status(pool).grant_count) == (1, 1)
    assert (status(pool).lease_count, status(pool).grant_count, status(pool).pinned_bytes) == (0, 0, 0)
    assert status(pool).holders == ()


def test_a_holder_that_still_lives_is_not_believed_gone(pool: Pool) -> None:
    holder = Holder(pool)
    holder.reserve(1)
    pool.detach(api.DetachRequest(holder.id), deadline_s=DEADLINE_S)
    assert status(pool).grant_count == 1
    holder.leave()
    assert status(pool).grant_count == 0


def test_a_holder_of_an_earlier_life_is_fenced_when_its_lock_is_free(path: Path) -> None:
    with Pool.open(path) as pool:
        dead, alive = Holder(pool), Holder(pool)
        os.close(dead.lock)
    with Pool.open(path) as pool:
        pool._transactions._writer.wait(1, DEADLINE_S)
        assert {h.holder_id: h.state for h in status(pool).holders} == {alive.id: "former"}
        with pytest.raises(StaleHolderError, match="fenced"):
            Holder(pool, dead.id)
        os.close(alive.lock)


def test_a_reserve_whose_answer_is_lost_leaves_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Holder(pool) as holder:
        with monkeypatch.context() as patch:
            patch.setattr("tests.dpu.pool_cases.DEADLINE_S", 0.0)
            with pytest.raises(ServiceUnavailableError):
                holder.reserve(0)
        assert status(pool).grant_count == 0
        assert holder.put(0)


def test_a_failing_index_stops_saves_and_not_hits(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Holder(pool) as holder:
        holder.put(0)
        result = holder.reserve(1)
        with monkeypatch.context() as patch:
            error = MediaError("disk full", next_step="free some")
            patch.setattr(pool._index, "apply", lambda _: (_ for _ in ()).throw(error))
            with pytest.raises(MediaError, match="disk full"):
                holder.commit(result, holder.write(1, result))
        assert status(pool).saves_stopped_reason.startswith("disk full; free some (for ")
        assert holder.reserve(2).outcome is ReserveOutcome.NO_SPACE
        assert len(holder.match(0, 1).chunks) == 1


def test_a_second_process_is_told_who_owns_the_pool(path: Path, pool: Pool) -> None:
    opening = in_child("from meshfusion.dpu.pool import Pool; Pool.open(path)", path)
    assert opening.returncode == 1
    assert f"PoolBusyError: the pool {path} is in use by process {os.getpid()}" in opening.stderr
    with pytest.raises(PoolBusyError):
        Pool.open(path)
    with pytest.raises(PoolBusyError, match="in this process"):
        inspect_pool(path)
    looking = in_child("from meshfusion.dpu.pool import inspect_pool; print(inspect_pool(path).counters)", path)
    assert "('owned', 1)" in looking.stdout


def test_one_damaged_label_is_not_missed(path: Path) -> None:
    flip(path / "data", 20)
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(0)


def test_two_damaged_labels_are_an_error(path: Path) -> None:
    for lba in (0, 1):
        flip(path / "data", lba * 4096 + 20)
    for attempt in (Pool.open, inspect_pool):
        with pytest.raises(FormatError, match=str(path)):
            attempt(path)


def test_a_pool_of_another_version_is_named(path: Path) -> None:
    for lba in (0, 1):
        flip(path / "data", lba * 4096 + 9)  # inside format_version
    with pytest.raises(FormatError, match="version"):
        Pool.open(path)


@pytest.mark.parametrize("size_bytes", [0, 4096, 2 << 20, SIZE_BYTES - 4096])
def test_truncated_data(path: Path, size_bytes: int) -> None:
    os.truncate(path / "data", size_bytes)
    with pytest.raises(FormatError, match="truncated"):
        Pool.open(path)


@pytest.mark.parametrize("missing", ["index/data.mdb", "index", "data", "."])
def test_missing_parts(path: Path, missing: str) -> None:
    (path / missing).rename(path.parent / "elsewhere")
    with pytest.raises(FormatError) as error:
        Pool.open(path)
    assert str(path) in error.value.message


def test_the_index_of_another_pool(path: Path) -> None:
    (path / "index").rename(path.parent / "elsewhere")
    create_index(path / "index", "00000000-0000-4000-8000-000000000000", SEGMENT_COUNT * SEGMENT_BYTES)
    with pytest.raises(FormatError, match="belongs to pool 00000000"):
        Pool.open(path)
    (path / "index" / "data.mdb").unlink()
    (path / "index" / "lock.mdb").unlink()
    (path / "index").rmdir()
    (path.parent / "elsewhere").rename(path / "index")
    Pool.open(path).close()


def test_a_refused_pool_can_be_opened_once_repaired(path: Path) -> None:
    """A refusal keeps neither the lock nor the index."""
    good = (path / "index" / "data.mdb").read_bytes()
    (path / "index" / "data.mdb").write_bytes(b"nonsense" * 1000)
    for _ in range(2):
        with pytest.raises(FormatError, match="damaged"):
            Pool.open(path)
    (path / "index" / "data.mdb").write_bytes(good)
    Pool.open(path).close()


def test_check_finds_the_damaged_chunk(path: Path) -> None:
    with Pool.open(path) as pool, Holder(pool) as holder:
        for i in range(3):
            holder.put(i)
        extents = [chunk.shards[0].extent for chunk in holder.match(0, 1, 2).chunks]
    flip(path / "data", extents[0].lba * 4096 + 20)
    flip(path / "data", (extents[2].lba + 1) * 4096 + UNIT_BYTES)
    report = check_pool(path, quiet)
    assert report.chunks_checked == 3
    assert [line.split(":")[0] for line in report.damaged] == [key(0).hex(), key(2).hex()]
    assert "unit 1 does not match its digest" in report.damaged[1]
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert pool.drop(api.DropRequest(holder.id, key(2), extents[2], "digest"), deadline_s=DEADLINE_S)
        assert len(holder.match(0, 1, 2).chunks) == 2


def test_reports_of_damage_fill_no_log(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """What a caller says comes into it, of chunks that are not there too, as often as it likes."""
    nowhere = api.Extent(1, 0, 300, 2, 1)
    words = "\x1b[31mowned\r\nERROR meshfusion: \N{SNOWMAN}" + "x" * 4000
    with Holder(pool) as holder, caplog.at_level(logging.WARNING, logger="meshfusion.pool"):
        for i in range(50):
            assert not pool.drop(api.DropRequest(holder.id, key(i), nowhere, words), deadline_s=DEADLINE_S)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == DAMAGE_LINES_PER_MINUTE
    assert all(line.isascii() and line.isprintable() and len(line) < 500 for line in lines)
    assert lines[0].startswith(f"chunk {key(0).hex()} was reported as damaged, '?[31mowned??ERROR meshfusion: ?xx")
    assert "is not there any more" in lines[0]
    assert dict(status(pool).counters)["dropped_reports"] == 50


def test_creation_refuses_what_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="segment size"):
        create_pool(tmp_path / "p", size_bytes=SIZE_BYTES, segment_bytes=5000)
    with pytest.raises(ConfigError, match="too small"):
        create_pool(tmp_path / "p", size_bytes=2 << 20, segment_bytes=SEGMENT_BYTES)
    with pytest.raises(ConfigError, match="does not exist"):
        make_pool(tmp_path / "no" / "p")
    with pytest.raises(ConfigError, match="no-device does not exist: it must name an existing"):
        make_pool(tmp_path / "p", tmp_path / "no-device")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        make_pool(tmp_path / "full")
    assert [entry.name for entry in tmp_path.iterdir()] == ["full"]


def test_data_may_lie_elsewhere_and_must_be_blank(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    os.truncate(device, SIZE_BYTES)
    make_pool(tmp_path / "p", device)
    with Pool.open(tmp_path / "p") as pool, Holder(pool) as holder:
        assert holder.attachment.namespaces[0].path == str(device)
        assert holder.put(0)
    with pytest.raises(FormatError, match="not blank"):
        make_pool(tmp_path / "q", device)
    device.unlink()
    with pytest.raises(FormatError, match="missing"):
        Pool.open(tmp_path / "p")
    assert PoolLayout(tmp_path / "p").data == device


def test_an_incarnation_cannot_leave_the_pool(pool: Pool, tmp_path: Path) -> None:
    victim = tmp_path / "victim.alive"
    victim.touch()
    pool.detach(api.DetachRequest("../../victim"), deadline_s=DEADLINE_S)
    assert victim.exists()


def test_time_ends_what_nobody_renews(path: Path) -> None:
    now_s = [0.0]
    with Pool.open(path, PoolOptions(), clock=lambda: now_s[0]) as pool, Holder(pool) as holder:
        holder.put(0)
        holder.match(0)
        late = holder.reserve(1)
        now_s[0] = 100.0
        with pool._mutex:
            pool._store.tick(now_s[0])
        assert (status(pool).lease_count, status(pool).segments_quarantined) == (0, 1)
        assert not holder.commit(late, holder.write(1, late))
        assert status(pool).segments_quarantined == 0
