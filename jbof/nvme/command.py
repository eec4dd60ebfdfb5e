"""A command on its way: 64 bytes of submission queue entry, what follows it in the capsule, and its identifier.

The common format (Base Figures 91 and 92) and the one of Fabrics commands (Base Figures 94 and 95) ::

    offset  size  common                          offset  size  Fabrics
         0     1  opcode                               0     1  opcode 7Fh
         1     1  40h: SGLs are used                   1     1  40h
         2     2  command identifier                   2     2  command identifier
         4     4  NSID                                 4     1  Fabrics command type
         8     8  dwords 2, 3                          5    19  zero
        16     8  metadata pointer (unused here)
        24    16  SGL entry 1                         24    16  SGL entry 1
        40    24  dwords 10 to 15                     40    24  by type
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from meshfusion.jbof.nvme.fields import check_int
from meshfusion.jbof.nvme.sgl import NO_DATA, DataPlace, DataPointer, RemoteMemory

SQE_BYTES: Final = 64
MAX_COMMAND_ID: Final = 0xFFFE  # FFFFh means "no command" in the error log (Base Figure 91)

_FABRICS_OPCODE: Final = 0x7F
# PSDT 01b in bits 7:6. Base Figures 95, 550, 552 and 554 give Fabrics commands other values, but Linux' target refuses
# every command without 01b, and SPDK's does not look.
_SGLS_USED: Final = 0x40
_COMMON: Final = struct.Struct("<BB2xI16x16s6I")
_FABRICS: Final = struct.Struct("<BB2xB19x16s24s")
_ID: Final = struct.Struct("<H")
_KEY: Final = struct.Struct("<I")
_KEY_OFFSET: Final = 24 + 11  # in SGL entry 1 (Base Figure 122)
assert _COMMON.size == _FABRICS.size == SQE_BYTES


class AdminOpcode(enum.Enum):
    """Base Figure 142."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNCHRONOUS_EVENT_REQUEST = 0x0C
    KEEP_ALIVE = 0x18


class IoOpcode(enum.Enum):
    """NVM Figure 21; the reservation commands are of Base, 7.5 to 7.8, I/O Management Receive of Base 7.3."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09
    RESERVATION_REGISTER = 0x0D
    RESERVATION_REPORT = 0x0E
    RESERVATION_ACQUIRE = 0x11
    IO_MANAGEMENT_RECEIVE = 0x12
    RESERVATION_RELEASE = 0x15


class FabricsType(enum.Enum):
    """The type of a command whose opcode is 7Fh (Base chapter 6)."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04
    AUTHENTICATION_SEND = 0x05
    AUTHENTICATION_RECEIVE = 0x06
    DISCONNECT = 0x08


FILLS_MEMORY: Final = (IoOpcode.READ, IoOpcode.RESERVATION_REPORT, IoOpcode.IO_MANAGEMENT_RECEIVE)
"""I/O commands whose data goes from the controller to the host. A tuple, which is searched by identity."""

# Enumerations of their own: opcode 02h is Read on an I/O queue and Get Log Page on the admin queue.
Opcode = AdminOpcode | IoOpcode | FabricsType
_QUEUE_WORDS: Final = {AdminOpcode: "admin opcode", IoOpcode: "I/O opcode", FabricsType: "Fabrics command type"}


def opcode_words(opcode: Opcode) -> str:
    """For people: ``Write Zeroes (I/O opcode 08h)``."""
    return f"{opcode.name.replace('_', ' ').title()} ({_QUEUE_WORDS[type(opcode)]} {opcode.value:02X}h)"


class Command(NamedTuple):
    """What is to be sent, but for its identifier: see :func:`capsule`. ``sqe``: 64 bytes.

    ``window``: the memory that a window is to be bound to; the window's key is missing, too.
    """

    opcode: Opcode
    sqe: bytes
    in_capsule: bytes = b""
    window: RemoteMemory | None = None

    @property
    def capsule_bytes(self) -> int:
        return SQE_BYTES + len(self.in_capsule)


def capsule(command: Command, command_id: int, key: int | None = None) -> bytes:
    """The bytes to send. ``command_id`` must differ from those of all commands outstanding on the queue.

    ``key``: of the window that is bound to ``command.window``.
    """
    check_int("CID", command_id, 0, MAX_COMMAND_ID)
    sqe = command.sqe
    assert (key is None) == (command.window is None)
    if key is not None:
        sqe = sqe[:_KEY_OFFSET] + _KEY.pack(key) + sqe[_KEY_OFFSET + _KEY.size :]
    return sqe[:2] + _ID.pack(command_id) + sqe[4:] + command.in_capsule


def common_command(
    opcode: AdminOpcode | IoOpcode,
    *,
    nsid: int = 0,
    data: DataPointer = NO_DATA,
    cdw10: int = 0,
    cdw11: int = 0,
    cdw12: int = 0,
    cdw13: int = 0,
    cdw14: int = 0,
) -> Command:
    """Of the common format; the caller has checked the dwords."""
    sqe = _COMMON.pack(opcode.value, _SGLS_USED, nsid, data.sgl1, cdw10, cdw11, cdw12, cdw13, cdw14, 0)
    return Command(opcode, sqe, data.in_capsule, data.window)


def fabrics_command(kind: FabricsType, specific: bytes, data: DataPointer = NO_DATA) -> Command:
    """Of the Fabrics format; ``specific`` are the bytes from 40 on, up to 24."""
    assert data.place in (DataPlace.NONE, DataPlace.REMOTE), data.place  # RDMA Figure 9
    assert len(specific) <= SQE_BYTES - 40
    return Command(kind, _FABRICS.pack(_FABRICS_OPCODE, _SGLS_USED, kind.value, data.sgl1, specific))
