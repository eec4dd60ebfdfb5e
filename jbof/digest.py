"""The digest that proves one unit of a shard (rule 4).

Definition. A unit is ``length_bytes`` bytes, a multiple of 4, read as little-endian **signed** 32-bit words ``w[i]``.
Where a unit lies in memory as several runs, its bytes are the runs in order, and ``i`` counts on across them. Words are
summed in tiles of ``TILE_WORDS`` = 4096 (16 KiB), the last one perhaps shorter. ::

    T_j[t] = sum over i < 4096 of k_j[i] * w[4096 t + i]                        (mod 2^64, j = 0, 1)
    s_j    = kL_j * length_bytes + sum over t of m_j[t] * T_j[t]                (mod 2^64)
    digest = little-endian u32(s_0 >> 32), then u32(s_1 >> 32)                  (8 bytes)

Keys are fixed: they are part of the on-media format. With ``mix`` the output function of splitmix64 and ``G`` its
increment 0x9E3779B97F4A7C15, ::

    mix(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;  z ^ (z >> 31)
    k_j[i] = mix(WORD_KEY_SEEDS[j]   + (i + 1) * G)
    m_j[t] = mix(TILE_KEY_SEEDS[j]   + (t + 1) * G) | 1
    kL_j   = mix(LENGTH_KEY_SEEDS[j] + G)

Why it works: two words differ by less than 2^32, so the difference times a random 64-bit key has at least 33 random
high bits; an odd multiplier keeps them, and each 32-bit half misses a change with a chance of about 2^-32. Two tiles
that changed places cancel only through ``m_j[a] - m_j[b]``, which loses a bit or a few, in both halves independently.
Sums do not care about order, so any number of lanes, runs or devices gives the same answer. It finds accidents and
misplaced data; it is no signature.

Keys come from a table, not from the generator inside the loop, and the table is used again for every tile: 128 KiB stay
in a second-level cache. Keys for every word of a unit would be 16 bytes to read for 4 bytes of data; measured on units
of 3 MB, copying and digesting is 1.5 times as fast with tiles, three quarters of the speed of copying alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt

DIGEST_BYTES: Final = 8
WORD_BYTES: Final = 4
TILE_WORDS: Final = 4096
# The first 384 bits of the fraction of pi: nothing up the sleeve.
WORD_KEY_SEEDS: Final = (0x243F6A8885A308D3, 0x13198A2E03707344)
LENGTH_KEY_SEEDS: Final = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)
TILE_KEY_SEEDS: Final = (0x452821E638D01377, 0xBE5466CF34E90C6C)

_INCREMENT: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

Memory = npt.NDArray[np.uint8]
RunOffsets = npt.NDArray[np.int64] | Sequence[int]


def _splitmix64(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """The first ``count`` outputs of splitmix64 started at ``seed``."""
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(_INCREMENT)
    z += np.uint64(seed)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """Keys for units of up to ``max_bytes`` bytes; 128 KiB and a thousandth of ``max_bytes``, read-only.

    ``words[j]``: int64[TILE_WORDS], the bits of ``k_j[i]``. ``tiles[j]``: int64[tiles of the longest unit], ``m_j[t]``.
    ``length[j]``: ``kL_j``.
    """

    max_bytes: int
    words: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    tiles: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    length: tuple[int, int]

    @classmethod
    def for_bytes(cls, max_bytes: int) -> KeyTable:
        assert max_bytes > 0
        assert max_bytes % WORD_BYTES == 0
        tile_count = -(-max_bytes // (TILE_WORDS * WORD_BYTES))
        words = [_splitmix64(seed, TILE_WORDS).view(np.int64) for seed in WORD_KEY_SEEDS]
        tiles = [(_splitmix64(seed, tile_count) | np.uint64(1)).view(np.int64) for seed in TILE_KEY_SEEDS]
        for keys in (*words, *tiles):
            keys.flags.writeable = False
        length = [int(_splitmix64(seed, 1)[0]) for seed in LENGTH_KEY_SEEDS]
        return cls(max_bytes, (words[0], words[1]), (tiles[0], tiles[1]), (length[0], length[1]))


class DigestKernels:
    """Digests units where they lie, and moves them on the way. Made once by :func:`load_kernels`, shared by threads.

    ``memory`` is a whole allocation (uint8, C-contiguous, 4-byte aligned; many GB are fine). A unit lies in it as runs
    of ``run_bytes`` at ``run_offsets`` (bytes); pass offsets as an int64 array where speed matters. All numbers are
    multiples of 4. ``staging`` and ``memory`` must not overlap. Each call is one pass without the GIL and returns the
    8-byte digest. Asserts that runs lie inside ``memory`` and the unit inside ``staging``, before touching either.
    """

    def __init__(self, keys: KeyTable, kernels: ModuleType) -> None:
        self._keys = keys
        self._kernels = kernels
        self._tables = (*keys.words, *keys.tiles)

    @property
    def max_bytes(self) -> int:
        """The longest unit there are keys for."""
        return self._keys.max_bytes

    def digest_runs(self, memory: Memory, run_offsets: RunOffsets, run_bytes: int) -> bytes:
        """The digest of the unit that lies in ``memory``."""
        offsets, length_bytes = self._unit(run_offsets, run_bytes)
        sums = self._kernels.digest_runs(_words(memory), offsets, run_bytes // WORD_BYTES, *self._tables)
        return self._finish(sums, length_bytes)

    def digest_units(self, memory: Memory, run_offsets: npt.NDArray[np.int64], run_bytes: int) -> list[bytes]:
        """The same for several units, in one go without the GIL. ``run_offsets``: int64[units, runs]."""
        length_bytes = self._check_units(run_offsets, run_bytes)
        sums = np.empty((len(run_offsets), 2), dtype=np.int64)
        fits = self._kernels.digest_units(
            _words(memory), np.ascontiguousarray(run_offsets) >> 2, run_bytes // WORD_BYTES, *self._tables, sums
        )
        return self._finish_units(fits, sums, length_bytes)

    def scatter_and_digest(
        self, staging: Memory, staging_offset: int, memory: Memory, run_offsets: RunOffsets, run_bytes: int
    ) -> bytes:
        """Copy the unit at ``staging[staging_offset:]`` into its runs; the digest is of what ``memory`` then holds."""
        offsets, length_bytes = self._unit(run_offsets, run_bytes)
        sums = self._kernels.scatter_and_digest(
            _words(staging),
            _word_count(staging_offset),
            _words(memory),
            offsets,
            run_bytes // WORD_BYTES,
            *self._tables,
        )
        return self._finish(sums, length_bytes)

    def scatter_and_digest_units(
        self,
        staging: Memory,
        staging_offset: int,
        staging_stride: int,
        memory: Memory,
        run_offsets: npt.NDArray[np.int64],
        run_bytes: int,
    ) -> list[bytes]:
        """The same for several units, ``staging_stride`` bytes apart, in one go without the GIL.

        ``run_offsets``: int64[units, runs]. A thread that is needed again only once for many units waits for the GIL
        only once: where another thread is busy in Python each wait takes milliseconds.
        """
        length_bytes = self._check_units(run_offsets, run_bytes)
        sums = np.empty((len(run_offsets), 2), dtype=np.int64)
        fits = self._kernels.scatter_and_digest_units(
            _words(staging),
            _word_count(staging_offset),
            _word_count(staging_stride),
            _words(memory),
            np.ascontiguousarray(run_offsets) >> 2,
            run_bytes // WORD_BYTES,
            *self._tables,
            sums,
        )
        return self._finish_units(fits, sums, length_bytes)

    def gather_and_digest(
        self, memory: Memory, run_offsets: RunOffsets, run_bytes: int, staging: Memory, staging_offset: int
    ) -> bytes:
        """Copy the unit from its runs to ``staging[staging_offset:]``; the digest is of what ``memory`` holds."""
        offsets, length_bytes = self._unit(run_offsets, run_bytes)
        sums = self._kernels.gather_and_digest(
            _words(memory),
            offsets,
            run_bytes // WORD_BYTES,
            _words(staging),
            _word_count(staging_offset),
            *self._tables,
        )
        return self._finish(sums, length_bytes)

    def _unit(self, run_offsets: RunOffsets, run_bytes: int) -> tuple[npt.NDArray[np.int64], int]:
        offsets = np.ascontiguousarray(run_offsets, dtype=np.int64)
        length_bytes = run_bytes * offsets.size
        assert offsets.ndim == 1
        assert run_bytes > 0
        assert run_bytes % WORD_BYTES == 0
        assert length_bytes <= self._keys.max_bytes, f"{length_bytes} bytes, keys for {self._keys.max_bytes}"
        assert not (offsets & (WORD_BYTES - 1)).any(), "run offsets must be multiples of 4"
        return offsets >> 2, length_bytes

    def _check_units(self, run_offsets: npt.NDArray[np.int64], run_bytes: int) -> int:
        """The length of each of them, in bytes."""
        flat, length_bytes = self._unit(run_offsets[0], run_bytes)
        _, run_count = run_offsets.shape
        assert flat.size == run_count
        assert not (run_offsets & (WORD_BYTES - 1)).any(), "run offsets must be multiples of 4"
        return length_bytes

    def _finish_units(self, fits: bool, sums: npt.NDArray[np.int64], length_bytes: int) -> list[bytes]:
        return [self._finish((fits, sum_0, sum_1), length_bytes) for sum_0, sum_1 in sums.tolist()]

    def _finish(self, sums: tuple[bool, int, int], length_bytes: int) -> bytes:
        fits, sum_0, sum_1 = sums
        assert fits, "a run lies outside the memory, or the unit outside the staging buffer"
        high_0 = ((sum_0 + self._keys.length[0] * length_bytes) & _MASK) >> 32
        high_1 = ((sum_1 + self._keys.length[1] * length_bytes) & _MASK) >> 32
        return (high_0 | high_1 << 32).to_bytes(DIGEST_BYTES, "little")


def load_kernels(max_bytes: int) -> DigestKernels:
    """The kernels (the first time on a machine: compiled, seconds), with keys for units of up to ``max_bytes``."""
    assert sys.byteorder == "little", "words are little-endian on the medium"
    from meshfusion.jbof import digest_kernels  # here, because importing numba costs 0.2 s

    return DigestKernels(KeyTable.for_bytes(max_bytes), digest_kernels)


def _words(memory: Memory) -> npt.NDArray[np.int32]:
    assert memory.dtype == np.uint8
    assert memory.ndim == 1
    return memory[: memory.size & ~(WORD_BYTES - 1)].view(np.int32)


def _word_count(length_bytes: int) -> int:
    assert length_bytes % WORD_BYTES == 0
    return length_bytes // WORD_BYTES
