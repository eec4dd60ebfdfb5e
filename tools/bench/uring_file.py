"""A data file whose reads go through io_uring, to see what that does to the block path as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import DataFile
from meshfusion.jbof.media.vectors import MAX_VECTORS
from meshfusion.tools.bench.uring import Iovecs, Memory, Ring

DEPTH: Final = 64
PART_BYTES: Final = 1 << 20
"""A call's memory is read in parts of about this size, all under way at once."""


class UringFile(DataFile):
    """Takes ``opened`` over. ``registered``: memory that every ring pins once; None: READV everywhere."""

    def __init__(self, opened: DataFile, registered: Memory | None) -> None:
        super().__init__(
            opened._fd,
            Path(opened.path),
            size_bytes=opened.size_bytes,
            writable=opened.writable,
            direct=opened.direct,
            reason=opened.direct_reason,
            alignment=opened.alignment,
        )
        self._registered = registered
        self._of_thread = threading.local()

    def read_vectors(self, lba: int, pieces: Sequence[memoryview]) -> None:
        ring = self._ring()
        # Held here until every read of it has ended.
        parts = list(self._parts(lba * LBA_BYTES, pieces))
        waiting, under_way = iter(enumerate(parts)), 0
        while True:
            while under_way < DEPTH and (entry := next(waiting, None)) is not None:
                tag, (offset, iovecs, is_fixed) = entry
                if is_fixed:
                    ring.read_fixed(self._fd, offset, int(iovecs[0, 0]), int(iovecs[0, 1]), tag)
                else:
                    ring.read(self._fd, offset, iovecs, tag)
                under_way += 1
            if not under_way:
                return
            for tag, result in ring.wait():
                under_way -= 1
                if result != parts[tag][1][:, 1].sum():
                    raise DataFileError(MediaFault.IO, f"a read ended with {result}", self.path)

    def _parts(self, offset: int, pieces: Sequence[memoryview]) -> Iterator[tuple[int, Iovecs, bool]]:
        """(offset in the file, memory, is that registered?) of each read."""
        gathered: list[tuple[int, int]] = []
        gathered_bytes = 0
        for piece in pieces:
            address = np.frombuffer(piece, np.uint8).ctypes.data
            if self._is_registered(address, len(piece)):
                yield offset, np.array([(address, len(piece))], dtype=np.uint64), True
                offset += len(piece)
                continue
            gathered.append((address, len(piece)))
            gathered_bytes += len(piece)
            if self._registered is not None or gathered_bytes >= PART_BYTES or len(gathered) == MAX_VECTORS:
                yield offset, np.array(gathered, dtype=np.uint64), False
                offset, gathered, gathered_bytes = offset + gathered_bytes, [], 0
        if gathered:
            yield offset, np.array(gathered, dtype=np.uint64), False

    def _is_registered(self, address: int, length_bytes: int) -> bool:
        if self._registered is None:
            return False
        start = self._registered.ctypes.data
        return start <= address and address + length_bytes <= start + self._registered.nbytes

    def _ring(self) -> Ring:
        """Of this thread. It is closed when the thread's memory of it is gone, with the process at the latest."""
        ring: Ring | None = getattr(self._of_thread, "ring", None)
        if ring is None:
            ring = Ring(DEPTH)
            if self._registered is not None:
                ring.register(self._registered)
            self._of_thread.ring = ring
        return ring
