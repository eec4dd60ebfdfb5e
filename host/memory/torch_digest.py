"""The unit digest of :mod:`meshfusion.jbof.digest` on the device that the memory lies on, as operations of torch.

The same sums, in 64-bit integers that wrap: a unit's words are gathered in order, padded with zero words to whole
tiles (they add nothing), multiplied by their keys and summed tile by tile; only the two sums of each unit come back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from meshfusion.jbof.digest import DIGEST_BYTES, TILE_WORDS, WORD_BYTES, KeyTable
from meshfusion.jbof.errors import MediaError

SCRATCH_BYTES: Final = 32 << 20
"""What is left free on a device that an engine fills is little."""

_MASK: Final = (1 << 64) - 1
_SUM_BYTES_PER_WORD: Final = 16  # a word as int64, and its product with a key


class TorchDigest:
    """Digests units of ``memory`` (uint8[bytes], contiguous, on any device, 4-byte aligned) where they lie.

    ``keys``: made for the longest unit. A call takes up to ``scratch_bytes`` of the device's memory, and the size of
    a unit where that is more. On CUDA it runs in a stream of its own, after everything that the host has waited for
    and beside what the engine does. May be called by several threads.
    """

    def __init__(self, memory: torch.Tensor, keys: KeyTable, *, scratch_bytes: int = SCRATCH_BYTES) -> None:
        assert memory.dtype == torch.uint8
        assert memory.dim() == 1
        assert memory.is_contiguous()
        assert memory.data_ptr() % WORD_BYTES == 0
        self._memory = memory
        self._keys = keys
        self._scratch_bytes = scratch_bytes
        self._words = [torch.tensor(words, device=memory.device) for words in keys.words]  # int64[TILE_WORDS]
        self._tiles = [torch.tensor(tiles, device=memory.device) for tiles in keys.tiles]  # int64[tiles]
        self._in_stream = _own_stream(memory.device)

    def digest_units(self, run_offsets: npt.NDArray[np.int64], run_bytes: int) -> list[bytes]:
        """``run_offsets``: int64[units, runs] in bytes. Digests are those of what the memory holds now.

        Raises :class:`~meshfusion.jbof.errors.MediaError` when the device has no room or fails.
        """
        unit_count, run_count = run_offsets.shape
        unit_bytes = run_count * run_bytes
        assert run_bytes > 0
        assert run_bytes % WORD_BYTES == 0
        assert unit_bytes <= self._keys.max_bytes, f"{unit_bytes} bytes, keys for {self._keys.max_bytes}"
        if unit_count == 0:
            return []
        assert not (run_offsets & (WORD_BYTES - 1)).any(), "run offsets must be multiples of 4"
        assert run_offsets.min() >= 0, "a run lies outside the memory"
        assert run_offsets.max() + run_bytes <= self._memory.numel(), "a run lies outside the memory"
        batch = max(1, self._scratch_bytes // (2 * unit_bytes))
        sums: list[list[int]] = []
        try:
            with self._in_stream():
                for first in range(0, unit_count, batch):
                    sums += self._sums(self._gather(run_offsets[first : first + batch], run_bytes)).tolist()
        except RuntimeError as error:  # torch's, of which running out of memory is one
            raise MediaError(
                f"digests cannot be computed on {self._memory.device}: {error}",
                next_step="Leave the engine's device more free memory (vLLM: a lower gpu_memory_utilization).",
            ) from error
        return [self._finish(sum_0, sum_1, unit_bytes) for sum_0, sum_1 in sums]

    def _gather(self, run_offsets: npt.NDArray[np.int64], run_bytes: int) -> torch.Tensor:
        """The words of some units, int32[units, words].

        Runs are taken in pieces of the largest size that all of them start at multiples of: one index for each piece.
        """
        piece_bytes = math.gcd(run_bytes, *(int(offset) for offset in np.unique(run_offsets)))
        pieces_per_run = run_bytes // piece_bytes
        indexes = (run_offsets // piece_bytes)[:, :, None] + np.arange(pieces_per_run, dtype=np.int64)
        whole = self._memory[: self._memory.numel() // piece_bytes * piece_bytes]
        pieces = whole.view(torch.int32).view(-1, piece_bytes // WORD_BYTES)
        found = pieces.index_select(0, torch.from_numpy(indexes.reshape(-1)).to(self._memory.device))
        return found.view(len(run_offsets), -1)

    def _sums(self, words: torch.Tensor) -> torch.Tensor:
        """int64[units, 2] of int32[units, words], without the length."""
        unit_count, word_count = words.shape
        tile_count = -(-word_count // TILE_WORDS)
        padded = torch.nn.functional.pad(words, (0, tile_count * TILE_WORDS - word_count))
        tiles = padded.view(unit_count, tile_count, TILE_WORDS)
        step = max(1, self._scratch_bytes // (_SUM_BYTES_PER_WORD * TILE_WORDS * unit_count))
        sums = torch.zeros((unit_count, 2), dtype=torch.int64, device=words.device)
        for first in range(0, tile_count, step):
            part = tiles[:, first : first + step].to(torch.int64)
            for half in (0, 1):
                tile_sums = (part * self._words[half]).sum(dim=2)
                sums[:, half] += (tile_sums * self._tiles[half][first : first + tile_sums.shape[1]]).sum(dim=1)
        return sums

    def _finish(self, sum_0: int, sum_1: int, length_bytes: int) -> bytes:
        high_0 = ((sum_0 + self._keys.length[0] * length_bytes) & _MASK) >> 32
        high_1 = ((sum_1 + self._keys.length[1] * length_bytes) & _MASK) >> 32
        return (high_0 | high_1 << 32).to_bytes(DIGEST_BYTES, "little")


def _own_stream(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    if device.type != "cuda":
        return contextlib.nullcontext
    stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def in_stream() -> Iterator[None]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield

    return in_stream
