"""How drives are used as their lives go on: writes, hits, emptying, peers, engines that do not know one yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.drive_lives import DriveLives, Use
from meshfusion.jbof.drives.identity import label_identity
from meshfusion.jbof.drives.life import LifeLimits
from meshfusion.jbof.drives.life_words import (
    Admit,
    Appeared,
    Checked,
    CommandFailed,
    Disappeared,
    Drain,
    Emptied,
    Fault,
    State,
    Tick,
    Written,
)

WRITTEN = Use(takes_segments=True, is_offered=True, is_emptied=False)
READ = Use(takes_segments=False, is_offered=True, is_emptied=False)
EMPTIED = Use(takes_segments=False, is_offered=True, is_emptied=True)
AWAY = Use(takes_segments=False, is_offered=False, is_emptied=False)


def lives_of(count: int) -> DriveLives:
    lives = DriveLives(LifeLimits(), drain_s=100.0)
    for number in range(count):
        lives.begin(number, label_identity(bytes([number]) * 16))
    return lives


def fail(lives: DriveLives, number: int, times: int = 5) -> None:
    for _ in range(times):
        lives.saw(1.0, number, CommandFailed(Fault.MEDIA))


def test_a_drive_that_goes_is_used_again_only_when_it_was_checked_and_has_stayed() -> None:
    lives = lives_of(2)
    assert lives.use(1) == WRITTEN
    lives.saw(1.0, 1, Disappeared())
    assert (lives.use(0), lives.use(1)) == (WRITTEN, AWAY)
    assert lives.saw(2.0, 1, Appeared(label_identity(b"\1" * 16))).is_to_be_checked
    assert lives.is_awaiting_check(1)
    lives.saw(3.0, 1, Checked())
    assert (lives.is_awaiting_check(1), lives.use(1)) == (False, AWAY)
    lives.saw(31.9, 1, Tick())
    assert lives.use(1) == AWAY
    lives.saw(32.1, 1, Tick())
    assert lives.use(1) == WRITTEN


def test_another_drive_in_its_place_is_not_checked() -> None:
    lives = lives_of(2)
    assert not lives.saw(1.0, 1, Appeared(label_identity(b"\0" * 16))).is_to_be_checked
    assert (lives.use(1), lives.is_awaiting_check(1)) == (AWAY, False)
    assert lives.news(1).reasons == ("another drive is in its place",)


def test_a_failing_drive_is_emptied_where_others_take_what_it_held() -> None:
    lives = lives_of(2)
    fail(lives, 1)
    assert lives.news(1).state is State.FAILING
    assert lives.use(1) == EMPTIED
    lives.saw(2.0, 0, CommandFailed(Fault.READ_ONLY))
    assert lives.use(1) == WRITTEN, "else its hits would be lost for nothing; and no other takes what is saved"
    lives.saw(3.0, 1, Drain())
    assert lives.use(1) == EMPTIED, "the operator says so"
    lives.saw(4.0, 1, Emptied())
    assert lives.use(1) == AWAY
    lives.saw(5.0, 1, Admit())
    assert lives.use(1) == WRITTEN


@pytest.mark.parametrize("fault", [Fault.READ_ONLY, Fault.NO_SPACE])
def test_the_only_drive_is_tried_on_and_is_well_again_when_a_write_works(fault: Fault) -> None:
    lives = lives_of(1)
    lives.saw(1.0, 0, CommandFailed(fault))
    assert (lives.news(0).state, lives.use(0)) == (State.READ_ONLY, WRITTEN)
    lives.begin(1, label_identity(b"\1" * 16))
    assert (lives.use(0), lives.use(1)) == (READ, WRITTEN)
    lives.saw(2.0, 1, CommandFailed(Fault.READ_ONLY))
    assert (lives.use(0), lives.use(1)) == (WRITTEN, WRITTEN), "of those that do not take writes any may again"
    lives.saw(3.0, 0, Written())
    assert (lives.news(0).state, lives.use(0), lives.use(1)) == (State.ONLINE, WRITTEN, READ)


def test_a_drive_that_hangs_is_read_and_takes_nothing_that_others_held() -> None:
    lives = lives_of(2)
    fail(lives, 0)
    assert (lives.use(0), lives.use(1)) == (EMPTIED, WRITTEN)
    lives.hangs(1, is_so=True)
    assert (lives.use(0), lives.use(1)) == (WRITTEN, READ), "the failing one is tried on: no other takes segments"
    lives.hangs(1, is_so=False)
    assert (lives.use(0), lives.use(1)) == (EMPTIED, WRITTEN)
    only = lives_of(1)
    only.hangs(0, is_so=True)
    assert only.use(0) == READ, "nor is the only one tried on: what it was asked may happen yet"


def test_what_cannot_be_written_from_the_start_or_shall_not_is_not_tried_on() -> None:
    lives = DriveLives(LifeLimits(), drain_s=100.0)
    lives.begin(0, label_identity(bytes(16)), is_write_protected=True)
    assert lives.use(0) == READ
    lives.begin(1, label_identity(b"\1" * 16), is_draining=True)
    lives.saw(1.0, 1, CommandFailed(Fault.READ_ONLY))
    assert not lives.use(1).takes_segments


def test_a_new_drive_is_written_only_when_engines_know_it() -> None:
    lives = lives_of(1)
    lives.begin(1, label_identity(b"\1" * 16), is_here=False)
    assert lives.use(1) == AWAY
    lives.is_new(1)
    lives.is_to_be_made_known(1)
    lives.saw(1.0, 1, Checked())
    assert (lives.use(1), lives.waits_for_engines) == (READ, True)
    lives.are_all_known()
    assert (lives.use(1), lives.waits_for_engines) == (WRITTEN, False)


def test_a_new_drive_that_a_look_has_seen_already_is_none_that_returns() -> None:
    lives = lives_of(1)
    identity = label_identity(b"\1" * 16)
    lives.begin(1, identity, is_here=False)
    lives.saw(1.0, 1, Appeared(identity))
    lives.is_new(1)
    lives.saw(1.0, 1, Checked())
    assert lives.use(1) == WRITTEN


def test_a_drive_that_is_slow_against_its_peers_is_not_written() -> None:
    lives = lives_of(4)
    for window in range(3):
        for number in range(4):
            lives.took(number, [0.5 if number == 2 else 0.01] * 20)
        told = lives.end_window(float(window))
        assert bool(told[2].alarms) == (window == 2)
    assert [lives.use(number) for number in range(4)] == [WRITTEN, WRITTEN, READ, WRITTEN]
    lives.end_window(4.0)
    assert lives.use(2) == READ, "a window without commands tells nothing"


def test_a_few_slow_commands_are_not_the_95th_percentile() -> None:
    lives = lives_of(3)
    for window in range(10):
        for number in range(3):
            lives.took(number, [0.01] * 39 + [5.0 if number == 0 else 0.01])
        lives.end_window(float(window))
    assert lives.use(0) == WRITTEN


@given(segments=st.integers(1, 500), interval_s=st.sampled_from([1.0, 5.0, 30.0, 200.0]), goes_on=st.booleans())
def test_emptying_takes_its_time_and_no_longer(segments: int, interval_s: float, goes_on: bool) -> None:
    lives = lives_of(1)
    lives.begin(1, label_identity(b"\1" * 16), is_draining=goes_on)
    if not goes_on:
        lives.saw(10.0, 1, Drain())
    left, now_s, most = segments, 10.0, 0
    while left:
        count = lives.to_empty_now(now_s, 1, left, interval_s)
        assert 0 < count <= left
        left, now_s, most = left - count, now_s + interval_s, max(most, count)
    assert now_s <= 10.0 + max(100.0, interval_s) + interval_s
    assert most <= -(-segments // max(1, int(100.0 / interval_s)))


@pytest.mark.parametrize(
    ("fault", "use"),
    [
        (Fault.READ_ONLY, READ),
        (Fault.NO_SPACE, READ),
        (Fault.CONFLICT, AWAY),
        (Fault.ABSENT, AWAY),
        (Fault.MEDIA, WRITTEN),
        (Fault.TIMEOUT, WRITTEN),
    ],
)
def test_what_one_failed_command_means(fault: Fault, use: Use) -> None:
    lives = lives_of(2)
    lives.saw(1.0, 1, CommandFailed(fault))
    assert (lives.use(0), lives.use(1)) == (WRITTEN, use)
