"""The lives of a pool's drives while it is served, and how each is used for that. No I/O, no clock.

What was seen of a drive goes in (:mod:`meshfusion.dpu.drive_look`), its :class:`Use` comes out. Each drive has a
:class:`~meshfusion.jbof.drives.life.Life` of its own; here are what they have in common: latencies are told against
peers, a failing drive is emptied only where its chunks may go elsewhere, and one that came while engines were attached
is written only when all of them know it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from meshfusion.jbof.drives.identity import DriveIdentity
from meshfusion.jbof.drives.life import Life, LifeLimits, advance
from meshfusion.jbof.drives.life_words import Alarm, Check, Event, Reason, State, WindowEnded
from meshfusion.jbof.drives.peers import Window, speeds

_QUANTILE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Use:
    """How a drive is used now. ``is_emptied``: what it holds is forgotten, bit by bit."""

    takes_segments: bool
    is_offered: bool
    is_emptied: bool


@dataclass(frozen=True, slots=True)
class Told:
    """What an event led to. ``is_to_be_checked``: the drive waits for that (:class:`Check`)."""

    alarms: tuple[Alarm, ...] = ()
    is_to_be_checked: bool = False


@dataclass(frozen=True, slots=True)
class DriveNews:
    """For people. ``reasons``: why it is not simply online; empty: it is."""

    state: State
    reasons: tuple[str, ...]


@dataclass(slots=True)
class _Drive:
    life: Life
    is_known_to_all: bool = True
    was_writable: bool = True
    hangs: bool = False
    latencies_s: list[float] = field(default_factory=list)
    empty_by_s: float = math.inf


class DriveLives:
    """``drain_s``: in so long a drive is emptied. Times are of one clock, in s, and do not go back."""

    def __init__(self, limits: LifeLimits, *, drain_s: float) -> None:
        self._limits = limits
        self._drain_s = drain_s
        self._drives: dict[int, _Drive] = {}

    def retune(self, *, drain_s: float) -> None:
        """For drives whose draining begins from now on."""
        self._drain_s = drain_s

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(self._drives)

    # ---- coming and going ----------------------------------------------------------------------------------------

    def begin(
        self,
        number: int,
        identity: DriveIdentity,
        *,
        is_here: bool = True,
        is_draining: bool = False,
        is_write_protected: bool = False,
        is_known_to_all: bool = True,
    ) -> None:
        """A drive of the pool, owned and compared with its label if ``is_here``. ``is_known_to_all``: no engine is
        attached that does not know of it."""
        assert number not in self._drives, number
        life = Life(
            identity,
            is_admitted=True,
            is_present=is_here,
            is_checked=is_here,
            wants_drain=is_draining,
            lasting=frozenset({Reason.WRITE_PROTECTED} if is_write_protected else ()),
            limits=self._limits,
        )
        self._drives[number] = _Drive(life, is_known_to_all, was_writable=not is_write_protected)

    def end(self, number: int) -> None:
        del self._drives[number]

    def is_new(self, number: int) -> None:
        """It is here for the first time, so nothing is to be waited for as with one that returns; also when a look has
        seen it while it was made ready."""
        drive = self._drives[number]
        drive.life = replace(drive.life, is_present=True, returns_s=(), probation_until_s=-math.inf)

    def is_to_be_made_known(self, number: int) -> None:
        """It is reached in a new way: nothing is written to it until all attached engines know."""
        self._drives[number].is_known_to_all = False

    def are_all_known(self) -> None:
        """Every engine that is attached knows every drive that is here."""
        for drive in self._drives.values():
            drive.is_known_to_all = True

    def hangs(self, number: int, *, is_so: bool) -> None:
        """A command of ours is not answered: until it is, nothing is written there."""
        self._drives[number].hangs = is_so

    @property
    def waits_for_engines(self) -> bool:
        return any(not drive.is_known_to_all for drive in self._drives.values())

    # ---- what was seen -------------------------------------------------------------------------------------------

    def saw(self, now_s: float, number: int, event: Event) -> Told:
        drive = self._drives[number]
        drive.life, effects = advance(drive.life, max(now_s, drive.life.now_s), event)
        if not drive.life.is_draining:
            drive.empty_by_s = math.inf  # it is set when emptying begins
        alarms = tuple(effect for effect in effects if isinstance(effect, Alarm))
        return Told(alarms, any(isinstance(effect, Check) for effect in effects))

    def took(self, number: int, latencies_s: Sequence[float]) -> None:
        """Equal commands to the drive took so long."""
        self._drives[number].latencies_s += latencies_s

    def end_window(self, now_s: float) -> dict[int, Told]:
        """Each drive against its peers, by what they took since the last one."""
        windows = {
            number: Window(len(drive.latencies_s), _quantile(drive.latencies_s))
            for number, drive in self._drives.items()
        }
        for drive in self._drives.values():
            drive.latencies_s = []
        return {number: self.saw(now_s, number, WindowEnded(speed)) for number, speed in speeds(windows).items()}

    # ---- what follows --------------------------------------------------------------------------------------------

    def identity(self, number: int) -> DriveIdentity:
        return self._drives[number].life.identity

    def is_awaiting_check(self, number: int) -> bool:
        """It is back, and nothing is known of what lies on it."""
        life = self._drives[number].life
        return life.is_present and not life.is_checked

    def news(self, number: int) -> DriveNews:
        life = self._drives[number].life
        return DriveNews(life.state, tuple(sorted(reason.value for reason in life.reasons)))

    def use(self, number: int) -> Use:
        drive = self._drives[number]
        state, life = drive.life.state, drive.life
        others = (other for key, other in self._drives.items() if key != number)
        elsewhere = any(other.life.state.may_write and not other.hangs for other in others)
        # Where there is no other it is tried on: that shows when it works again, and why nothing is saved until then.
        is_tried = drive.was_writable and not elsewhere and not life.wants_drain
        may_write = state.may_write or (is_tried and state in (State.READ_ONLY, State.FAILING))
        takes_segments = may_write and drive.is_known_to_all and not drive.hangs
        return Use(takes_segments, state.may_read, life.is_draining and (life.wants_drain or elsewhere))

    def to_empty_now(self, now_s: float, number: int, left: int, interval_s: float) -> int:
        """Of ``left`` segments, how many to forget until the next time, which is in ``interval_s``: evenly over the
        time that emptying may take, for what is forgotten at once is computed at once."""
        drive = self._drives[number]
        drive.empty_by_s = min(drive.empty_by_s, now_s + self._drain_s)
        intervals = max(1.0, (drive.empty_by_s - now_s) / interval_s)
        return min(left, math.ceil(left / intervals))


def _quantile(latencies_s: Sequence[float]) -> float:
    ordered = sorted(latencies_s)
    return ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))] if ordered else 0.0
