"""What host and target tell each other when an RDMA connection is made: the private data of RDMA 3.1. ::

    request (RDMA Figure 5)        accept (RDMA Figure 6)         reject (RDMA Figure 7)
    offset  size  field            offset  size  field            offset  size  field
         0     2  RECFMT, 0             0     2  RECFMT, 0             0     2  RECFMT, 0
         2     2  QID                   2     2  CRQSIZE               2     2  STS
         4     2  HRQSIZE               4    28  zero
         6     2  HSQSIZE, 0's based
         8     2  CNTLID
        10    22  zero

What the host receives may be longer: the connection manager fills it up with zeros.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.fields import MAX_U16, check_int, check_received, protocol_error

REQUEST_BYTES: Final = 32
MAX_QUEUE_ID: Final = 65534  # Base Figure 546
MIN_QUEUE_DEPTH: Final = 2  # SQSIZE is 0's based and must not be 0 (Base Figure 546)
MAX_QUEUE_DEPTH: Final = 65535  # HRQSIZE is not 0's based

_RECORD_FORMAT: Final = 0
_REQUEST: Final = struct.Struct("<HHHHH22x")
_REPLY: Final = struct.Struct("<HH")
assert _REQUEST.size == REQUEST_BYTES


class RejectReason(enum.IntEnum):
    """RDMA Figure 11."""

    PRIVATE_DATA_LENGTH = 1
    RECORD_FORMAT = 2
    QUEUE_ID = 3
    HOST_SEND_QUEUE_SIZE = 4
    HOST_RECEIVE_QUEUE_SIZE = 5
    NO_RESOURCES = 6
    INBOUND_READ_DEPTH = 7
    OUTBOUND_READ_DEPTH = 8
    CONTROLLER_ID = 9


_BUG: Final = "Report this as a bug, with the target's name and version."
_WORDS: Final = {
    RejectReason.PRIVATE_DATA_LENGTH: ("the private data has a wrong length", _BUG),
    RejectReason.RECORD_FORMAT: ("the private data has an unknown format", _BUG),
    RejectReason.QUEUE_ID: ("the queue identifier is not acceptable", _BUG),
    RejectReason.HOST_SEND_QUEUE_SIZE: ("the send queue is too large or too small", "Choose another queue depth."),
    RejectReason.HOST_RECEIVE_QUEUE_SIZE: (
        "the receive queue is too small or too large",
        "Choose another queue depth.",
    ),
    RejectReason.NO_RESOURCES: (
        "it has no resources for another queue",
        "Use fewer or shorter queues, close unused connections, or raise the target's limits.",
    ),
    RejectReason.INBOUND_READ_DEPTH: (
        "the host offers no or too many RDMA reads at a time (IRD)",
        "Check how many RDMA reads the host's NIC can answer at a time (max_qp_rd_atom).",
    ),
    RejectReason.OUTBOUND_READ_DEPTH: ("the host wants to issue RDMA reads itself (ORD)", _BUG),
    RejectReason.CONTROLLER_ID: (
        "the controller is not known there",
        "Connect again from the admin queue on: the controller is gone.",
    ),
}


class NvmeConnectRejectedError(MediaError):
    """A target refused an RDMA connection. ``reason`` is None when it gave none that is known."""

    def __init__(self, message: str, *, next_step: str, reason: RejectReason | None) -> None:
        super().__init__(message, next_step=next_step)
        self.reason = reason


def encode_request(queue_id: int, queue_depth: int, controller_id: int) -> bytes:
    """The private data of a connection request, 32 bytes.

    ``queue_depth`` counts entries, as everywhere outside of the wire; ``controller_id`` is what Connect returned on
    the admin queue, and 0 for the admin queue itself (``queue_id`` 0).
    """
    check_int("QID", queue_id, 0, MAX_QUEUE_ID)
    check_int("HRQSIZE", queue_depth, MIN_QUEUE_DEPTH, MAX_QUEUE_DEPTH)
    check_int("CNTLID", controller_id, 0, MAX_U16 if queue_id else 0)
    return _REQUEST.pack(_RECORD_FORMAT, queue_id, queue_depth, queue_depth - 1, controller_id)


def decode_accept(private_data: bytes) -> int:
    """Capsules that the target can receive at a time on this queue (CRQSIZE). Raises :class:`NvmeProtocolError`."""
    check_received("the private data of the target's accept", private_data, _REPLY.size)
    record_format, queue_entries = _REPLY.unpack_from(private_data)
    if record_format != _RECORD_FORMAT or queue_entries == 0:
        raise protocol_error(
            f"the target accepted a connection with record format {record_format} and {queue_entries} queue entries; "
            f"format {_RECORD_FORMAT} and at least 1 entry are known"
        )
    return int(queue_entries)


def rejected(private_data: bytes, *, where: str) -> NvmeConnectRejectedError:
    """The error for a rejected connection; ``where`` names target and queue in its message.

    Rejections that do not come from an NVMe target (nobody listens, a gateway) carry no private data, or zeros.
    """
    record_format, status = _REPLY.unpack_from(private_data) if len(private_data) >= _REPLY.size else (0, 0)
    if record_format == _RECORD_FORMAT and status in RejectReason.__members__.values():
        reason = RejectReason(status)
        problem, next_step = _WORDS[reason]
        return NvmeConnectRejectedError(
            f"{where}: the target rejected the connection: {problem} (status {status:#x})",
            next_step=next_step,
            reason=reason,
        )
    return NvmeConnectRejectedError(
        f"{where}: the connection was rejected without an NVMe reason: {private_data[:4].hex() or 'no private data'}",
        next_step="Check address and port, and that an NVMe/RDMA target listens there.",
        reason=None,
    )
