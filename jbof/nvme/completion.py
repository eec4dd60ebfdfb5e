"""The completion queue entry, 16 bytes, which is all of a response capsule (Base Figures 96 to 99, RDMA 3.3). ::

offset  size  field
     0     8  result, by command: often only its first 4 bytes
     8     2  SQHD
    10     2  SQID, reserved over Fabrics
    12     2  CID
    14     2  status in bits 15:1; bit 0, the phase tag, is reserved over Fabrics
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from meshfusion.jbof.nvme.fields import MAX_U32, check_received
from meshfusion.jbof.nvme.status import Status, decode_status

COMPLETION_BYTES: Final = 16

_COMPLETION: Final = struct.Struct("<QHHHH")
assert _COMPLETION.size == COMPLETION_BYTES


class Completion(NamedTuple):
    """``sq_head``: how far the controller has read the queue; it may pause for sending beyond (Base 3.3.2.1.2)."""

    result: int
    sq_head: int
    sq_id: int
    command_id: int
    status: Status

    @property
    def dword0(self) -> int:
        return self.result & MAX_U32

    @property
    def dword1(self) -> int:
        return self.result >> 32


def decode_completion(data: bytes) -> Completion:
    """Read a response capsule. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError` if it is too short."""
    check_received("a response capsule", data, COMPLETION_BYTES)
    result, sq_head, sq_id, command_id, status = _COMPLETION.unpack_from(data)
    return Completion(result, sq_head, sq_id, command_id, decode_status(status))
