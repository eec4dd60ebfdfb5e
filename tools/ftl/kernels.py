"""The compiled loops of the flash translation layer. Importing them costs about 0.2 s for numba itself.

All work on one :class:`Tables`. A physical page is ``superblock * superblock_pages + position``. Write point
``h < handle_count`` is the host's with handle ``h``; those after it take what garbage collection moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt

_Function = TypeVar("_Function", bound=Callable[..., object])

FREE: Final = 0
OPEN: Final = 1
CLOSED: Final = 2

# Places in Tables.numbers.
SUPERBLOCK_PAGES: Final = 0
HANDLES: Final = 1
MOVED_POINTS: Final = 2  # write points for moved pages: 1, or one for each handle
RESERVE: Final = 3
FREE_COUNT: Final = 4
HOST_PAGES: Final = 5
MOVED_PAGES: Final = 6
ERASES: Final = 7
NUMBERS: Final = 8

NOWHERE: Final = -1


class Tables(NamedTuple):
    """``place``: logical page to physical page; ``content``: physical page to logical page, meaningful only where
    ``place`` agrees; ``valid``, ``status``, ``owner`` (handle), ``erases``: by superblock; ``open_block``,
    ``next_page`` (position in it): by write point; ``numbers``: see above."""

    place: npt.NDArray[np.int32]
    content: npt.NDArray[np.int32]
    valid: npt.NDArray[np.int32]
    status: npt.NDArray[np.int8]
    owner: npt.NDArray[np.int16]
    erases: npt.NDArray[np.int32]
    open_block: npt.NDArray[np.int32]
    next_page: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int64]


def _compiled(function: _Function) -> _Function:
    """``njit`` with an on-disk cache where one can be written, without where none can."""
    try:
        kernel: _Function = numba.njit(nogil=True, cache=True)(function)
    except (RuntimeError, OSError):  # no writable place for the cache, or its disk is full
        kernel = numba.njit(nogil=True)(function)
    return kernel


@_compiled
def _open_free(t: Tables, point: int, handle: int) -> None:
    """Give ``point`` the free superblock with the fewest erases, the lowest of them."""
    best = NOWHERE
    for block in range(t.status.size):
        if t.status[block] == FREE and (best == NOWHERE or t.erases[block] < t.erases[best]):
            best = block
    assert best != NOWHERE
    if t.open_block[point] != NOWHERE:
        t.status[t.open_block[point]] = CLOSED
    t.status[best] = OPEN
    t.owner[best] = handle
    t.numbers[FREE_COUNT] -= 1
    t.open_block[point] = best
    t.next_page[point] = 0


@_compiled
def _append(t: Tables, point: int, page: int) -> None:
    """Put logical ``page`` at the end of the superblock of ``point``, which has room."""
    block = t.open_block[point]
    physical = block * t.numbers[SUPERBLOCK_PAGES] + t.next_page[point]
    t.place[page] = physical
    t.content[physical] = page
    t.valid[block] += 1
    t.next_page[point] += 1


@_compiled
def _is_full(t: Tables, point: int) -> bool:
    return bool(t.open_block[point] == NOWHERE or t.next_page[point] == t.numbers[SUPERBLOCK_PAGES])


@_compiled
def _victim(t: Tables) -> int:
    """Greedy: the closed superblock with the fewest valid pages; of equals that with the fewest erases."""
    best = NOWHERE
    for block in range(t.status.size):
        if t.status[block] == CLOSED and (
            best == NOWHERE
            or t.valid[block] < t.valid[best]
            or (t.valid[block] == t.valid[best] and t.erases[block] < t.erases[best])
        ):
            best = block
    return best


@_compiled
def _collect(t: Tables) -> None:
    """Move the valid pages out of one superblock and erase it."""
    pages = t.numbers[SUPERBLOCK_PAGES]
    victim = _victim(t)
    assert victim != NOWHERE
    assert t.valid[victim] < pages
    point = t.numbers[HANDLES] + (t.owner[victim] if t.numbers[MOVED_POINTS] > 1 else 0)
    for physical in range(victim * pages, (victim + 1) * pages):
        page = t.content[physical]
        if page != NOWHERE and t.place[page] == physical:
            if _is_full(t, point):
                _open_free(t, point, t.owner[victim])
            _append(t, point, page)
            t.numbers[MOVED_PAGES] += 1
        t.content[physical] = NOWHERE
    t.valid[victim] = 0
    t.status[victim] = FREE
    t.erases[victim] += 1
    t.numbers[FREE_COUNT] += 1
    t.numbers[ERASES] += 1


@_compiled
def _forget(t: Tables, page: int) -> None:
    if t.place[page] != NOWHERE:
        t.valid[t.place[page] // t.numbers[SUPERBLOCK_PAGES]] -= 1
        t.place[page] = NOWHERE


@_compiled
def write_pages(t: Tables, first_page: int, page_count: int, handle: int) -> None:
    """The host writes a run of pages."""
    for page in range(first_page, first_page + page_count):
        _forget(t, page)
        if _is_full(t, handle):
            while t.numbers[FREE_COUNT] <= t.numbers[RESERVE]:
                _collect(t)
            _open_free(t, handle, handle)
        _append(t, handle, page)
    t.numbers[HOST_PAGES] += page_count


@_compiled
def write_scattered(t: Tables, pages: npt.NDArray[np.int64], handle: int) -> None:
    """The host writes single pages, in this order."""
    for page in pages:
        write_pages(t, page, 1, handle)


@_compiled
def deallocate_pages(t: Tables, first_page: int, page_count: int) -> None:
    for page in range(first_page, first_page + page_count):
        _forget(t, page)
