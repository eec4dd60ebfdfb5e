"""What the upgrade of one card says and hears: effects out, events in, and how it ends. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from meshfusion.dpu.image.errors import FaultKind
from meshfusion.dpu.image.slots.card_state import CardState


class Phase(enum.Enum):
    """In their order; ROLLING_BACK in place of the rest; the last four are ends."""

    CHECKING = "checking"
    COPYING = "copying"
    UNPACKING = "unpacking"
    DRAINING = "draining"
    SWITCHING = "switching"
    PROBING = "probing"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"
    DONE = "done"
    ROLLED_BACK = "rolled back"
    """The former service runs again, and is ready if it was before."""
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each phase may take, in seconds of a monotonic clock."""

    checking_s: float = 60.0
    copying_s: float = 1800.0
    unpacking_s: float = 900.0
    draining_s: float = 120.0
    switching_s: float = 180.0
    probing_s: float = 300.0
    committing_s: float = 60.0
    rolling_back_s: float = 900.0

    def of(self, phase: Phase) -> float:
        seconds: float = getattr(self, f"{phase.value.replace(' ', '_')}_s")
        return seconds

    @property
    def trial_s(self) -> float:
        """After which the card goes back by itself, from before the service is drained."""
        return self.draining_s + self.switching_s + self.probing_s + self.committing_s


@dataclass(frozen=True, slots=True)
class Blob:
    """``digest``: SHA-256 in hex."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to run. ``digest``: of its bundle. ``version``: that the service will tell, "" where that is not known.
    The rest is what is copied: the bundle's manifest, the image's configuration, and the layers, lowest first; none for
    what is on the card already."""

    digest: str
    version: str
    manifest: Blob | None = None
    config: Blob | None = None
    layers: tuple[Blob, ...] = ()

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Each once."""
        named = (self.manifest, self.config, *self.layers)
        return tuple({blob.digest: blob for blob in named if blob is not None}.values())


@dataclass(frozen=True, slots=True)
class Look:
    """See how the slots stand."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what was copied and is of no use: names as in the card's state."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """Copy so many bytes of a blob from there on; 0 of one that is there and was not yet compared with its digest."""

    blob: Blob
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Unpack:
    slot: str
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Arm:
    """From then on the committed slot comes back after these seconds, unless the other is committed."""

    slot: str
    token: str
    within_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the service end what is open, within this time, and stop."""

    within_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """Start the service anew, from the slot on trial."""

    token: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the service whether it is ready."""


@dataclass(frozen=True, slots=True)
class Commit:
    token: str


@dataclass(frozen=True, slots=True)
class Abort:
    """End the trial, if it is still on, and start the service of the committed slot."""

    token: str
    how: str


@dataclass(frozen=True, slots=True)
class Wait:
    until_s: float


@dataclass(frozen=True, slots=True)
class End:
    outcome: Outcome


Effect = Look | Forget | Put | Unpack | Arm | Drain | Switch | Probe | Commit | Abort | Wait | End


@dataclass(frozen=True, slots=True)
class Looked:
    state: CardState


@dataclass(frozen=True, slots=True)
class Probed:
    """``version``: of the service that answered, "" for none. ``has_written``: in this life of it a chunk was written,
    found and read. ``reason``: why it is not ready."""

    is_ready: bool
    has_written: bool
    version: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Acted:
    """What was asked for was done. ``note``: what the operator should know of it."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Faulted:
    """What was asked for failed, or its fate is not known."""

    kind: FaultKind
    message: str
    next_step: str


Event = Looked | Probed | Acted | Faulted


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` bytes while copying, else of phases."""

    phase: Phase
    done: int
    total: int
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an upgrade ended. ``in_phase``: where; ``problem``: "" if all is well, else with what to do in ``next_step``.
    ``card_state``: what runs on the card now, in words. ``state``: as it was last seen."""

    end: Phase
    in_phase: Phase
    problem: str = ""
    next_step: str = ""
    card_state: str = ""
    state: CardState | None = None
    notes: tuple[str, ...] = field(default=())
