"""As much of io_uring as it takes to measure reads with it, by its system calls (Linux: include/uapi/linux/io_uring.h).

Only for measurements. No binding of Python did: one (PyPI ``liburing`` 2026.3.30) keeps the GIL while it waits, the
other (``uring-api`` 0.1.0rc5) has neither vectored reads nor registered buffers. A ring belongs to one thread; the
system call orders what that thread and the kernel see of each other's writes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from meshfusion.jbof.errors import UnsupportedError

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same number on every architecture
_PARAMS_BYTES: Final = 120
_FEATURE_SINGLE_MMAP: Final = 1
_COOP_TASKRUN, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 8, 1 << 12, 1 << 13
_SQES_AT: Final = 0x10000000
_GETEVENTS: Final = 1
_REGISTER_BUFFERS: Final = 0
_READV, _READ_FIXED = 1, 4
_SQE = struct.Struct("=BBHiQQIIQHHiQQ")
_CQE = struct.Struct("=QiI")

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]
Iovecs = np.ndarray[tuple[int, int], np.dtype[np.uint64]]  # (address, bytes) of each piece


def iovecs_of(addresses: Sequence[int], length_bytes: int) -> Iovecs:
    """``struct iovec`` of pieces of one length."""
    return np.array([(address, length_bytes) for address in addresses], dtype=np.uint64)


class Ring:
    """``depth``: reads under way at once, a power of two. Raises UnsupportedError where the kernel has none for us."""

    def __init__(self, depth: int) -> None:
        self._call: Any = ctypes.CDLL(None, use_errno=True).syscall
        self._fd, params = self._set_up(depth)
        sq_entries, cq_entries, _, _, _, features = struct.unpack_from("=6I", params)
        assert features & _FEATURE_SINGLE_MMAP, "since Linux 5.4"
        _, sq_tail, sq_mask, _, _, _, sq_array = struct.unpack_from("=7I", params, 40)
        cq_head, cq_tail, cq_mask, _, _, cqes = struct.unpack_from("=6I", params, 80)
        ring_bytes = max(sq_array + 4 * sq_entries, cqes + _CQE.size * cq_entries)
        self._ring = mmap.mmap(self._fd, ring_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._sqes = mmap.mmap(
            self._fd, _SQE.size * sq_entries, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=_SQES_AT
        )
        words = np.frombuffer(self._ring, np.uint32, ring_bytes // 4)
        self._tail, self._mask = words[sq_tail // 4 :], int(words[sq_mask // 4])
        self._done_head, self._done_tail = words[cq_head // 4 :], words[cq_tail // 4 :]
        self._done_mask, self._cqes_at = int(words[cq_mask // 4]), cqes
        words[sq_array // 4 : sq_array // 4 + sq_entries] = np.arange(sq_entries)
        self._unsubmitted = 0

    def _set_up(self, depth: int) -> tuple[int, bytes]:
        """With what saves most where the kernel has it (6.1), else plainly."""
        for flags in (_COOP_TASKRUN | _SINGLE_ISSUER | _DEFER_TASKRUN, 0):
            params = ctypes.create_string_buffer(_PARAMS_BYTES)
            struct.pack_into("=I", params, 8, flags)
            fd = int(self._call(_SETUP, depth, params))
            if fd >= 0:
                return fd, params.raw
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                break
        raise UnsupportedError(
            f"the kernel sets up no io_uring: {os.strerror(code)}",
            next_step="see sysctl kernel.io_uring_disabled, and the container's seccomp profile",
        )

    def register(self, memory: Memory) -> None:
        """For :meth:`read_fixed`: its pages are pinned once, not at every read."""
        iovec = iovecs_of([memory.ctypes.data], memory.nbytes)
        if self._call(_REGISTER, self._fd, _REGISTER_BUFFERS, ctypes.c_void_p(iovec.ctypes.data), 1) < 0:
            code = ctypes.get_errno()
            raise UnsupportedError(
                f"io_uring does not register {memory.nbytes} bytes: {os.strerror(code)}",
                next_step="raise RLIMIT_MEMLOCK",
            )

    def read(self, fd: int, offset_bytes: int, pieces: Iovecs, tag: int) -> None:
        """``pieces`` must live until the read has ended."""
        self._put(_READV, fd, offset_bytes, pieces.ctypes.data, len(pieces), tag)

    def read_fixed(self, fd: int, offset_bytes: int, address: int, length_bytes: int, tag: int) -> None:
        """Into memory that was registered."""
        self._put(_READ_FIXED, fd, offset_bytes, address, length_bytes, tag)

    def _put(self, code: int, fd: int, offset_bytes: int, address: int, length: int, tag: int) -> None:
        tail = int(self._tail[0])
        at = (tail & self._mask) * _SQE.size
        _SQE.pack_into(self._sqes, at, code, 0, 0, fd, offset_bytes, address, length, 0, tag, 0, 0, 0, 0, 0)
        self._tail[0] = (tail + 1) & 0xFFFFFFFF
        self._unsubmitted += 1

    def wait(self) -> list[tuple[int, int]]:
        """Submits; (tag, bytes read or -errno) of each read that has ended, at least one. Without the GIL."""
        count = int(self._call(_ENTER, self._fd, self._unsubmitted, 1, _GETEVENTS, None, 0))
        if count < 0:
            raise OSError(ctypes.get_errno(), "io_uring_enter failed")
        self._unsubmitted -= count
        head, tail = int(self._done_head[0]), int(self._done_tail[0])
        ended = []
        while head != tail:
            tag, result, _ = _CQE.unpack_from(self._ring, self._cqes_at + (head & self._done_mask) * _CQE.size)
            ended.append((tag, result))
            head = (head + 1) & 0xFFFFFFFF
        self._done_head[0] = head
        return ended

    def close(self) -> None:
        os.close(self._fd)
