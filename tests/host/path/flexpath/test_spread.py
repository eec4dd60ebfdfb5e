"""Single cases that the simulation meets among many: what is said to whom, and what is not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.requests import (
    Attempt,
    Begin,
    Kind,
    NoPathError,
    PathChanged,
    RequestLateError,
    TooManyRequestsError,
)
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.spread import Spread
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.queue_effects import CommandDeadlineError, QueueFullError, QueueLostError
from meshfusion.jbof.nvme.transfer_effects import (
    PathUnusableError,
    TransferDone,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)

MIB = 1 << 20
GOOD = {1: AnaState.OPTIMIZED}
LOST = QueueLostError("lost", next_step="none")


class Rig:
    """Two paths that are connected, and what was told."""

    def __init__(self, paths: int = 2, **settings: Any) -> None:
        self.spread = Spread(SpreadSettings(**settings), [1.0] * paths)
        self.attempts: list[Attempt] = []
        self.told: list[Any] = []
        self.states: dict[int, PathState] = {}
        self.now_s = 100.0
        for path in range(paths):
            self.take(self.spread.connected(self.now_s, path, GOOD))

    def take(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Begin(attempt):
                    self.attempts.append(attempt)
                case PathChanged(path, state):
                    self.states[path] = state
                case _:
                    self.told.append(effect)

    def begin(self, owner: object, kind: Kind = Kind.READ, timeout_s: float = 10.0, length_bytes: int = MIB) -> None:
        deadline_s = self.now_s + timeout_s
        self.take(self.spread.begin(self.now_s, owner, kind, 1, length_bytes, deadline_s))

    def say(self, effect: Any) -> None:
        self.take(self.spread.on_transfer(self.now_s, effect))

    def after(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.005
            self.take(self.spread.tick(self.now_s))

    def last(self) -> Attempt:
        return self.attempts[-1]


def test_a_silent_path_gets_nothing_new_until_it_answers() -> None:
    rig = Rig()
    rig.begin("a", Kind.WRITE)
    rig.begin("b")
    first, second = rig.attempts
    assert {first.path, second.path} == {0, 1}
    rig.say(TransferDone(second))
    rig.after(0.15)
    assert rig.states[first.path] is PathState.SUSPECT
    for owner in range(6):
        rig.begin(owner, length_bytes=64 * 1024)
    assert {attempt.path for attempt in rig.attempts[2:]} == {second.path}
    rig.say(TransferDone(first))
    assert rig.states[first.path] is PathState.LIVE
    rig.begin("c")
    assert rig.last().path == first.path


def test_a_read_is_given_up_in_time_for_a_replay_and_a_write_is_not() -> None:
    rig = Rig(patience_s=0.4)
    rig.begin("read")
    rig.begin("write", Kind.WRITE)
    read, write = rig.attempts
    assert read.deadline_s == pytest.approx(rig.now_s + 0.4)
    assert write.deadline_s == rig.now_s + 10


def test_on_the_only_path_a_read_has_all_its_time() -> None:
    rig = Rig(paths=1)
    rig.begin("read")
    assert rig.last().deadline_s == rig.now_s + 10


def test_a_read_is_replayed_elsewhere_when_its_memory_is_free() -> None:
    rig = Rig()
    rig.begin("a")
    first = rig.last()
    rig.say(TransferInDoubt(first, LOST))
    rig.after(0.5)
    assert rig.attempts == [first]
    assert rig.told == []
    rig.say(TransferMemoryFree(first))
    assert rig.last().path != first.path
    rig.say(TransferDone(rig.last()))
    assert rig.told == [TransferDone("a")]
    assert rig.spread.open_count == 0


def test_a_read_whose_memory_is_not_free_is_told_in_doubt_at_its_deadline() -> None:
    rig = Rig()
    rig.begin("a", timeout_s=1.0)
    rig.say(TransferInDoubt(rig.last(), LOST))
    rig.after(0.99)
    assert rig.told == []
    rig.after(0.02)
    assert rig.told == [TransferInDoubt("a", LOST)]
    rig.say(TransferMemoryFree(rig.attempts[0]))
    assert rig.told[1:] == [TransferMemoryFree("a")]
    assert len(rig.attempts) == 1


def test_a_write_in_doubt_is_told_at_once_and_never_sent_again() -> None:
    rig = Rig()
    rig.begin("a", Kind.WRITE)
    rig.say(TransferInDoubt(rig.last(), LOST))
    assert rig.told == [TransferInDoubt("a", LOST)]
    rig.say(TransferMemoryFree(rig.attempts[0]))
    rig.after(3.0)
    assert rig.told[1:] == [TransferMemoryFree("a")]
    assert len(rig.attempts) == 1


def test_a_write_that_was_not_sent_goes_elsewhere() -> None:
    rig = Rig()
    rig.begin("a", Kind.WRITE)
    rig.say(TransferFailed(rig.last(), LOST, is_retryable=True))
    first, second = rig.attempts
    assert first.path != second.path
    assert rig.told == []


def test_what_cannot_succeed_is_not_repeated() -> None:
    rig = Rig()
    rig.begin("a")
    error = MediaError("unrecovered read error", next_step="look")
    rig.say(TransferFailed(rig.last(), error, is_retryable=False))
    assert rig.told == [TransferFailed("a", error, is_retryable=False)]


def test_it_is_not_repeated_for_ever() -> None:
    rig = Rig(max_attempts=3)
    rig.begin("a")
    error = MediaError("try again", next_step="look")
    for _ in range(3):
        assert rig.told == []
        rig.say(TransferFailed(rig.last(), error, is_retryable=True))
    assert rig.told == [TransferFailed("a", error, is_retryable=True)]
    assert set(rig.states.values()) == {PathState.LIVE}, "the namespace failed, not its paths"


def test_a_full_initiator_is_no_broken_path() -> None:
    rig = Rig(max_attempts=20)
    rig.begin("a")
    for _ in range(10):
        rig.say(TransferFailed(rig.last(), QueueFullError("full", next_step="wait"), is_retryable=True))
    assert set(rig.states.values()) == {PathState.LIVE}


def test_a_path_that_refuses_is_not_asked_until_it_says_more() -> None:
    rig = Rig()
    rig.begin("a")
    refused = rig.last().path
    rig.say(TransferFailed(rig.last(), PathUnusableError("inaccessible", next_step="none"), is_retryable=True))
    for owner in range(5):
        rig.begin(owner, length_bytes=1000)
    assert {attempt.path for attempt in rig.attempts[1:]} == {1 - refused}
    rig.take(rig.spread.access_changed(rig.now_s, refused, GOOD))
    rig.begin("b", length_bytes=1000)
    assert rig.last().path == refused


def test_without_a_path_it_fails_at_once_and_says_why() -> None:
    rig = Rig()
    rig.take(rig.spread.lost(rig.now_s, 0))
    rig.take(rig.spread.access_changed(rig.now_s, 1, {1: AnaState.INACCESSIBLE}))
    rig.begin("a")
    ((_, error, is_retryable),) = rig.told
    assert isinstance(error, NoPathError)
    assert "path 0: quarantined, path 1: inaccessible" in error.message
    assert is_retryable


def test_after_a_target_was_killed_again_and_again_all_paths_are_soon_back() -> None:
    """Quarantine is for a path that others can stand in for. Without that rule: 16 s after the fifth time."""
    rig = Rig(quarantine_s=1.0, quarantine_max_s=30.0)
    for _ in range(5):
        for path in (0, 1):
            rig.take(rig.spread.lost(rig.now_s, path))
        rig.after(0.3)
        for path in (0, 1):
            rig.take(rig.spread.connected(rig.now_s, path, GOOD))
        rig.after(0.65)
        assert set(rig.states.values()) == {PathState.QUARANTINED}
        rig.after(0.1)
        assert set(rig.states.values()) == {PathState.REENTERING}


def test_while_another_path_leads_there_one_that_fails_often_stays_out() -> None:
    rig = Rig(quarantine_s=1.0, quarantine_max_s=30.0)
    for pause_s in (1.0, 2.0, 4.0, 8.0):
        rig.take(rig.spread.lost(rig.now_s, 1))
        rig.take(rig.spread.connected(rig.now_s, 1, GOOD))
        rig.after(pause_s - 0.02)
        assert rig.states.get(1) is PathState.QUARANTINED
        rig.after(0.04)
        assert rig.states.get(1) is PathState.REENTERING


def test_one_that_alone_leads_to_a_namespace_is_soon_back_beside_another_that_is_well() -> None:
    rig = Rig(quarantine_s=1.0, quarantine_max_s=30.0)
    for _ in range(4):
        rig.take(rig.spread.lost(rig.now_s, 1))
        rig.take(rig.spread.connected(rig.now_s, 1, {2: AnaState.OPTIMIZED}))
        rig.after(0.98)
        assert rig.states.get(1) is PathState.QUARANTINED
        rig.after(0.04)
        assert rig.states.get(1) is PathState.REENTERING


def test_while_the_only_path_is_suspect_it_waits() -> None:
    rig = Rig(paths=1)
    rig.begin("a", Kind.WRITE)
    rig.after(0.2)
    rig.begin("b")
    assert rig.told == []
    rig.say(TransferDone(rig.attempts[0]))
    assert rig.last().request.owner == "b"


def test_what_waited_too_long_fails_without_being_sent() -> None:
    rig = Rig(paths=1, max_outstanding_bytes=2 * MIB)
    rig.begin("a", Kind.WRITE, length_bytes=2 * MIB)
    rig.begin("b", timeout_s=0.5)
    rig.after(0.51)
    ((owner, error, _),) = rig.told
    assert owner == "b"
    assert isinstance(error, RequestLateError)
    assert len(rig.attempts) == 1


def test_more_than_may_wait_is_refused() -> None:
    rig = Rig(paths=1, max_waiting=2)
    for owner in range(4):
        rig.begin(owner, Kind.WRITE, length_bytes=64 * MIB)
    ((owner, error, _),) = rig.told
    assert owner == 3
    assert isinstance(error, TooManyRequestsError)


def test_what_the_path_had_no_time_for_counts_against_it() -> None:
    rig = Rig()
    rig.begin("a")
    late = CommandDeadlineError("late", next_step="none")
    rig.say(TransferFailed(rig.last(), late, is_retryable=True))
    assert rig.states[rig.attempts[0].path] is PathState.QUARANTINED
    assert rig.last().path != rig.attempts[0].path


def test_a_disabled_path_gets_nothing_new_and_ends_what_it_has() -> None:
    rig = Rig()
    rig.begin("a")
    first = rig.last()
    rig.take(rig.spread.disable(rig.now_s, first.path))
    for owner in range(5):
        rig.begin(owner, Kind.WRITE, length_bytes=1000)
    assert {attempt.path for attempt in rig.attempts[1:]} == {1 - first.path}
    assert rig.told == [], "what it has is neither replayed nor given up"
    rig.say(TransferDone(first))
    assert rig.told == [TransferDone("a")]
    assert set(rig.states.values()) == {PathState.LIVE}
    assert rig.spread.lanes[first.path].health.strikes == 0
    rig.take(rig.spread.enable(rig.now_s, first.path))
    rig.begin("b", length_bytes=1000)
    assert rig.last().path == first.path, "at once, and in full"


def test_what_a_disabled_path_fails_goes_elsewhere() -> None:
    rig = Rig()
    rig.begin("a")
    first = rig.last()
    rig.take(rig.spread.disable(rig.now_s, first.path))
    rig.say(TransferFailed(first, LOST, is_retryable=True))
    assert [attempt.path for attempt in rig.attempts] == [first.path, 1 - first.path]


def test_disabling_the_last_path_fails_what_waits_and_what_comes_and_says_why() -> None:
    rig = Rig(paths=1, max_outstanding_bytes=2 * MIB)
    rig.begin("a", Kind.WRITE, length_bytes=2 * MIB)
    rig.begin("b", length_bytes=2 * MIB)
    rig.take(rig.spread.disable(rig.now_s, 0))
    rig.begin("c")
    assert [effect.owner for effect in rig.told] == ["b", "c"]
    for effect in rig.told:
        assert isinstance(effect.error, NoPathError)
        assert "path 0: disabled by an operator" in effect.error.message
        assert "mfctl path enable" in effect.error.next_step
    rig.say(TransferDone(rig.attempts[0]))
    assert rig.told[2:] == [TransferDone("a")]


def test_a_silent_path_that_is_disabled_is_not_waited_for() -> None:
    rig = Rig(paths=1)
    rig.begin("a", Kind.WRITE)
    rig.after(0.2)
    assert rig.states[0] is PathState.SUSPECT
    rig.begin("b")
    assert rig.told == []
    rig.take(rig.spread.disable(rig.now_s, 0))
    ((owner, error, _),) = rig.told
    assert owner == "b"
    assert isinstance(error, NoPathError)


def test_bytes_that_were_answered_are_counted() -> None:
    rig = Rig(paths=1)
    rig.begin("a", length_bytes=1000)
    rig.begin("b", Kind.WRITE, length_bytes=300)
    rig.begin("c", Kind.WRITE, length_bytes=77)
    for attempt in rig.attempts[:2]:
        rig.say(TransferDone(attempt))
    rig.say(TransferFailed(rig.attempts[2], MediaError("no", next_step="none"), is_retryable=False))
    (lane,) = rig.spread.lanes
    assert (lane.read_bytes, lane.written_bytes) == (1000, 300)


def test_closing_sends_nothing_more_and_tells_doubts() -> None:
    rig = Rig(max_outstanding_bytes=2 * MIB)
    for owner in range(4):
        rig.begin(owner, length_bytes=2 * MIB)
    first, second = rig.attempts
    rig.say(TransferInDoubt(first, LOST))
    rig.take(rig.spread.close(rig.now_s))
    assert [type(effect) for effect in rig.told] == [TransferInDoubt, TransferFailed, TransferFailed]
    rig.say(TransferInDoubt(second, LOST))
    rig.say(TransferMemoryFree(first))
    rig.say(TransferMemoryFree(second))
    assert [type(effect) for effect in rig.told[3:]] == [TransferInDoubt, TransferMemoryFree, TransferMemoryFree]
    assert rig.spread.open_count == 0
    assert len(rig.attempts) == 2
