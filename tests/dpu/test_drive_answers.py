"""Drives that do not answer what the service asks of them: bounded waits, and nothing late meets anything new."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu import pool_parts, tidier
from meshfusion.dpu.api.drive_types import DriveStatus, RemoveDriveRequest
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.chunk_mover import ChunkMover
from meshfusion.dpu.drive_answers import DriveAnswers, HangingDriveError
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.pool import Pool, PoolOptions, check_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_tending import Policy
from meshfusion.jbof.drives.life_words import Reason
from meshfusion.jbof.errors import MediaError, PoolBusyError
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu.pool_cases import DEADLINE_S, FULL_SEGMENT_UNITS, SEGMENT_BYTES, SIZE_BYTES, Holder
from tests.host.support.waiting import until

ANSWER_S = 0.5
# Looks answer here: what they tell of a drive that hangs is tested elsewhere.
FAST = DriveOptions(check_interval_s=0.02, probation_s=0.1, answer_deadline_s=ANSWER_S)
EVERYTHING = PoolOptions(policy=Policy.EVERYTHING)


# ---- one drive's answers -----------------------------------------------------------------------------------------


def test_answers_and_errors_are_passed_on() -> None:
    answers = DriveAnswers(3, 10.0, lambda: pytest.fail("nothing was late"))
    assert answers.ask(lambda: 7) == 7

    def fail() -> None:
        raise MediaError("EIO", next_step="replace it")

    with pytest.raises(MediaError, match="EIO"):
        answers.ask(fail)
    assert answers.ask(lambda: 8) == 8, "and then the next one"
    answers.check()


def test_nothing_is_asked_of_a_drive_that_owes_an_answer() -> None:
    again, go_on = threading.Event(), threading.Event()
    asked: list[int] = []
    answers = DriveAnswers(3, 0.05, again.set)
    with pytest.raises(HangingDriveError, match=r"drive 3 has not answered for 0\.05 s") as first:
        answers.ask(lambda: go_on.wait(30))
    assert first.value.is_news
    assert answers.is_late
    began_s = time.monotonic()
    with pytest.raises(HangingDriveError) as later:
        answers.ask(lambda: asked.append(1))
    assert not later.value.is_news
    with pytest.raises(HangingDriveError):
        answers.check()
    assert time.monotonic() - began_s < 10.0, "at once"
    assert asked == []
    assert not again.is_set()
    go_on.set()
    assert again.wait(30)
    assert not answers.is_late
    assert answers.ask(lambda: 9) == 9


# ---- in a pool ---------------------------------------------------------------------------------------------------


class Hanging:
    """What is asked of drive ``number`` through the file that the pool has of it waits while :attr:`hangs`."""

    def __init__(self, pool: Pool, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.asked = 0
        data = pool._drives.files()[number + 1]._data
        for name in ("flush", "deallocate", "write_from", "read_into"):
            monkeypatch.setattr(data, name, self._held(getattr(data, name)))

    def _held(self, do: Callable[..., object]) -> Callable[..., object]:
        def held(*arguments: object) -> object:
            self.asked += 1
            assert self.may_go.wait(60)
            return do(*arguments)

        return held


@pytest.fixture
def count() -> int:
    """Of drives."""
    return 3


@pytest.fixture
def path(tmp_path: Path, count: int) -> Iterator[Path]:
    """All chunks are what they were written as, in the end."""
    pool = tmp_path / "pool"
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None] * count)
    yield pool
    assert check_pool(pool, lambda done, total: None).damaged == ()


def status(pool: Pool, number: int) -> DriveStatus:
    return next(drive for drive in pool.drive_admin.drives(deadline_s=1) if drive.number == number)


def only_read(pool: Pool) -> int:
    return dict(pool.status(deadline_s=DEADLINE_S).counters).get("drives_only_read", 0)


def put(holder: Holder, first: int, count: int) -> dict[int, int]:
    """Full segments of chunks: on which drive each lies."""
    places = {}
    for i in range(first, first + count):
        result = holder.reserve(i, FULL_SEGMENT_UNITS)
        assert result.outcome is ReserveOutcome.GRANTED
        assert holder.commit(result, holder.write(i, result))
        places[i] = drive_of_segment(result.extents[0].segment)
    return places


def reserve_until_it_hangs(holder: Holder, first: int) -> None:
    with pytest.raises(HangingDriveError):  # noqa: PT012 - which of these meets the drive is not known
        for i in range(first, first + 10):
            holder.reserve(i, FULL_SEGMENT_UNITS)


def test_saves_go_elsewhere_until_it_answers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool.open(path, EVERYTHING, drive_options=FAST) as pool, Holder(pool) as holder:
        drive = Hanging(pool, 1, monkeypatch)
        chunks = put(holder, 0, 6)
        assert 1 in chunks.values()
        drive.may_go.clear()
        began_s = time.monotonic()
        reserve_until_it_hangs(holder, 100)
        assert time.monotonic() - began_s < ANSWER_S + 10.0
        asked = drive.asked
        assert 1 not in put(holder, 200, 6).values(), "and none of these fails"
        assert (pool.status(deadline_s=1).saves_stopped_reason, drive.asked) == ("", asked), "nothing more was asked"
        assert (status(pool, 1).problem, only_read(pool)) == ("it does not answer", 1)
        on_it = [i for i, number in chunks.items() if number == 1]
        assert all(holder.match_alone(i).chunks for i in on_it), "hits go on"
        with pytest.raises(PoolBusyError, match="has not answered"):
            pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=0.2)
        holder.ask_again()  # it was not offered while it was to be removed
        drive.may_go.set()
        until(lambda: only_read(pool) == 0, what="for its answer")
        assert status(pool, 1).problem == ""
        unused = iter(range(1000, 10_000))
        until(lambda: 1 in put(holder, next(unused), 1).values(), what="for a save there")


@pytest.mark.parametrize("count", [1])
def test_the_only_drive_stops_saves_until_it_answers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool.open(path, EVERYTHING, drive_options=FAST) as pool, Holder(pool) as holder:
        drive = Hanging(pool, 0, monkeypatch)
        put(holder, 0, 2)
        drive.may_go.clear()
        reserve_until_it_hangs(holder, 100)
        assert holder.reserve(200, FULL_SEGMENT_UNITS).outcome is ReserveOutcome.NO_SPACE
        assert pool.status(deadline_s=1).saves_stopped_reason
        assert holder.match_alone(1).chunks
        drive.may_go.set()
        until(lambda: only_read(pool) == 0, what="for its answer")
        with pool._mutex:
            pool._store.saves._refused_until_s = 0.0  # as if its time were over
        put(holder, 300, 2)


def test_a_drive_that_returns_is_not_used_while_something_may_happen_yet(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through another file, even: what hangs would be done to the drive all the same."""
    with Pool.open(path, EVERYTHING, drive_options=FAST) as pool, Holder(pool) as holder:
        drive = Hanging(pool, 1, monkeypatch)
        put(holder, 0, 6)
        drive.may_go.clear()
        reserve_until_it_hangs(holder, 100)
        (path / "data.1").rename(path / "elsewhere")
        until(lambda: status(pool, 1).reasons == (Reason.ABSENT.value,), what="for its loss")
        (path / "elsewhere").rename(path / "data.1")
        until(lambda: status(pool, 1).reasons == (Reason.REFUSED.value,), what="for its return")
        time.sleep(10 * FAST.check_interval_s)
        assert (status(pool, 1).state, "has not answered" in status(pool, 1).problem) == ("gone", True)
        drive.may_go.set()
        until(lambda: status(pool, 1).state == "online", what="for its answer")
        assert status(pool, 1).problem == ""


