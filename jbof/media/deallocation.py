"""Telling a file's filesystem, or a block device, that a range holds nothing any more.

**A file**: ``fallocate`` with FALLOC_FL_ZERO_RANGE. The pool's space was set aside when it was made, so a full disk
showed then; a hole would give it back, and another file could take it before the next chunk is written. Zeroing keeps
the space, in one call that cannot fail half-way for want of it, and promises zeros (fallocate(2)). The price: the
filesystem keeps the blocks, so the flash below is not told. A pool that shall trim has a block device for its data.

**A block device**: BLKDISCARD, which NVMe drives get as Dataset Management. What is read afterwards is not promised:
Linux has not passed such promises on since 4.12 (block/ioctl.c, ``discard_zeroes_data`` is always 0).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from typing import Final

_FALLOC_FL_KEEP_SIZE: Final = 0x01  # linux/falloc.h
_FALLOC_FL_ZERO_RANGE: Final = 0x10
_BLKDISCARD: Final = 0x1277  # linux/fs.h: _IO(0x12, 119)
_BLKZEROOUT: Final = 0x127F  # linux/fs.h: _IO(0x12, 127)
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})


def zero_file_range(fd: int, offset_bytes: int, length_bytes: int) -> bool:
    """False when this filesystem (or C library) cannot. Raises OSError."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, _FALLOC_FL_ZERO_RANGE | _FALLOC_FL_KEEP_SIZE, offset_bytes, length_bytes) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))


def discard_device_range(fd: int, offset_bytes: int, length_bytes: int) -> bool:
    """False when this device cannot. Raises OSError."""
    return _device_range(fd, _BLKDISCARD, offset_bytes, length_bytes)


def zero_device_range(fd: int, offset_bytes: int, length_bytes: int) -> bool:
    """The same, and zeros are read afterwards: deallocated where the drive promises that, else written by the kernel
    (block/blk-lib.c, ``blkdev_issue_zeroout``), which takes as long as writing does."""
    return _device_range(fd, _BLKZEROOUT, offset_bytes, length_bytes)


def _device_range(fd: int, request: int, offset_bytes: int, length_bytes: int) -> bool:
    try:
        fcntl.ioctl(fd, request, struct.pack("=QQ", offset_bytes, length_bytes))
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True
