"""A drive's life as a pure state machine: what is known of it, and what follows.

The state is no memory of its own but follows from facts (:func:`state_of`), and what is to be done follows from the
states before and after (:func:`advance`). So no order of events leads to a state that its facts do not justify.

Facts that the drive can take back by itself are taken back late and ever later, so that a drive that comes and goes
does not make the pool come and go: after the n-th return in a day it is on probation for 2^n times as long, and the
same for slowness. The others, such as errors, hold until the operator admits the drive again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from meshfusion.jbof.drives.health import Health, Warnings
from meshfusion.jbof.drives.identity import DriveIdentity
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

_DAY_S: Final = 86_400.0
_MAX_DOUBLINGS: Final = 10


@dataclass(frozen=True, slots=True)
class LifeLimits:
    """``max_faults`` within ``fault_window_s`` are borne. Slow after so many slow windows in a row, and no more after
    so many normal ones. ``probation_s`` doubles with each return within a day, up to ``max_probation_s``.
    """

    max_faults: int = 4
    fault_window_s: float = 600.0
    slow_windows: int = 3
    normal_windows: int = 10
    probation_s: float = 30.0
    max_probation_s: float = 3600.0
    no_space_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Life:
    """What is known of one drive. Times are of one monotonic clock, in s; -inf: never.

    ``lasting``: reasons that hold until the operator admits it again. ``returns_s``, ``relapses_s``: when it came back
    and when it became slow, within the last day. ``is_refused``: it was checked since it is back, and is not what it
    should be. ``windows_in_a_row``: that speak against its being slow or not.
    """

    identity: DriveIdentity
    is_admitted: bool = False
    is_removed: bool = False
    is_present: bool = True
    is_checked: bool = False
    is_refused: bool = False
    is_replaced: bool = False
    wants_drain: bool = False
    is_empty: bool = False
    lasting: frozenset[Reason] = frozenset()
    faults_s: tuple[float, ...] = ()
    no_space_until_s: float = -math.inf
    probation_until_s: float = -math.inf
    returns_s: tuple[float, ...] = ()
    is_slow: bool = False
    windows_in_a_row: int = 0
    relapses_s: tuple[float, ...] = ()
    media_errors: int | None = None
    now_s: float = -math.inf
    limits: LifeLimits = field(default_factory=LifeLimits)

    @property
    def state(self) -> State:
        return state_of(self)

    @property
    def reasons(self) -> frozenset[Reason]:
        return frozenset(_reasons(self))

    @property
    def is_draining(self) -> bool:
        """What it holds is to be moved or dropped, as long as it can be read."""
        return not self.is_empty and self.state.may_read and (self.wants_drain or self.state is State.FAILING)


_FAILURES: Final = frozenset({Reason.ERRORS, Reason.SPARE_LOW, Reason.UNRELIABLE, Reason.UNPROTECTED})
_AWAY: Final = frozenset(
    {Reason.ABSENT, Reason.UNCHECKED, Reason.REFUSED, Reason.PROBATION, Reason.ANOTHER_DRIVE, Reason.TAKEN}
)
_NO_WRITES: Final = frozenset({Reason.WRITE_PROTECTED, Reason.NO_SPACE})


def state_of(life: Life) -> State:
    """The first that applies, the gravest first."""
    reasons = life.reasons
    if life.is_removed:
        return State.REMOVED
    if not life.is_admitted:
        return State.NEW
    if reasons & _AWAY:
        return State.GONE
    if life.wants_drain and life.is_empty:
        return State.DRAINED
    if reasons & _FAILURES:
        return State.FAILING
    if reasons & _NO_WRITES:
        return State.READ_ONLY
    if life.wants_drain:
        return State.DRAINING
    return State.SLOW if life.is_slow else State.ONLINE


def advance(life: Life, now_s: float, event: Event) -> tuple[Life, tuple[Effect, ...]]:
    """After ``event`` at ``now_s``, which does not go back: the life, and what is to be done, in order."""
    assert now_s >= life.now_s
    if life.is_removed:
        return life, ()
    after = _with_event(_without_the_past(replace(life, now_s=now_s)), event)
    if after.state.may_write:
        after = replace(after, is_empty=False)
    is_asked = _is_to_be_checked(after) and (isinstance(event, Admit) or not _is_to_be_checked(life))
    return after, (*_effects(life, after), *((Check(),) if is_asked else ()))


def _is_to_be_checked(life: Life) -> bool:
    return life.is_admitted and life.is_present and not life.is_checked and not life.is_removed


def _reasons(life: Life) -> Iterator[Reason]:
    yield from life.lasting
    if not life.is_present:
        yield Reason.ANOTHER_DRIVE if life.is_replaced else Reason.ABSENT
    elif not life.is_checked:
        yield Reason.REFUSED if life.is_refused else Reason.UNCHECKED
    elif life.now_s < life.probation_until_s:
        yield Reason.PROBATION
    if life.now_s < life.no_space_until_s:
        yield Reason.NO_SPACE
    if life.is_slow:
        yield Reason.SLOWER
    if life.wants_drain:
        yield Reason.DRAIN


def _without_the_past(life: Life) -> Life:
    return replace(
        life,
        faults_s=_since(life.faults_s, life.now_s - life.limits.fault_window_s),
        returns_s=_since(life.returns_s, life.now_s - _DAY_S),
        relapses_s=_since(life.relapses_s, life.now_s - _DAY_S),
    )


def _since(times_s: tuple[float, ...], start_s: float) -> tuple[float, ...]:
    return tuple(time_s for time_s in times_s if time_s > start_s)


def _with_event(life: Life, event: Event) -> Life:
    match event:
        case Appeared(identity):
            return _appeared(life, identity)
        case Disappeared():
            return replace(life, is_present=False, is_checked=False, is_replaced=False)
        case Checked():
            return replace(life, is_checked=True) if life.is_present else life
        case CheckFailed():
            return replace(life, is_refused=True) if life.is_present and not life.is_checked else life
        case HealthRead(health):
            return _with_health(life, health)
        case CommandFailed(fault):
            return _with_fault(life, fault)
        case Written():
            return replace(life, lasting=life.lasting - {Reason.WRITE_PROTECTED}, no_space_until_s=-math.inf)
        case WindowEnded(speed):
            return _with_speed(life, speed)
        case Emptied():
            return replace(life, is_empty=True) if not life.state.may_write else life
        case Tick():
            return life
        case Admit():
            return _admitted(life)
        case Drain():
            return replace(life, wants_drain=True)
        case Remove():
            return replace(life, is_removed=True)


def _appeared(life: Life, identity: DriveIdentity) -> Life:
    """Only the same drive comes back; and not to be used before it was checked and has stayed for a while."""
    if identity != life.identity:
        return replace(life, is_present=False, is_checked=False, is_replaced=True)
    if life.is_present:
        return life
    returns_s = (*life.returns_s, life.now_s)[-_MAX_DOUBLINGS:]
    wait_s = min(life.limits.probation_s * 2.0 ** (len(returns_s) - 1), life.limits.max_probation_s)
    return replace(
        life,
        is_present=True,
        is_replaced=False,
        is_checked=False,
        is_refused=False,
        returns_s=returns_s,
        probation_until_s=life.now_s + wait_s,
        is_slow=False,
        windows_in_a_row=0,
    )


def _admitted(life: Life) -> Life:
    """What was held against it is forgotten, but neither its absence nor that it is to be checked."""
    was_taken = Reason.TAKEN in life.lasting
    return replace(
        life,
        is_admitted=True,
        is_checked=life.is_checked and not was_taken,
        is_refused=False,
        wants_drain=False,
        is_empty=False,
        lasting=frozenset(),
        faults_s=(),
        no_space_until_s=-math.inf,
        probation_until_s=-math.inf,
        returns_s=(),
        is_slow=False,
        windows_in_a_row=0,
        relapses_s=(),
    )


def _with_health(life: Life, health: Health) -> Life:
    """Read errors that the drive counts by itself are faults like those that we see."""
    found = {
        Reason.WRITE_PROTECTED: health.is_read_only,
        Reason.SPARE_LOW: health.is_spare_low,
        Reason.UNRELIABLE: bool(health.warnings & Warnings.RELIABILITY_DEGRADED),
        Reason.UNPROTECTED: bool(health.warnings & Warnings.BACKUP_FAILED),
    }
    new_errors = 0 if life.media_errors is None else max(0, health.media_errors - life.media_errors)
    life = replace(
        life,
        lasting=life.lasting | {reason for reason, holds in found.items() if holds},
        media_errors=health.media_errors,
    )
    return _with_faults(life, min(new_errors, life.limits.max_faults + 1))


def _with_fault(life: Life, fault: Fault) -> Life:
    match fault:
        case Fault.MEDIA | Fault.TIMEOUT:
            return _with_faults(life, 1)
        case Fault.READ_ONLY:
            return replace(life, lasting=life.lasting | {Reason.WRITE_PROTECTED})
        case Fault.NO_SPACE:
            return replace(life, no_space_until_s=life.now_s + life.limits.no_space_s)
        case Fault.CONFLICT:
            return replace(life, lasting=life.lasting | {Reason.TAKEN})
        case Fault.ABSENT:
            return replace(life, is_present=False, is_checked=False)


def _with_faults(life: Life, count: int) -> Life:
    faults_s = (*life.faults_s, *(life.now_s,) * count)[-life.limits.max_faults - 1 :]
    lasting = life.lasting | {Reason.ERRORS} if len(faults_s) > life.limits.max_faults else life.lasting
    return replace(life, faults_s=faults_s, lasting=lasting)


def _with_speed(life: Life, speed: Speed) -> Life:
    """Windows of which nothing can be told count neither way."""
    if speed is Speed.UNTOLD:
        return life
    speaks_against = (speed is Speed.NORMAL) == life.is_slow
    in_a_row = life.windows_in_a_row + 1 if speaks_against else 0
    needed = life.limits.slow_windows
    if life.is_slow:
        needed = life.limits.normal_windows << max(len(life.relapses_s) - 1, 0)
    if in_a_row < needed:
        return replace(life, windows_in_a_row=in_a_row)
    if life.is_slow:
        return replace(life, is_slow=False, windows_in_a_row=0)
    return replace(life, is_slow=True, windows_in_a_row=0, relapses_s=(*life.relapses_s, life.now_s)[-_MAX_DOUBLINGS:])


def _effects(before: Life, after: Life) -> Iterator[Effect]:
    """Stops come before anything else."""
    old, new = before.state, after.state
    if old.may_write and not new.may_write:
        yield StopWrites()
    if old.may_read and not new.may_read:
        yield StopReads()
    if before.is_draining and not after.is_draining:
        yield StopDrain()
    if new.may_read and not old.may_read:
        yield StartReads()
    if new.may_write and not old.may_write:
        yield StartWrites()
    if after.is_draining and not before.is_draining:
        yield StartDrain()
    if (old, before.reasons) != (new, after.reasons):
        yield Alarm(new, after.reasons)
