"""What O_DIRECT asks of memory and lengths, from the kernel where it tells.

``statx`` with STATX_DIOALIGN (Linux 6.1; ext4, XFS, f2fs and block devices answer; see statx(2)). Python has no
``os.statx`` before 3.15, so the C library's is called.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Final

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
# struct statx of linux/stat.h: its size, and where its fields lie.
_STATX_BYTES: Final = 256
_MASK_AT: Final = 0
_DIO_ALIGN_AT: Final = 152  # stx_dio_mem_align, then stx_dio_offset_align


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """Powers of two: addresses are multiples of ``memory_bytes``, the length of each piece of memory of a vectored
    transfer and its place in the file of ``length_bytes``. ``is_told``: by the kernel, not assumed."""

    memory_bytes: int
    length_bytes: int
    is_told: bool

    @property
    def granule_bytes(self) -> int:
        """Where pieces that keep both rules may be cut so that both parts keep them."""
        return max(self.memory_bytes, self.length_bytes)


ASSUMED_ALIGNMENT: Final = DirectAlignment(4096, 4096, is_told=False)
"""Where the kernel does not tell: a page, and the block size of this format, are enough for every drive we use."""


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Of the open file or block device ``fd``. None when the kernel says that it does no direct I/O: tmpfs takes the
    flag O_DIRECT and copies all the same."""
    answer = _statx(fd)
    if answer is None or not struct.unpack_from("=I", answer, _MASK_AT)[0] & _STATX_DIOALIGN:
        return ASSUMED_ALIGNMENT
    memory_bytes, length_bytes = struct.unpack_from("=II", answer, _DIO_ALIGN_AT)
    if not memory_bytes or not length_bytes:
        return None
    return DirectAlignment(memory_bytes, length_bytes, is_told=True)


def _statx(fd: int) -> bytes | None:
    """None where the C library or the kernel has no such call."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        failed = ctypes.CDLL(None).statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    except AttributeError:
        return None
    return None if failed else buffer.raw
