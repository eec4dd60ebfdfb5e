"""A transfer in pieces, so that a large one goes over several paths, and the end that they make together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.memory import RegionPart
from meshfusion.jbof.nvme.pending import PendingTransfer


class Piece(NamedTuple):
    """Whole blocks from ``lba`` on, and where they lie in memory."""

    lba: int
    memory: tuple[RegionPart, ...]

    @property
    def length_bytes(self) -> int:
        return sum(part.length_bytes for part in self.memory)


def pieces_of(lba: int, memory: Sequence[RegionPart], lba_bytes: int, piece_bytes: int) -> Iterator[Piece]:
    """In order, of ``piece_bytes`` rounded down to whole blocks (or of one block), but for the last one."""
    piece_lbas = max(1, piece_bytes // lba_bytes)
    room_bytes = piece_lbas * lba_bytes
    taken: list[RegionPart] = []
    for part in memory:
        offset_bytes = 0
        while offset_bytes < part.length_bytes:
            length_bytes = min(room_bytes, part.length_bytes - offset_bytes)
            taken.append(part.region.part(part.offset_bytes + offset_bytes, length_bytes))
            offset_bytes += length_bytes
            room_bytes -= length_bytes
            if room_bytes == 0:
                yield Piece(lba, tuple(taken))
                lba, taken, room_bytes = lba + piece_lbas, [], piece_lbas * lba_bytes
    if taken:
        yield Piece(lba, tuple(taken))


@dataclass(slots=True, eq=False)
class Whole:
    """``pending`` ends when all of ``count`` pieces have: in doubt if one is, else failed if one has.

    Its memory is free when that of every piece is.
    """

    pending: PendingTransfer
    count: int
    error: MeshFusionError | None = None
    doubt: MeshFusionError | None = None
    is_retryable: bool = True
    _ended: int = 0
    _free: int = 0

    def done(self) -> None:
        self._free += 1
        self._one_ended()

    def failed(self, error: MeshFusionError, *, is_retryable: bool) -> None:
        self.error = self.error or error
        self.is_retryable = self.is_retryable and is_retryable
        self._free += 1
        self._one_ended()

    def in_doubt(self, error: MeshFusionError) -> None:
        """:meth:`memory_free` follows."""
        self.doubt = self.doubt or error
        self._one_ended()

    def memory_free(self) -> None:
        self._free += 1
        self._settle()

    def _one_ended(self) -> None:
        self._ended += 1
        assert self._ended <= self.count
        if self._ended == self.count:
            if self.doubt is not None:
                self.pending.doubt(self.doubt)
            elif self.error is not None:
                self.pending.end(self.error, is_retryable=self.is_retryable)
            else:
                self.pending.end()
        self._settle()

    def _settle(self) -> None:
        assert self._free <= self.count
        if self.doubt is not None and self._ended == self._free == self.count:
            self.pending.free_memory()
