"""Reservations of a namespace: who may write it (Base 7.5 to 7.8 and 8.1.22). Commands for I/O queues. ::

Register's and Acquire's data, 16 bytes      Report, 64 bytes, then the registrants (extended form)
offset  size  field                          offset  size  field
     0     8  current key                         0     4  generation
     8     8  new key, or the key to preempt      4     1  type of the reservation, 0: none
                                                  5     2  number of registrants
Release's data: the current key, 8 bytes          9     1  keeps it through a loss of power

Each registrant, extended (64 bytes)         ... and not extended (24 bytes; the first is at 24)
     0     2  controller, FFFFh: of none          0     2  controller
     2     1  bit 0: it holds the reservation     2     1  bit 0
     8     8  key                                 8     8  host identifier
    16    16  host identifier                    16     8  key

Over Fabrics host identifiers have 16 bytes, and the extended form is the only one. Builders raise
:class:`~meshfusion.jbof.nvme.fields.NvmeFieldError` for values out of range.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.command import Command, IoOpcode, common_command
from meshfusion.jbof.nvme.fields import MAX_U64, check_int, check_nsid, check_received, field_error, protocol_error
from meshfusion.jbof.nvme.sgl import DataPointer

KEYS_BYTES: Final = 16
RELEASE_BYTES: Final = 8
REPORT_BYTES: Final = 4096  # as many registrants as fit; a drive of ours has two or three

_KEYS: Final = struct.Struct("<QQ")
_IGNORE_EXISTING_KEY: Final = 1 << 3
_PERSIST: Final = 0b11 << 30  # CPTPL: keep registrations and reservation through a loss of power
_UNREGISTER: Final = 1
_REPLACE: Final = 2
_PREEMPT_AND_ABORT: Final = 2
_EXTENDED: Final = 1
_REPORT_HEAD: Final = struct.Struct("<IBH2xB")
_EXTENDED_ENTRY: Final = struct.Struct("<HB5xQ16s32x")
_SHORT_ENTRY: Final = struct.Struct("<HB5x8sQ")
_EXTENDED_OFFSET, _SHORT_OFFSET = 64, 24
assert (_EXTENDED_ENTRY.size, _SHORT_ENTRY.size) == (64, 24)


class ReservationType(enum.IntEnum):
    """What others may not do (Base 8.1.22). The numbers are those of Linux' ``enum pr_type`` too."""

    WRITE_EXCLUSIVE = 1
    EXCLUSIVE_ACCESS = 2
    WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 3
    EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 4
    WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5
    EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 6


class KeyChange(enum.Enum):
    """What becomes of a host's own key."""

    REGISTER = "register"  # it has none
    REPLACE = "replace"  # whatever it has
    UNREGISTER = "unregister"


@dataclass(frozen=True, slots=True)
class Registrant:
    """``host``: its identifier, 8 or 16 bytes; zeros for one that has set none."""

    key: int
    host: bytes
    is_holder: bool


@dataclass(frozen=True, slots=True)
class ReservationReport:
    """``kind`` is None while nobody holds a reservation. ``generation`` changes with registrations and preemptions."""

    generation: int
    kind: ReservationType | None
    persists: bool
    registrants: tuple[Registrant, ...]

    @property
    def holder(self) -> Registrant | None:
        """Of a reservation that one host holds."""
        return next((one for one in self.registrants if one.is_holder), None)


def encode_keys(current: int, other: int) -> bytes:
    return _KEYS.pack(check_int("CRKEY", current, 0, MAX_U64), check_int("key", other, 0, MAX_U64))


def register(nsid: int, change: KeyChange, data: DataPointer, *, persist: bool) -> Command:
    """``data``: :func:`encode_keys` of the current and the new key.

    With ``persist`` all registrations of the namespace outlive a loss of power, where it can do that (bit 0 of RESCAP).
    """
    _check_length(data, KEYS_BYTES)
    action = {
        KeyChange.REGISTER: 0,
        KeyChange.REPLACE: _REPLACE | _IGNORE_EXISTING_KEY,
        KeyChange.UNREGISTER: _UNREGISTER,
    }[change]
    flags = _PERSIST if persist and change is not KeyChange.UNREGISTER else 0
    return common_command(IoOpcode.RESERVATION_REGISTER, nsid=check_nsid(nsid), data=data, cdw10=flags | action)


def acquire(nsid: int, kind: ReservationType, data: DataPointer) -> Command:
    """``data``: :func:`encode_keys` of the current key, and 0."""
    return _acquire(nsid, kind, data, 0)


def preempt_and_abort(nsid: int, kind: ReservationType, data: DataPointer) -> Command:
    """``data``: :func:`encode_keys` of the current key, and the key of whoever is to lose registration and reservation.

    When it completes, the commands of those hosts have ended (Base 8.1.22).
    """
    return _acquire(nsid, kind, data, _PREEMPT_AND_ABORT)


def release(nsid: int, kind: ReservationType, data: DataPointer) -> Command:
    """``data``: the current key, 8 bytes."""
    _check_length(data, RELEASE_BYTES)
    return common_command(IoOpcode.RESERVATION_RELEASE, nsid=check_nsid(nsid), data=data, cdw10=kind << 8)


def report(nsid: int, data: DataPointer) -> Command:
    """Into ``data``: what :func:`parse_report` reads, in the extended form."""
    dwords = check_int("NUMD + 1", data.length_bytes // 4, 16, 1024)
    return common_command(
        IoOpcode.RESERVATION_REPORT, nsid=check_nsid(nsid), data=data, cdw10=dwords - 1, cdw11=_EXTENDED
    )


def parse_report(data: bytes, *, extended: bool = True) -> ReservationReport:
    """The registrants that are in ``data``. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`."""
    entry = _EXTENDED_ENTRY if extended else _SHORT_ENTRY
    offset = _EXTENDED_OFFSET if extended else _SHORT_OFFSET
    check_received("the reservation report", data, offset)
    generation, kind, count, persists = _REPORT_HEAD.unpack_from(data)
    if kind and kind not in ReservationType.__members__.values():
        raise protocol_error(f"a reservation has the type {kind}, which is none")
    check_received("the reservation report", data, offset + count * entry.size)
    registrants = []
    for number in range(count):
        _controller, status, first, second = entry.unpack_from(data, offset + number * entry.size)
        key, host = (first, second) if extended else (second, first)
        registrants.append(Registrant(key, host, bool(status & 1)))
    return ReservationReport(
        generation, ReservationType(kind) if kind else None, bool(persists & 1), tuple(registrants)
    )


def _acquire(nsid: int, kind: ReservationType, data: DataPointer, action: int) -> Command:
    _check_length(data, KEYS_BYTES)
    return common_command(IoOpcode.RESERVATION_ACQUIRE, nsid=check_nsid(nsid), data=data, cdw10=kind << 8 | action)


def _check_length(data: DataPointer, length_bytes: int) -> None:
    if data.length_bytes != length_bytes:
        raise field_error("reservation keys", f"have {data.length_bytes} bytes instead of {length_bytes}")
