"""Log pages: error information, changed namespaces, asymmetric namespace access (Base 5.1.12.1). ::

error information entry (Base Figure 206)    ANA log (Base Figures 224 and 225)
offset  size  field                          offset  size  field
     0     8  error count                         0     8  change count
     8     2  SQID                                8     2  number of group descriptors
    10     2  CID                                10     6  zero
    12     2  status                             16        group descriptors, each:
    14     2  parameter error location             0     4  ANA group
    16     8  LBA                                  4     4  number n of NSIDs
    24     4  NSID                                 8     8  change count
    28     1  vendor's log page                   16     1  state, bits 3:0
    29     1  transport type                      17    15  zero
    30     1  command set                         32   4*n  the NSIDs
    31     1  opcode
    32     8  by command
    40     2  by transport
    42    22  zero, log version
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.admin_commands import IDENTIFY_BYTES
from meshfusion.jbof.nvme.fields import BROADCAST_NSID, MAX_NSID, MAX_U16, check_received, protocol_error
from meshfusion.jbof.nvme.namespaces import parse_namespace_list
from meshfusion.jbof.nvme.status import Status, decode_status

ERROR_ENTRY_BYTES: Final = 64
CHANGED_NAMESPACES_BYTES: Final = IDENTIFY_BYTES

_ERROR: Final = struct.Struct("<QHHHHQIBBBBQH22x")
_ANA_HEADER: Final = struct.Struct("<QH6x")
_ANA_GROUP: Final = struct.Struct("<IIQB15x")
assert _ERROR.size == ERROR_ENTRY_BYTES
assert _ANA_HEADER.size == 16
assert _ANA_GROUP.size == 32


@dataclass(frozen=True, slots=True)
class ErrorLogEntry:
    """Base Figure 206. None where the entry says that a value does not apply.

    ``error_byte`` and ``error_bit`` locate the parameter in the command that caused the error.
    """

    error_count: int
    queue_id: int | None
    command_id: int | None
    status: Status
    error_byte: int | None
    error_bit: int | None
    lba: int
    nsid: int


@dataclass(frozen=True, slots=True)
class ChangedNamespaces:
    """``nsids`` are ascending. ``too_many``: more than can be listed, so that all are to be looked at."""

    nsids: tuple[int, ...]
    too_many: bool = False


class AnaState(enum.IntEnum):
    """How a controller reaches the namespaces of a group (Base 8.1.1)."""

    OPTIMIZED = 0x1
    NON_OPTIMIZED = 0x2
    INACCESSIBLE = 0x3
    PERSISTENT_LOSS = 0x4
    CHANGE = 0xF

    @property
    def is_usable(self) -> bool:
        """I/O commands work. In the CHANGE state they may after the transition."""
        return self in (AnaState.OPTIMIZED, AnaState.NON_OPTIMIZED)


@dataclass(frozen=True, slots=True)
class AnaGroup:
    """``change_count`` 0 means that it is not kept."""

    group: int
    state: AnaState
    change_count: int
    nsids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnaLog:
    change_count: int
    groups: tuple[AnaGroup, ...]

    def state_of(self, nsid: int) -> AnaState | None:
        """None: the namespace is in no group of this controller."""
        return next((group.state for group in self.groups if nsid in group.nsids), None)


def parse_error_log(data: bytes) -> tuple[ErrorLogEntry, ...]:
    """The valid entries, newest first. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`."""
    if len(data) % ERROR_ENTRY_BYTES:
        raise protocol_error(f"the error log has {len(data)} bytes; entries have {ERROR_ENTRY_BYTES}")
    return tuple(_error_entries(data))


def _error_entries(data: bytes) -> Iterator[ErrorLogEntry]:
    for count, sqid, cid, status, location, lba, nsid, *_ in _ERROR.iter_unpack(data):
        if count == 0:  # no entry
            continue
        applies = location != MAX_U16
        yield ErrorLogEntry(
            error_count=count,
            queue_id=None if sqid == MAX_U16 else sqid,
            command_id=None if cid == MAX_U16 else cid,
            status=decode_status(status),
            error_byte=location & 0xFF if applies else None,
            error_bit=location >> 8 & 0x7 if applies else None,
            lba=lba,
            nsid=nsid,
        )


def parse_changed_namespaces(data: bytes) -> ChangedNamespaces:
    """Namespaces that changed, came or went since this page was read last (Base 5.1.12.1.5).

    Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`.
    """
    check_received("the changed namespace list", data, CHANGED_NAMESPACES_BYTES)
    if int.from_bytes(data[:4], "little") == BROADCAST_NSID:
        return ChangedNamespaces((), too_many=True)
    return ChangedNamespaces(parse_namespace_list(data))


def max_ana_log_bytes(group_count: int, namespace_count: int) -> int:
    """How much to read: NANAGRPID and MNAN (or NN, where that is 0) of the Identify Controller data."""
    return _ANA_HEADER.size + group_count * _ANA_GROUP.size + namespace_count * 4


def parse_ana_log(data: bytes) -> AnaLog:
    """From the start of the page; more may follow behind it in ``data``.

    Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`, also for states that are not known: better no
    path than a wrong one.
    """
    check_received("the ANA log", data, _ANA_HEADER.size)
    change_count, group_count = _ANA_HEADER.unpack_from(data)
    groups = []
    offset = _ANA_HEADER.size
    for _ in range(group_count):
        check_received("the ANA log", data, offset + _ANA_GROUP.size)
        group, nsid_count, group_change_count, attributes = _ANA_GROUP.unpack_from(data, offset)
        offset += _ANA_GROUP.size
        check_received("the ANA log", data, offset + 4 * nsid_count)
        nsids = struct.unpack_from(f"<{nsid_count}I", data, offset)
        offset += 4 * nsid_count
        state = attributes & 0xF
        if state not in AnaState.__members__.values() or any(not 0 < nsid <= MAX_NSID for nsid in nsids):
            raise protocol_error(
                f"ANA group {group} has the reserved state {state:#x} or impossible namespaces {nsids}"
            )
        groups.append(AnaGroup(group, AnaState(state), group_change_count, nsids))
    return AnaLog(change_count, tuple(groups))
