"""What is pushed into a card: the operator's BFB with our ``bf.cfg`` behind it, in two parts. No I/O of its own.

The installer begins once the BFB is in the card, and without ``bf.cfg`` it goes by defaults that erase a drive
(:mod:`meshfusion.dpu.image.bf_cfg`). So the end of the BFB is kept back and written together with ``bf.cfg`` in one
piece: whatever interrupts a push, the card has either not all of the BFB or all of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol

CHUNK_BYTES: Final = 1 << 20
KEPT_BACK_BYTES: Final = 64 * 1024


class Opened(Protocol):
    """A way to read the BFB from its beginning, as often as it takes."""

    def __call__(self) -> BinaryIO: ...


@dataclass(frozen=True, slots=True)
class Stream:
    """``bfb_bytes``: length of what ``open_bfb`` reads."""

    open_bfb: Opened
    bfb_bytes: int
    bf_cfg: bytes

    @property
    def total_bytes(self) -> int:
        return self.bfb_bytes + len(self.bf_cfg)

    @property
    def body_bytes(self) -> int:
        """All but the last piece."""
        return max(0, self.bfb_bytes - KEPT_BACK_BYTES)

    def body(self) -> Iterator[bytes]:
        """Pieces of at most CHUNK_BYTES. Raises OSError, and EOFError when the file has become shorter."""
        left_bytes = self.body_bytes
        with self.open_bfb() as file:
            while left_bytes:
                piece = file.read(min(CHUNK_BYTES, left_bytes))
                if not piece:
                    raise EOFError
                left_bytes -= len(piece)
                yield piece

    def last_piece(self) -> bytes:
        """To be written at once. Raises OSError, and EOFError when the file has become shorter."""
        with self.open_bfb() as file:
            file.seek(self.body_bytes)
            rest = file.read(self.bfb_bytes - self.body_bytes)
        if len(rest) != self.bfb_bytes - self.body_bytes:
            raise EOFError
        return rest + self.bf_cfg
