"""Pieces of memory that one transfer reads into or writes from, one after another. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

MAX_VECTORS: Final = os.sysconf("SC_IOV_MAX")
"""Pieces that one call of the kernel takes (IOV_MAX)."""


def length_of(pieces: Sequence[memoryview]) -> int:
    """Bytes in all."""
    return sum(map(len, pieces))


def rest_of(pieces: Sequence[memoryview], done_bytes: int) -> Sequence[memoryview]:
    """What is left of ``pieces`` behind the first ``done_bytes`` of them; none of it is empty."""
    left_bytes = done_bytes
    for index, piece in enumerate(pieces):
        if left_bytes < len(piece):
            cut = piece[left_bytes:] if left_bytes else piece
            return [cut, *pieces[index + 1 :]]
        left_bytes -= len(piece)
    assert left_bytes == 0, f"{left_bytes} bytes more than there are"
    return []
