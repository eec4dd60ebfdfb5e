"""Numbers and structures of Linux' ioctls for drives (include/uapi/linux/nvme_ioctl.h, pr.h).

``struct nvme_passthru_cmd``, 72 bytes ::

offset  size  field                offset  size  field
     0     1  opcode                   32     4  metadata length
     1     1  flags                    36     4  data length
     2     2  reserved                 40  6*4   cdw10 to cdw15
     4     4  nsid                     64     4  timeout, ms
     8   2*4  cdw2, cdw3               68     4  result (dword 0 of the completion)
    16     8  metadata
    24     8  data address
"""

from __future__ import annotations

import ctypes
import fcntl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_READ, _WRITE = 2, 1
_PASSTHRU: Final = struct.Struct("<BBHIIIQQII6III")
assert _PASSTHRU.size == 72


def _ioctl_number(direction: int, kind: str, number: int, length_bytes: int) -> int:
    """include/uapi/asm-generic/ioctl.h, as on x86-64 and arm64."""
    return direction << 30 | length_bytes << 16 | ord(kind) << 8 | number


NVME_ADMIN: Final = _ioctl_number(_READ | _WRITE, "N", 0x41, _PASSTHRU.size)
NVME_IO: Final = _ioctl_number(_READ | _WRITE, "N", 0x43, _PASSTHRU.size)

PR_REGISTER: Final = _ioctl_number(_WRITE, "p", 200, 24)
PR_RESERVE: Final = _ioctl_number(_WRITE, "p", 201, 16)
PR_RELEASE: Final = _ioctl_number(_WRITE, "p", 202, 16)
PR_PREEMPT: Final = _ioctl_number(_WRITE, "p", 203, 24)
PR_PREEMPT_ABORT: Final = _ioctl_number(_WRITE, "p", 204, 24)
PR_CLEAR: Final = _ioctl_number(_WRITE, "p", 205, 16)


@dataclass(frozen=True, slots=True)
class PassthruResult:
    """``status``: the 15 bits of an NVMe status without the phase tag, 0 for success."""

    status: int
    result: int
    data: bytes


def nvme_passthru(
    fd: int,
    number: int,
    opcode: int,
    *,
    nsid: int = 0,
    dwords: Sequence[int] = (),
    read_bytes: int = 0,
    timeout_ms: int = 10_000,
) -> PassthruResult:
    """One command that reads up to ``read_bytes``. ``dwords``: from cdw10 on. Raises :class:`OSError`."""
    assert len(dwords) <= 6
    buffer = ctypes.create_string_buffer(max(read_bytes, 1))
    address = ctypes.addressof(buffer) if read_bytes else 0
    words = (*dwords, *(0,) * (6 - len(dwords)))
    command = bytearray(_PASSTHRU.pack(opcode, 0, 0, nsid, 0, 0, 0, address, 0, read_bytes, *words, timeout_ms, 0))
    status = fcntl.ioctl(fd, number, command)
    return PassthruResult(status, _PASSTHRU.unpack(command)[-1], buffer.raw[:read_bytes])
