"""Fields of NVMe structures: their bounds, and the errors for values and bytes that break them."""

from __future__ import annotations

from typing import Final

from meshfusion.jbof.errors import MediaError, MeshFusionError

MAX_U8: Final = 2**8 - 1
MAX_U16: Final = 2**16 - 1
MAX_U32: Final = 2**32 - 1
MAX_U64: Final = 2**64 - 1

BROADCAST_NSID: Final = MAX_U32  # all namespaces, where a command allows it (Base 3.2.1.2)
MAX_NSID: Final = MAX_U32 - 1


class NvmeFieldError(MeshFusionError):
    """A value does not fit its field of an NVMe structure. ``field`` is the field's name."""

    def __init__(self, field: str, problem: str, *, next_step: str) -> None:
        super().__init__(f"NVMe field {field} {problem}", next_step=next_step)
        self.field = field


class NvmeProtocolError(MediaError):
    """A target sent bytes that the specification does not allow."""


def field_error(field: str, problem: str) -> NvmeFieldError:
    """The error for one bad field, ready to raise."""
    return NvmeFieldError(
        field, problem, next_step="Give a value within the bounds; if MeshFusion chose it, report this as a bug."
    )


def protocol_error(message: str) -> NvmeProtocolError:
    """The error for bytes from a target that cannot be right, ready to raise."""
    return NvmeProtocolError(
        message, next_step="Check that the target is an NVMe-oF target of a known version, and update its software."
    )


def check_int(field: str, value: int, low: int, high: int) -> int:
    """``value``, or :class:`NvmeFieldError` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise field_error(field, f"is {value}; it must lie between {low} and {high}")
    return value


def check_nsid(nsid: int) -> int:
    """One namespace: neither 0 nor the broadcast value (Base 3.2.1.2)."""
    return check_int("NSID", nsid, 1, MAX_NSID)


def check_received(what: str, data: bytes, length_bytes: int) -> None:
    """Raise :class:`NvmeProtocolError` unless ``data`` holds at least ``length_bytes``."""
    if len(data) < length_bytes:
        raise protocol_error(f"{what} has {len(data)} bytes; {length_bytes} are needed")
