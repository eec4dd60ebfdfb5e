"""A prompt's chunks as the policies see them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The chunks of one KV group that a request asks for, from the prompt's first token on.

    ``keys``: 64 uniformly distributed bits of each chunk's key, shape (chunks,). Chunk ``i`` begins at token
    ``i * chunk_tokens`` and its predecessor is chunk ``i - 1``. ``whole_count``: how many of them, from the first, have
    all their tokens; a chunk that is not whole can only be reused by an equal prompt. ``skipped``: chunks of the prompt
    before these that the group does not need any more.
    """

    group: int
    keys: Keys
    chunk_tokens: int
    chunk_bytes: int
    whole_count: int
    skipped: int = 0

    def __post_init__(self) -> None:
        assert self.keys.ndim == 1, self.keys.shape
        assert self.keys.dtype == np.uint64, self.keys.dtype
        assert self.chunk_tokens > 0, self.chunk_tokens
        assert self.chunk_bytes > 0, self.chunk_bytes
        assert 0 <= self.whole_count <= len(self.keys), (self.whole_count, len(self.keys))

    @property
    def tokens(self) -> int:
        """Tokens of a prompt that fills all chunks."""
        return (self.skipped + len(self.keys)) * self.chunk_tokens
