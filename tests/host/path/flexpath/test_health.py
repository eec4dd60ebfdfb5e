"""When a path is used and how much: times and shares from the settings, checked by a machine that throws everything."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshfusion.host.path.flexpath.health import Health, PathState
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.jbof.errors import ConfigError

SETTINGS = SpreadSettings(
    quarantine_s=1.0, quarantine_max_s=5.0, forgive_s=30.0, reentry_share=0.25, reentry_step_s=0.5
)
_S = PathState


def live(now_s: float = 0.0) -> Health:
    health = Health(SETTINGS)
    health.connected(now_s)
    return health


def states(health: Health, times_s: list[float]) -> list[PathState]:
    seen = []
    for now_s in times_s:
        health.tick(now_s)
        seen.append(health.state)
    return seen


def test_the_first_connection_makes_it_live_at_once() -> None:
    health = Health(SETTINGS)
    assert not health.is_usable
    health.connected(3.0)
    assert (health.state, health.share) == (_S.LIVE, 1.0)


def test_it_comes_back_slowly_and_only_while_it_works() -> None:
    health = live()
    health.failed(10.0)
    assert states(health, [10.9, 11.0]) == [_S.QUARANTINED, _S.REENTERING]
    assert health.share == 0.25
    health.tick(11.6)
    assert health.share == 0.25, "it has shown nothing yet"
    health.answered()
    health.tick(11.6)
    assert health.share == 0.5
    health.answered()
    health.tick(12.0)
    assert health.share == 0.5, "not before the step is over"
    health.tick(12.1)
    assert (health.state, health.share) == (_S.LIVE, 1.0)


def test_without_a_connection_it_stays_out() -> None:
    health = live()
    health.lost(10.0)
    assert states(health, [11.5, 60.0]) == [_S.QUARANTINED] * 2
    health.connected(60.0)
    assert states(health, [60.0]) == [_S.REENTERING]


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (9, 5.0)])
def test_each_failure_keeps_it_out_longer(failures: int, pause_s: float) -> None:
    health, now_s = live(), 0.0
    for _ in range(failures):
        now_s += 10.0
        health.tick(now_s)
        health.failed(now_s)
        health.failed(now_s)  # another sign of the same failure
    assert health.strikes == failures
    assert states(health, [now_s + pause_s - 0.01, now_s + pause_s + 0.01]) == [_S.QUARANTINED, _S.REENTERING]


def test_one_that_is_needed_stays_out_as_after_a_first_failure() -> None:
    health = live()
    for now_s in (10.0, 20.0, 30.0):
        health.tick(now_s)
        health.failed(now_s)
    health.failed(30.5)
    health.needed()
    assert states(health, [31.4, 31.5]) == [_S.QUARANTINED, _S.REENTERING]
    health.needed()
    assert states(health, [31.6]) == [_S.REENTERING], "only what is out is let in"
    assert health.strikes == 3, "it is not forgiven"


def test_it_is_forgiven_after_a_good_time() -> None:
    health = live()
    health.failed(0.0)
    for now_s in (1.0, 1.6, 2.2):
        health.answered()
        health.tick(now_s)
    assert health.state is _S.LIVE
    assert health.strikes == 1
    health.tick(2.2 + 29.9)
    assert health.strikes == 1
    health.tick(2.2 + 30.0)
    assert health.strikes == 0


def test_silence_is_suspect_until_there_is_an_answer() -> None:
    health = live()
    health.silent()
    assert (health.state, health.is_usable, health.may_recover) == (_S.SUSPECT, False, True)
    health.answered()
    assert health.state is _S.LIVE


def test_a_re_entering_path_that_was_suspect_goes_on_as_such() -> None:
    health = live()
    health.failed(0.0)
    health.tick(1.0)
    health.silent()
    assert states(health, [9.0]) == [_S.SUSPECT]
    health.answered()
    assert (health.state, health.share) == (_S.REENTERING, 0.25)


def test_errors_now_and_then_are_borne_and_three_in_a_row_are_not() -> None:
    health = live()
    for _ in range(100):
        health.erred(1.0)
        for _ in range(9):
            health.answered()
    assert health.is_usable
    for _ in range(3):
        health.erred(1.0)
    assert health.state is _S.QUARANTINED


@pytest.mark.parametrize(
    "wrong",
    [
        {"patience_s": 0.0},
        {"min_outstanding_bytes": 2 << 30},
        {"suspect_s": 1.0},
        {"reentry_share": 1.5},
        {"max_attempts": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SpreadSettings(**wrong)  # type: ignore[arg-type]


class HealthMachine(RuleBasedStateMachine):
    """Its own books: when the last failure was, whether there is a connection, and how much was shown since."""

    def __init__(self) -> None:
        super().__init__()
        self.health = Health(SETTINGS)
        self.now_s = 100.0
        self.failed_s: float | None = None
        self.is_connected = self.was_connected = False
        self.answers = 0  # since it failed

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.health.tick(self.now_s)

    @rule()
    def connects(self) -> None:
        self.is_connected = self.was_connected = True
        self.health.connected(self.now_s)

    @rule()
    def is_lost(self) -> None:
        self.is_connected = False
        self.health.lost(self.now_s)
        self._failed()

    @rule()
    def fails(self) -> None:
        self.health.failed(self.now_s)
        self._failed()

    @rule()
    def is_needed(self) -> None:
        self.health.needed()

    @precondition(lambda self: self.health.state is not _S.QUARANTINED)
    @rule()
    def answers_well(self) -> None:
        self.health.answered()
        self.answers += 1

    @precondition(lambda self: self.health.is_usable)
    @rule()
    def is_silent(self) -> None:
        self.health.silent()

    def _failed(self) -> None:
        if self.was_connected:  # before, there is nothing that could have failed
            self.failed_s, self.answers = self.now_s, 0

    @invariant()
    def is_used_rightly(self) -> None:
        if not self.health.is_usable:
            return
        assert self.is_connected
        assert 0 < self.health.share <= 1
        if self.failed_s is not None:
            assert self.now_s >= self.failed_s + SETTINGS.quarantine_s
            if self.answers == 0:
                assert self.health.share == SETTINGS.reentry_share
            assert self.health.share <= SETTINGS.reentry_share * 2**self.answers


TestHealthMachine = HealthMachine.TestCase
