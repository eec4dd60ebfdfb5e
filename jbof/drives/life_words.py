"""The words of a drive's life: its states, what happens to it, and what is to be done."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshfusion.jbof.drives.health import Health
from meshfusion.jbof.drives.identity import DriveIdentity


class State(enum.Enum):
    """``may_write``: new segments may be opened. ``may_read``: what it holds is offered."""

    NEW = "new"  # found, not admitted
    ONLINE = "online"
    DRAINING = "draining"  # told to be emptied
    DRAINED = "drained"
    READ_ONLY = "read_only"  # takes no writes, by itself
    SLOW = "slow"  # against its peers
    FAILING = "failing"  # errors, or it says so itself; it is emptied
    GONE = "gone"  # not there, back and not yet trusted, or taken by another service
    REMOVED = "removed"  # by the operator, for good

    @property
    def may_write(self) -> bool:
        return self is State.ONLINE

    @property
    def may_read(self) -> bool:
        return self in (State.ONLINE, State.DRAINING, State.READ_ONLY, State.SLOW, State.FAILING)


class Reason(enum.Enum):
    """Why a drive is not simply online; several may hold. The values are for people."""

    ABSENT = "it is not there"
    UNCHECKED = "it is back, and waits for its check"
    REFUSED = "it is back, and its check failed"
    PROBATION = "it came back lately, after having gone"
    ANOTHER_DRIVE = "another drive is in its place"
    TAKEN = "another service took it over"
    WRITE_PROTECTED = "it takes no writes"
    NO_SPACE = "there is no space below it"
    ERRORS = "too many commands failed"
    SPARE_LOW = "its spare blocks run out"
    UNRELIABLE = "it says that it is not reliable any more"
    UNPROTECTED = "it cannot save its cache when power is lost"
    SLOWER = "it is slower than its peers"
    DRAIN = "the operator has it emptied"


class Fault(enum.Enum):
    """How a command failed."""

    MEDIA = "media"  # EIO, unrecovered read, write fault
    TIMEOUT = "timeout"
    READ_ONLY = "read only"  # EROFS, write protected
    NO_SPACE = "no space"  # ENOSPC, capacity exceeded
    CONFLICT = "conflict"  # EBADE, reservation conflict
    ABSENT = "absent"  # ENODEV, ENXIO


class Speed(enum.Enum):
    """One window's verdict (:mod:`meshfusion.jbof.drives.peers`)."""

    NORMAL = "normal"
    SLOW = "slow"
    UNTOLD = "untold"


@dataclass(frozen=True, slots=True)
class Appeared:
    """Discovery sees a drive where this one is looked for."""

    identity: DriveIdentity


@dataclass(frozen=True, slots=True)
class Disappeared:
    pass


@dataclass(frozen=True, slots=True)
class Checked:
    """The answer to :class:`Check`: it is owned by us, and its label is the one that is remembered."""


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The other answer: it could not be had, or is not as it was left. It may be asked again at any time."""


@dataclass(frozen=True, slots=True)
class HealthRead:
    health: Health


@dataclass(frozen=True, slots=True)
class CommandFailed:
    fault: Fault


@dataclass(frozen=True, slots=True)
class Written:
    """A write worked: what was held against its writes does not hold any more."""


@dataclass(frozen=True, slots=True)
class WindowEnded:
    speed: Speed


@dataclass(frozen=True, slots=True)
class Emptied:
    """Nothing that it holds is offered or pinned any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Admit:
    """The operator adds it, ends its draining, or trusts it again after it was repaired."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The operator has it emptied."""


@dataclass(frozen=True, slots=True)
class Remove:
    """The operator takes it out of the pool, for good."""


Seen = (
    Appeared | Disappeared | Checked | CheckFailed | HealthRead | CommandFailed | Written | WindowEnded | Emptied | Tick
)
Event = Seen | Admit | Drain | Remove


@dataclass(frozen=True, slots=True)
class StartWrites:
    """New segments may be opened on it."""


@dataclass(frozen=True, slots=True)
class StopWrites:
    """Open no new segment; what is open is sealed."""


@dataclass(frozen=True, slots=True)
class StartReads:
    """What it holds may be offered."""


@dataclass(frozen=True, slots=True)
class StopReads:
    """Drop its hits."""


@dataclass(frozen=True, slots=True)
class StartDrain:
    """Move or drop what it holds."""


@dataclass(frozen=True, slots=True)
class StopDrain:
    pass


@dataclass(frozen=True, slots=True)
class Check:
    """Become its owner and compare its label; answer with :class:`Checked` or :class:`CheckFailed`."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """``reasons`` may be empty: then all is well again."""

    state: State
    reasons: frozenset[Reason]


Effect = StartWrites | StopWrites | StartReads | StopReads | StartDrain | StopDrain | Check | Alarm
