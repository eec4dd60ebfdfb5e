"""How the slots of a card stand, as ``slotctl status`` tells it. No I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from meshfusion.dpu.image.errors import CardError, FaultKind

PROTOCOL: Final = 1
"""Of what is said to slotctl, and what it answers."""
SLOTS: Final = ("a", "b")
_KIB: Final = 1024


class ServiceRuns(enum.Enum):
    RUNNING = "running"
    STARTING = "starting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_down(self) -> bool:
        return self in (ServiceRuns.STOPPED, ServiceRuns.FAILED)


@dataclass(frozen=True, slots=True)
class Trial:
    """A slot that is tried. ``token``: whose trial; ``is_started``: its service was started, which happens once;
    ``left_s``: until the committed slot comes back by itself."""

    slot: str
    token: str
    is_started: bool
    left_s: float


@dataclass(frozen=True, slots=True)
class CardState:
    """``running``: the slot that the service was last started from; ``committed``: the one that comes back; each "" for
    none. ``slots``: digest of the bundle in each slot there is, "" for one that is not whole. ``blobs``: bytes of what
    was copied, by digest, of what is not whole yet with ``.part`` behind it. ``last``: token and end of the last
    trial."""

    machine: str
    boot: str
    service: ServiceRuns
    running: str
    committed: str
    free_bytes: int
    trial: Trial | None = None
    last: str = ""
    slots: dict[str, str] = field(default_factory=dict)
    used_bytes: dict[str, int] = field(default_factory=dict)
    blobs: dict[str, int] = field(default_factory=dict)

    @property
    def committed_digest(self) -> str:
        return self.slots.get(self.committed, "")

    @property
    def spare(self) -> str:
        """The slot that an upgrade writes to."""
        return "b" if self.committed == "a" else "a"

    def is_last(self, token: str, how: str) -> bool:
        return self.last == f"{token} {how}"

    def why_over(self, token: str) -> str:
        """How the trial of this token ended, as far as the card knows; "" when it knows of another one."""
        found, _, how = self.last.partition(" ")
        return how if found == token else ""


def parse_status(text: str) -> CardState:
    """Raises CardError for what is no answer of a slotctl that is understood here."""
    values: dict[str, str] = {}
    blobs: dict[str, int] = {}
    try:
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key == "blob":
                name, _, size = value.partition(" ")
                blobs[name] = int(size)
            else:
                values[key] = value
        if int(values["protocol"]) != PROTOCOL:
            raise CardError(
                FaultKind.REFUSED,
                f"its slotctl speaks version {values['protocol']} of its protocol, this mfctl version {PROTOCOL}",
                next_step="Use the mfctl that last upgraded this card, or a later one.",
            )
        return _state(values, blobs)
    except (KeyError, ValueError) as error:
        raise CardError(
            FaultKind.BROKEN,
            f"slotctl status answered what cannot be understood: {error}",
            next_step="Run /usr/lib/meshfusion/slotctl status on the card and look at what it says.",
        ) from None


def _state(values: dict[str, str], blobs: dict[str, int]) -> CardState:
    trial = None
    if values.get("trial"):
        is_started = {"armed": False, "started": True}[values["phase"]]
        trial = Trial(values["trial"], values["token"], is_started, float(values["left"]))
    return CardState(
        machine=values["machine"],
        boot=values["boot"],
        service=ServiceRuns(values["service"]),
        running=values["running"],
        committed=values["committed"],
        free_bytes=int(values["free_kib"]) * _KIB,
        trial=trial,
        last=values.get("last", ""),
        slots={slot: values[f"slot_{slot}"] for slot in SLOTS if f"slot_{slot}" in values},
        used_bytes={slot: int(values[f"used_kib_{slot}"]) * _KIB for slot in SLOTS if f"used_kib_{slot}" in values},
        blobs=blobs,
    )
