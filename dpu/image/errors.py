"""What can be wrong with images and with flashing them. Each names the field, its value and the next step."""

from __future__ import annotations

import enum

from meshfusion.jbof.config_problems import ConfigProblemsError
from meshfusion.jbof.errors import MeshFusionError


class ImageError(MeshFusionError):
    """An image, or flashing it, is not as it must be."""


class BfbError(ImageError):
    """The bytes are no BlueField boot stream. ``offset_bytes``: where in the file that shows; ``reason``: what shows
    there."""

    def __init__(self, offset_bytes: int, reason: str) -> None:
        super().__init__(
            f"not a BlueField boot stream (BFB): at byte {offset_bytes}, {reason}",
            next_step="Get the file again and compare its checksum with the one that its maker published.",
        )
        self.offset_bytes = offset_bytes
        self.reason = reason


class BundleError(ImageError):
    """The service bundle cannot be used."""


class FlashRefusedError(ConfigProblemsError):
    """A card is not flashed, for reasons known before anything was done to it."""


class UpgradeRefusedError(ConfigProblemsError):
    """The service on a card is not changed, for reasons known before anything was done to it."""


class FaultKind(enum.Enum):
    """How an operation on a card failed, as far as that decides what comes next."""

    BUSY = "busy"
    """Another process has ``boot`` open, or the BMC is at another update."""
    LOCKED = "locked"
    """The card's firmware keeps the host from its rshim (secure NIC mode)."""
    OWNED_ELSEWHERE = "owned elsewhere"
    """Drop mode: the rshim belongs to the other side, host or BMC."""
    STALLED = "stalled"
    """The card took no bytes for as long as its driver waits."""
    GONE = "gone"
    """No such device: not there, or away while the card resets."""
    UNREACHABLE = "unreachable"
    """ssh or the BMC did not answer."""
    DENIED = "denied"
    """Credentials or permissions."""
    REFUSED = "refused"
    """The other side understood, and will not do it."""
    DAMAGED = "damaged"
    """What arrived is not what was sent."""
    BROKEN = "broken"
    """Any other failure of input or output."""


class CardError(ImageError):
    """An operation on a card failed."""

    def __init__(self, kind: FaultKind, message: str, *, next_step: str) -> None:
        super().__init__(message, next_step=next_step)
        self.kind = kind
