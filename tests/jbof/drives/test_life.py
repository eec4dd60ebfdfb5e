"""A drive's life: each thing that can happen by itself, then anything in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.drives.health import LOG_BYTES, Health, Warnings, parse_health
from meshfusion.jbof.drives.identity import DriveIdentity
from meshfusion.jbof.drives.life import Life, LifeLimits, advance
from meshfusion.jbof.drives.life_words import (
    Admit,
    Alarm,
    Appeared,
    Check,
    Checked,
    CheckFailed,
    CommandFailed,
    Disappeared,
    Drain,
    Effect,
    Emptied,
    Event,
    Fault,
    HealthRead,
    Reason,
    Remove,
    Speed,
    StartDrain,
    StartReads,
    StartWrites,
    State,
    StopDrain,
    StopReads,
    StopWrites,
    Tick,
    WindowEnded,
    Written,
)

MINE, OTHER = DriveIdentity("M", "S1", "nsid.1"), DriveIdentity("M", "S2", "nsid.1")
LIMITS = LifeLimits()


NONE = Warnings(0)


def health(warnings: Warnings = NONE, *, media_errors: int = 0, spare: int = 100) -> Health:
    page = bytearray(LOG_BYTES)
    page[0], page[3], page[4] = warnings, spare, 10
    page[160:176] = media_errors.to_bytes(16, "little")
    return parse_health(bytes(page))


class Told:
    """A life, and what was told to do since it was looked at last. Time passes only where a test says so."""

    def __init__(self) -> None:
        self.life = Life(MINE)
        self.now_s = 0.0
        self.done: list[Effect] = []

    def see(self, *events: Event, after_s: float = 0.0) -> Told:
        for event in events:
            self.now_s += after_s
            self.life, effects = advance(self.life, self.now_s, event)
            self.done += effects
        return self

    @property
    def state(self) -> State:
        return self.life.state

    def is_in(self, state: State) -> bool:
        return self.life.state is state

    def orders(self) -> list[Effect]:
        """Without alarms."""
        orders: list[Effect] = [effect for effect in self.done if not isinstance(effect, Alarm)]
        self.done.clear()
        return orders


@pytest.fixture
def online() -> Told:
    told = Told().see(Admit(), Checked())
    assert told.orders() == [Check(), StartReads(), StartWrites()]
    assert told.is_in(State.ONLINE)
    return told


def test_a_new_drive_is_not_used_before_it_is_admitted_and_checked() -> None:
    told = Told().see(HealthRead(health()), Tick())
    assert (told.state, told.orders()) == (State.NEW, [])
    told.see(Admit())
    assert (told.state, told.orders()) == (State.GONE, [Check()])
    # The check failed and was seen to: it is asked for again.
    assert told.see(Admit()).orders() == [Check()]


def test_draining(online: Told) -> None:
    online.see(Drain())
    assert (online.state, online.orders()) == (State.DRAINING, [StopWrites(), StartDrain()])
    online.see(Emptied())
    assert (online.state, online.orders()) == (State.DRAINED, [StopReads(), StopDrain()])
    online.see(Admit())
    assert (online.state, online.orders()) == (State.ONLINE, [StartReads(), StartWrites()])
    online.see(Drain())
    assert online.is_in(State.DRAINING), "what was written since is to be drained too"


def test_a_drive_that_turns_read_only_keeps_its_hits(online: Told) -> None:
    for event in (CommandFailed(Fault.READ_ONLY), HealthRead(health(Warnings.READ_ONLY))):
        told = Told().see(Admit(), Checked())
        told.orders()
        told.see(event)
        assert (told.state, told.orders()) == (State.READ_ONLY, [StopWrites()])
        told.see(HealthRead(health()), Tick(), after_s=100_000)
        assert told.is_in(State.READ_ONLY)  # flash does not heal
        assert told.see(Admit()).is_in(State.ONLINE)


@pytest.mark.parametrize("fault", [Fault.NO_SPACE, Fault.READ_ONLY])
def test_a_write_that_works_ends_what_was_held_against_writes(online: Told, fault: Fault) -> None:
    online.see(CommandFailed(fault))
    assert online.see(Written()).is_in(State.ONLINE)


def test_a_write_that_works_ends_no_other_trouble(online: Told) -> None:
    for _ in range(LIMITS.max_faults + 1):
        online.see(CommandFailed(Fault.MEDIA))
    assert online.see(Written()).is_in(State.FAILING)


def test_no_space_passes(online: Told) -> None:
    online.see(CommandFailed(Fault.NO_SPACE))
    assert (online.state, online.orders()) == (State.READ_ONLY, [StopWrites()])
    assert online.see(Tick(), after_s=LIMITS.no_space_s - 1).is_in(State.READ_ONLY)
    assert online.see(Tick(), after_s=1).is_in(State.ONLINE)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (health(Warnings.RELIABILITY_DEGRADED), Reason.UNRELIABLE),
        (health(Warnings.BACKUP_FAILED), Reason.UNPROTECTED),
        (health(Warnings.SPARE_LOW), Reason.SPARE_LOW),
        (health(spare=9), Reason.SPARE_LOW),
    ],
)
def test_a_drive_that_says_it_fails_is_emptied(online: Told, found: Health, reason: Reason) -> None:
    online.see(HealthRead(found))
    assert online.done[-1] == Alarm(State.FAILING, frozenset({reason}))
    assert (online.state, online.orders()) == (State.FAILING, [StopWrites(), StartDrain()])
    assert online.see(Emptied()).orders() == [StopDrain()]


def test_warmth_and_wear_stop_nothing(online: Told) -> None:
    online.see(HealthRead(health(Warnings.TEMPERATURE)))
    assert (online.state, online.orders()) == (State.ONLINE, [])


@pytest.mark.parametrize("fault", [Fault.MEDIA, Fault.TIMEOUT])
def test_some_errors_are_borne_and_many_are_not(online: Told, fault: Fault) -> None:
    online.see(*[CommandFailed(fault)] * LIMITS.max_faults, after_s=1)
    assert online.is_in(State.ONLINE)
    online.see(CommandFailed(fault), after_s=LIMITS.fault_window_s)  # those before are too old
    assert online.is_in(State.ONLINE)
    online.see(*[CommandFailed(fault)] * LIMITS.max_faults, after_s=1)
    assert online.is_in(State.FAILING)


def test_errors_that_the_drive_counts(online: Told) -> None:
    online.see(HealthRead(health(media_errors=1000)))  # of its life before
    assert online.is_in(State.ONLINE)
    online.see(HealthRead(health(media_errors=1000 + LIMITS.max_faults)))
    assert online.is_in(State.ONLINE)
    online.see(HealthRead(health(media_errors=1001 + LIMITS.max_faults)))
    assert online.is_in(State.FAILING)


def test_gone_and_back(online: Told) -> None:
    online.see(Disappeared())
    assert (online.state, online.orders()) == (State.GONE, [StopWrites(), StopReads()])
    online.see(Appeared(MINE), after_s=5)
    assert (online.state, online.orders()) == (State.GONE, [Check()])
    online.see(Checked())
    assert online.life.reasons == {Reason.PROBATION}
    online.see(Tick(), after_s=LIMITS.probation_s)
    assert (online.state, online.orders()) == (State.ONLINE, [StartReads(), StartWrites()])


def test_a_check_that_fails_is_told_once_and_may_be_answered_otherwise_later(online: Told) -> None:
    online.see(Disappeared(), Appeared(MINE))
    assert online.life.reasons == {Reason.UNCHECKED}
    online.done.clear()
    online.see(CheckFailed(), CheckFailed(), Appeared(MINE), CheckFailed(), after_s=5)
    assert online.done == [Alarm(State.GONE, frozenset({Reason.REFUSED}))]
    online.see(Disappeared(), CheckFailed(), Appeared(MINE))
    assert online.life.reasons == {Reason.UNCHECKED}, "what failed was another return's check"
    online.see(CheckFailed(), Tick(), after_s=10_000)
    assert online.is_in(State.GONE)
    online.done.clear()
    online.see(Admit())
    assert online.done == [Check(), Alarm(State.GONE, frozenset({Reason.UNCHECKED}))][::-1]
    online.see(Checked())
    assert online.is_in(State.ONLINE)
    online.see(CheckFailed())
    assert online.is_in(State.ONLINE), "nobody has asked"


def test_another_drive_in_its_place_is_not_it(online: Told) -> None:
    online.see(Disappeared(), Appeared(OTHER), Checked(), Tick(), after_s=10_000)
    assert online.is_in(State.GONE)
    assert online.life.reasons == {Reason.ANOTHER_DRIVE}
    online.see(Appeared(MINE), Checked(), Tick(), after_s=10_000)
    assert online.is_in(State.ONLINE)


def test_it_goes_while_it_is_checked(online: Told) -> None:
    online.see(Disappeared(), Appeared(MINE), Disappeared(), Checked(), Appeared(MINE), after_s=1)
    online.see(Tick(), after_s=10_000)
    assert online.life.reasons == {Reason.UNCHECKED}  # the answer was to the question of before


def test_a_drive_that_another_service_took(online: Told) -> None:
    online.see(CommandFailed(Fault.CONFLICT))
    assert (online.state, online.orders()) == (State.GONE, [StopWrites(), StopReads()])
    online.see(Tick(), HealthRead(health()), after_s=100_000)
    assert online.is_in(State.GONE)
    assert online.see(Admit()).orders() == [Check()]  # it is to be owned anew
    assert online.see(Checked()).is_in(State.ONLINE)


def test_removed_is_for_good(online: Told) -> None:
    online.see(Remove())
    assert (online.state, online.orders()) == (State.REMOVED, [StopWrites(), StopReads()])
    online.see(Admit(), Appeared(MINE), Checked(), Tick())
    assert (online.state, online.orders()) == (State.REMOVED, [])


SLOW, NORMAL, UNTOLD = (WindowEnded(speed) for speed in (Speed.SLOW, Speed.NORMAL, Speed.UNTOLD))


def test_slow_and_back_by_hysteresis(online: Told) -> None:
    online.see(SLOW, SLOW, NORMAL, SLOW, UNTOLD, SLOW)
    assert online.is_in(State.ONLINE)
    online.see(SLOW)
    assert (online.state, online.orders()) == (State.SLOW, [StopWrites()])  # its hits go on
    online.see(*[NORMAL] * 9, SLOW, *[NORMAL] * 9)
    assert online.is_in(State.SLOW)
    online.see(NORMAL)
    assert (online.state, online.orders()) == (State.ONLINE, [StartWrites()])
    # The next time, twice as many are needed.
    online.see(SLOW, SLOW, SLOW, *[NORMAL] * 19)
    assert online.is_in(State.SLOW)
    assert online.see(NORMAL).is_in(State.ONLINE)


def test_emptied_while_slow_and_written_again(online: Told) -> None:
    online.see(SLOW, SLOW, SLOW, Emptied(), *[NORMAL] * LIMITS.normal_windows)
    assert online.is_in(State.ONLINE)
    assert online.see(Drain()).is_in(State.DRAINING)


def test_slow_for_more_than_a_day(online: Told) -> None:
    online.see(SLOW, SLOW, SLOW)
    online.see(*[NORMAL] * LIMITS.normal_windows, after_s=86_400)
    assert online.is_in(State.ONLINE)


def changes(online: Told, events: list[Event], every_s: float, for_s: float) -> int:
    """How often writes were started while these events repeat."""
    count = 0
    while online.now_s < for_s:
        for event in events:
            online.see(event, Tick(), after_s=every_s / 2)
            count += online.orders().count(StartWrites())
    return count


def test_a_drive_that_comes_and_goes_does_not_make_the_pool_do_so(online: Told) -> None:
    # 1440 times a day it is back for 45 s; the first probation of 30 s is the only one it passes.
    assert changes(online, [Disappeared(), Appeared(MINE), Checked(), Tick()], 15.0, 86_400.0) == 1


def test_a_drive_that_is_slow_again_and_again(online: Told) -> None:
    # Every 10 minutes, 3 slow windows and 57 normal ones.
    count = changes(online, [*[SLOW] * 3, *[NORMAL] * 57], 10.0, 86_400.0)
    assert 1 <= count <= 4


EVENTS = st.one_of(
    st.sampled_from(
        [
            *(Appeared(MINE), Appeared(OTHER), Disappeared(), Checked(), CheckFailed(), Emptied(), Tick(), Admit()),
            *(Drain(), SLOW, NORMAL, UNTOLD),
            *map(CommandFailed, Fault),
        ]
    ),
    st.builds(HealthRead, st.builds(health, st.sampled_from([Warnings(0), *Warnings]), media_errors=st.integers(0, 9))),
    st.just(Remove()),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.5, 20.0, 61.0, 4000.0])), max_size=60))
def test_any_order_of_events(steps: list[tuple[Event, float]]) -> None:
    """Who follows the orders never writes to a drive that is not online, and so on."""
    told = Told()
    writes = reads = drains = False
    since_gone: set[type] = set()
    for event, after_s in steps:
        before = told.life
        told.see(event, after_s=after_s)
        for order in told.orders():
            match order:
                case StartWrites() | StopWrites():
                    assert writes != isinstance(order, StartWrites), "told twice"
                    writes = not writes
                case StartReads() | StopReads():
                    assert reads != isinstance(order, StartReads)
                    reads = not reads
                case StartDrain() | StopDrain():
                    assert drains != isinstance(order, StartDrain)
                    drains = not drains
        life = told.life
        if not life.is_present or life.is_replaced:
            since_gone.clear()
        elif event == Appeared(MINE) or isinstance(event, Checked):
            since_gone.add(type(event))
        assert writes == (life.state is State.ONLINE)
        assert reads == life.state.may_read
        assert drains == life.is_draining
        assert not drains or reads
        if life.state is State.ONLINE and before.state is State.GONE and not before.is_present:
            raise AssertionError("online at once after having gone")
        if life.state is State.ONLINE:
            assert life.is_admitted
            assert life.is_present
            assert life.is_checked
            assert life.reasons == frozenset()
            assert not life.is_empty
            assert Checked in since_gone
        if isinstance(event, Appeared) and event.identity == OTHER and not life.is_removed:
            assert not life.state.may_read
        # Reasons explain every state that is not online.
        assert life.reasons or life.state in (State.ONLINE, State.NEW, State.REMOVED)
