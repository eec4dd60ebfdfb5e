"""The compiled loops of the unit digest. Import this only through :func:`meshfusion.jbof.digest.load_kernels`.

Importing compiles (once per machine, then from numba's on-disk cache) and costs about 0.2 s for numba itself, which
is why it is a module of its own. All kernels run without the GIL, count in 32-bit words, and answer
``(ok, sum_0, sum_1)``: ``ok`` is False, with nothing touched, when a run lies outside ``memory`` or the staging
range outside ``staging``. 64-bit integers wrap, as the digest wants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from meshfusion.jbof.digest import TILE_WORDS

_Function = TypeVar("_Function", bound=Callable[..., object])
_Words = npt.NDArray[np.int32]
_Keys = npt.NDArray[np.int64]
_Offsets = npt.NDArray[np.int64]
_Sums = tuple[bool, int, int]

# Bytes are copied and summed tile by tile, so that the sum reads a tile while it is still in the first caches.
_TILE_WORDS = TILE_WORDS

_OUT = types.Array(types.int32, 1, "C")
_IN = types.Array(types.int32, 1, "C", readonly=True)
_KEYS = types.Array(types.int64, 1, "C", readonly=True)
_OFFSETS = types.Array(types.int64, 1, "C", readonly=True)
_OFFSETS_OF_UNITS = types.Array(types.int64, 2, "C")
_SUMS = types.Array(types.int64, 2, "C")
_PAIR = types.UniTuple(types.int64, 2)
_RESULT = types.Tuple((types.boolean, types.int64, types.int64))


def _compiled(signature: object) -> Callable[[_Function], _Function]:
    """``njit`` with an on-disk cache where one can be written, without where none can."""

    def compile_function(function: _Function) -> _Function:
        try:
            kernel: _Function = numba.njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # no writable place for the cache, or its disk is full
            kernel = numba.njit(signature, nogil=True)(function)
        return kernel

    return compile_function


@_compiled(_PAIR(_IN, _KEYS, _KEYS))
def sum_words(words: _Words, keys_0: _Keys, keys_1: _Keys) -> tuple[int, int]:
    sum_0 = np.int64(0)
    sum_1 = np.int64(0)
    for i in range(words.size):
        word = np.int64(words[i])
        sum_0 += keys_0[i] * word
        sum_1 += keys_1[i] * word
    return sum_0, sum_1  # type: ignore[return-value]


@_compiled(types.boolean(types.int64, _OFFSETS, types.int64))
def runs_fit(memory_words: int, run_offsets: _Offsets, run_words: int) -> bool:
    outside = 0
    for r in range(run_offsets.size):
        outside += run_offsets[r] < 0 or run_offsets[r] > memory_words - run_words
    return outside == 0


@_compiled(_RESULT(_IN, _OFFSETS, types.int64, _KEYS, _KEYS, _KEYS, _KEYS))
def digest_runs(
    memory: _Words,
    run_offsets: _Offsets,
    run_words: int,
    keys_0: _Keys,
    keys_1: _Keys,
    tiles_0: _Keys,
    tiles_1: _Keys,
) -> _Sums:
    sum_0 = np.int64(0)
    sum_1 = np.int64(0)
    if not runs_fit(memory.size, run_offsets, run_words):
        return False, sum_0, sum_1  # type: ignore[return-value]
    position = 0
    for r in range(run_offsets.size):
        done = 0
        while done < run_words:
            within = position % _TILE_WORDS
            count = min(_TILE_WORDS - within, run_words - done)
            first = run_offsets[r] + done
            part_0, part_1 = sum_words(
                memory[first : first + count], keys_0[within : within + count], keys_1[within : within + count]
            )
            sum_0 += tiles_0[position // _TILE_WORDS] * part_0
            sum_1 += tiles_1[position // _TILE_WORDS] * part_1
            done += count
            position += count
    return True, sum_0, sum_1  # type: ignore[return-value]


@_compiled(types.boolean(_IN, _OFFSETS_OF_UNITS, types.int64, _KEYS, _KEYS, _KEYS, _KEYS, _SUMS))
def digest_units(
    memory: _Words,
    run_offsets: _Offsets,
    run_words: int,
    keys_0: _Keys,
    keys_1: _Keys,
    tiles_0: _Keys,
    tiles_1: _Keys,
    sums: _Offsets,
) -> bool:
    """Several units; ``sums`` (int64[units, 2]) takes their sums. Answers ``ok`` for all of them together."""
    fits = True
    for u in range(run_offsets.shape[0]):
        fit, sums[u, 0], sums[u, 1] = digest_runs(memory, run_offsets[u], run_words, keys_0, keys_1, tiles_0, tiles_1)
        fits = fits and fit
    return fits


@_compiled(_RESULT(_IN, types.int64, _OUT, _OFFSETS, types.int64, _KEYS, _KEYS, _KEYS, _KEYS))
def scatter_and_digest(
    staging: _Words,
    staging_first: int,
    memory: _Words,
    run_offsets: _Offsets,
    run_words: int,
    keys_0: _Keys,
    keys_1: _Keys,
    tiles_0: _Keys,
    tiles_1: _Keys,
) -> _Sums:
    sum_0 = np.int64(0)
    sum_1 = np.int64(0)
    fits = staging_first >= 0 and staging_first <= staging.size - run_offsets.size * run_words
    if not (fits and runs_fit(memory.size, run_offsets, run_words)):
        return False, sum_0, sum_1  # type: ignore[return-value]
    position = 0
    for r in range(run_offsets.size):
        done = 0
        while done < run_words:
            within = position % _TILE_WORDS
            count = min(_TILE_WORDS - within, run_words - done)
            first = run_offsets[r] + done
            source = staging[staging_first + position : staging_first + position + count]
            target = memory[first : first + count]
            for i in range(count):
                target[i] = source[i]
            part_0, part_1 = sum_words(target, keys_0[within : within + count], keys_1[within : within + count])
            sum_0 += tiles_0[position // _TILE_WORDS] * part_0
            sum_1 += tiles_1[position // _TILE_WORDS] * part_1
            done += count
            position += count
    return True, sum_0, sum_1  # type: ignore[return-value]


@_compiled(
    types.boolean(
        _IN, types.int64, types.int64, _OUT, _OFFSETS_OF_UNITS, types.int64, _KEYS, _KEYS, _KEYS, _KEYS, _SUMS
    )
)
def scatter_and_digest_units(
    staging: _Words,
    staging_first: int,
    staging_stride: int,
    memory: _Words,
    run_offsets: _Offsets,
    run_words: int,
    keys_0: _Keys,
    keys_1: _Keys,
    tiles_0: _Keys,
    tiles_1: _Keys,
    sums: _Offsets,
) -> bool:
    """Several units; ``sums`` (int64[units, 2]) takes their sums. Answers ``ok`` for all of them together."""
    unit_count = run_offsets.shape[0]
    unit_words = run_offsets.shape[1] * run_words
    last = staging_first + (unit_count - 1) * staging_stride
    if staging_first < 0 or staging_stride < unit_words or last > staging.size - unit_words:
        return False
    for u in range(unit_count):
        if not runs_fit(memory.size, run_offsets[u], run_words):
            return False
    for u in range(unit_count):
        _, sums[u, 0], sums[u, 1] = scatter_and_digest(
            staging,
            staging_first + u * staging_stride,
            memory,
            run_offsets[u],
            run_words,
            keys_0,
            keys_1,
            tiles_0,
            tiles_1,
        )
    return True


@_compiled(_RESULT(_IN, _OFFSETS, types.int64, _OUT, types.int64, _KEYS, _KEYS, _KEYS, _KEYS))
def gather_and_digest(
    memory: _Words,
    run_offsets: _Offsets,
    run_words: int,
    staging: _Words,
    staging_first: int,
    keys_0: _Keys,
    keys_1: _Keys,
    tiles_0: _Keys,
    tiles_1: _Keys,
) -> _Sums:
    sum_0 = np.int64(0)
    sum_1 = np.int64(0)
    fits = staging_first >= 0 and staging_first <= staging.size - run_offsets.size * run_words
    if not (fits and runs_fit(memory.size, run_offsets, run_words)):
        return False, sum_0, sum_1  # type: ignore[return-value]
    position = 0
    for r in range(run_offsets.size):
        done = 0
        while done < run_words:
            within = position % _TILE_WORDS
            count = min(_TILE_WORDS - within, run_words - done)
            first = run_offsets[r] + done
            source = memory[first : first + count]
            target = staging[staging_first + position : staging_first + position + count]
            part_0, part_1 = sum_words(source, keys_0[within : within + count], keys_1[within : within + count])
            for i in range(count):
                target[i] = source[i]
            sum_0 += tiles_0[position // _TILE_WORDS] * part_0
            sum_1 += tiles_1[position // _TILE_WORDS] * part_1
            done += count
            position += count
    return True, sum_0, sum_1  # type: ignore[return-value]