def test_the_service_ends_and_keeps_others_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(FAST, check_interval_s=3600.0)
    pool = Pool.open(path, EVERYTHING, drive_options=options)
    holder = Holder(pool)
    drive = Hanging(pool, 1, monkeypatch)
    drive.may_go.clear()
    reserve_until_it_hangs(holder, 100)
    began_s = time.monotonic()
    pool.close()
    assert time.monotonic() - began_s < 10.0
    with pytest.raises(PoolBusyError):
        Pool.open(path)
    drive.may_go.set()
    until(lambda: not pool._drives.answers.late, what="for its answer")
    pool._parts.taken.owner.release()  # as its process' end would
    os.close(holder.lock)
    with Pool.open(path) as again:
        assert again.status(deadline_s=1).segment_count > 0


def test_the_service_ends_while_a_chunk_that_is_moved_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a change of drives, or the return of one, hold up the end."""
    monkeypatch.setattr(pool_parts, "CLOSE_S", 0.2)
    monkeypatch.setattr(tidier, "DURABLE_S", 0.2)
    pool = Pool.open(path, replace(EVERYTHING, free_fraction=0.9), drive_options=replace(FAST, check_interval_s=0.01))
    holder = Holder(pool)
    is_moving, may_go = threading.Event(), threading.Event()

    def hang(*arguments: object) -> frozenset[bytes]:
        is_moving.set()
        assert may_go.wait(60)
        return frozenset()

    monkeypatch.setattr(ChunkMover, "carry_out", hang)
    put(holder, 0, 6)
    assert is_moving.wait(30)
    changes = pool.drive_admin._changes
    with changes:
        began_s = time.monotonic()
        pool.close()
        assert time.monotonic() - began_s < 10.0
    with pytest.raises(PoolBusyError):
        Pool.open(path)
    may_go.set()
    pool._parts.tidier._thread.join(30)
    assert not pool._parts.tidier._thread.is_alive()
    pool._parts.taken.index.close()
    pool._parts.taken.owner.release()  # as its process' end would
    os.close(holder.lock)
    with Pool.open(path) as again:
        assert again.status(deadline_s=1).segment_count > 0
