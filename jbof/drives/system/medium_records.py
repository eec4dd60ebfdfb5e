"""The owner record on a file or block device, past the page cache: another machine may have written it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from meshfusion.jbof.drives.owner_record import (
    BLOCK_BYTES,
    BLOCK_COUNT,
    StoredRecord,
    encode_record,
    newest_record,
)
from meshfusion.jbof.drives.ownership import OwnerRecord
from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.drives.system.block_errors import RESERVATION_CONFLICT
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.buffer import AlignedBuffer


class MediumRecords:
    """:class:`~meshfusion.jbof.drives.ownership.OwnerRecords` in two blocks from ``offset_bytes`` on.

    ``direct``: O_DIRECT; off only where a file system has none, and then only one machine sees the file.
    """

    def __init__(self, path: Path, offset_bytes: int, *, direct: bool = True) -> None:
        assert offset_bytes % BLOCK_BYTES == 0
        self._path = path
        self._offset_bytes = offset_bytes
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)

    def read(self) -> OwnerRecord | None:
        stored = self._newest()
        return None if stored is None else stored.record

    def write(self, record: OwnerRecord) -> None:
        """A torn write damages the older block. Raises :class:`ReservationConflictError` when the drive was lost."""
        newest = self._newest()
        sequence = 0 if newest is None else newest.sequence + 1
        content = encode_record(StoredRecord(sequence, record))
        with self._opened(os.O_WRONLY) as fd, AlignedBuffer(BLOCK_BYTES) as buffer:
            buffer.view[:] = content
            done = os.pwritev(fd, [buffer.view], self._offset_bytes + sequence % BLOCK_COUNT * BLOCK_BYTES)
            if done != BLOCK_BYTES:
                raise OSError(0, f"only {done} bytes were written")
            os.fdatasync(fd)

    def _newest(self) -> StoredRecord | None:
        length_bytes = BLOCK_COUNT * BLOCK_BYTES
        with self._opened(os.O_RDONLY) as fd, AlignedBuffer(length_bytes) as buffer:
            if os.preadv(fd, [buffer.view], self._offset_bytes) != length_bytes:
                raise OSError(0, "it ends before the owner record")
            content = buffer.view.tobytes()
        return newest_record([content[:BLOCK_BYTES], content[BLOCK_BYTES:]], where=str(self._path))

    @contextlib.contextmanager
    def _opened(self, mode: int) -> Iterator[int]:
        try:
            fd = os.open(self._path, mode | self._flags)
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == RESERVATION_CONFLICT:
                raise ReservationConflictError(
                    f"{self._path} refused a write: another host holds its reservation",
                    next_step="Another service took the drive over: see which, before this one is started again.",
                ) from error
            raise MediaError(
                f"the owner record of {self._path} cannot be used: {error.strerror}",
                next_step="See the kernel's log for what is wrong with the drive.",
            ) from error
