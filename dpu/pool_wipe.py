"""What a device or file held before it becomes a pool's, made unreadable: a host that reaches a pool's namespaces can
read all of them, and what lies there may have been another tenant's.

All of it is zeroed, not only what the pool will use. The kernel deallocates where the drive promises zeros for that
(BLKZEROOUT: block/blk-lib.c, blkdev_issue_zeroout) and writes them elsewhere; a file's holes are left alone, they read
as zeros. Then samples are read: a drive that breaks its promise is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile, open_data_file

PIECE_BYTES: Final = 1 << 30
"""At once: an NVMe drive writes it within a second or so, and who is told may stop it in between."""

_WRITE_BYTES: Final = 4 << 20
_SAMPLES: Final = 256

# (bytes done, bytes in all) -> None; what it raises ends the wiping.
Tell = Callable[[int, int], None]


def nobody(done_bytes: int, total_bytes: int) -> None:
    """Is not told."""


def wipe(path: Path, tell: Tell = nobody) -> None:
    """Nothing that was at ``path`` can be read there any more. Raises :class:`~meshfusion.jbof.errors.MediaError`, and
    what ``tell`` raises; it can be done again then."""
    with contextlib.closing(open_data_file(path, writable=True)) as data:
        tell(0, data.size_bytes)
        for offset_bytes, length_bytes in _pieces(data):
            if not data.zero(offset_bytes, length_bytes):
                _write_zeros(data, offset_bytes, length_bytes)
            tell(offset_bytes + length_bytes, data.size_bytes)
        data.flush()
        _check_samples(data)


def _pieces(data: DataFile) -> Iterator[tuple[int, int]]:
    """``(offset, length)`` in bytes, of all that may hold anything."""
    at = 0
    while (found := data.next_data(at)) is not None:
        at, end = found
        while at < end:
            length = min(PIECE_BYTES, end - at)
            yield at, length
            at += length


def _write_zeros(data: DataFile, offset_bytes: int, length_bytes: int) -> None:
    """Whole blocks: at the end of a device a part of one cannot be written, nor is it exported."""
    first, end = offset_bytes // LBA_BYTES, min(-(-(offset_bytes + length_bytes) // LBA_BYTES), data.lba_count)
    with AlignedBuffer(_WRITE_BYTES) as zeros:
        step = _WRITE_BYTES // LBA_BYTES
        for lba in range(first, end, step):
            data.write_from(lba, zeros.view[: min(step, end - lba) * LBA_BYTES])


def _check_samples(data: DataFile) -> None:
    """The first and the last block, and some at equal distances."""
    count = min(_SAMPLES, data.lba_count)
    with AlignedBuffer(LBA_BYTES) as block:
        for i in range(count):
            lba = i * (data.lba_count - 1) // max(1, count - 1)
            data.read_into(lba, block.view)
            if block.array.any():
                raise MediaError(
                    f"{data.path} was told to hold zeros, and block {lba} does not",
                    next_step="do not use this drive for several tenants; format it with its maker's tools, or name "
                    "another one",
                )
