"""What the flash of one card says and hears: effects out, events in, and how it stands. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from meshfusion.dpu.image.errors import FaultKind
from meshfusion.dpu.image.install_log import InstallLog
from meshfusion.dpu.image.misc import Misc
from meshfusion.dpu.image.readiness import Observation, Standing


class Phase(enum.Enum):
    """In their order; the last three are ends."""

    DRAINING = "draining"
    PREPARING = "preparing"
    PUSHING = "pushing"
    INSTALLING = "installing"
    RESTARTING = "restarting"
    SETTLING = "settling"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_end(self) -> bool:
        return self in (Phase.DONE, Phase.FAILED, Phase.STOPPED)

    @property
    def goes_on_by_itself(self) -> bool:
        """The card is at work, whether anybody looks on or not: it must not be reset now."""
        return self in (Phase.INSTALLING, Phase.RESTARTING, Phase.SETTLING)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each phase may take, in seconds of a clock on the wall."""

    draining_s: float = 120.0
    preparing_s: float = 120.0
    pushing_s: float = 1800.0
    installing_s: float = 3600.0
    restarting_s: float = 900.0
    settling_s: float = 600.0

    def of(self, phase: Phase) -> float:
        seconds: float = getattr(self, f"{phase.value}_s")
        return seconds


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the service on the card end what is open, within this time, and stop."""

    within_s: float


@dataclass(frozen=True, slots=True)
class TakeRshim:
    """See to it that this side has the card's rshim, where that can be asked for."""


@dataclass(frozen=True, slots=True)
class SetMisc:
    key: str
    value: int


@dataclass(frozen=True, slots=True)
class ReadMisc:
    pass


@dataclass(frozen=True, slots=True)
class BeginPush:
    """Resets the card."""


@dataclass(frozen=True, slots=True)
class ContinuePush:
    """Move some more bytes, or see how many have been moved; within seconds."""


@dataclass(frozen=True, slots=True)
class AbandonPush:
    pass


@dataclass(frozen=True, slots=True)
class Probe:
    """Look at the card from its host."""


@dataclass(frozen=True, slots=True)
class Wait:
    until_s: float


@dataclass(frozen=True, slots=True)
class End:
    outcome: Outcome


Effect = Drain | TakeRshim | SetMisc | ReadMisc | BeginPush | ContinuePush | AbandonPush | Probe | Wait | End


@dataclass(frozen=True, slots=True)
class Drained:
    """``note``: what the operator should know of it, "" for nothing."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Acted:
    """What was asked for was done, and there is no more to say."""


@dataclass(frozen=True, slots=True)
class MiscRead:
    misc: Misc


@dataclass(frozen=True, slots=True)
class PushMoved:
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PushEnded:
    """All bytes are in the card."""


@dataclass(frozen=True, slots=True)
class Probed:
    seen: Observation


@dataclass(frozen=True, slots=True)
class Faulted:
    """What was asked for failed."""

    kind: FaultKind
    message: str
    next_step: str


Event = Drained | Acted | MiscRead | PushMoved | PushEnded | Probed | Faulted


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total``: bytes while pushing, else milestones."""

    phase: Phase
    done: int
    total: int
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a later run needs, to go on with a flash."""

    phase: Phase
    log: InstallLog


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a flash ended. ``in_phase``: where. ``problem``: "" if all is well, else with what to do in ``next_step``.

    ``card_state``: what state the card is in now, in words.
    """

    end: Phase
    in_phase: Phase
    problem: str = ""
    next_step: str = ""
    card_state: str = ""
    standing: Standing | None = None
    notes: tuple[str, ...] = ()
    log: InstallLog = field(default_factory=InstallLog)
