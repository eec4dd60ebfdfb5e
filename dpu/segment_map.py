"""For people: the segments of each drive of a served pool, by state, in a bounded number of cells.

One look takes the pool's mutex for a bounded number of segments at a time, so that lookups come in between; what
changes meanwhile is seen as it was before or after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from meshfusion.jbof.segment_states import SegmentTally

MAX_CELLS: Final = 2048  # of all drives together
SEGMENTS_AT_ONCE: Final = 2048  # under the mutex
_NONE: Final = SegmentTally(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class DriveMap:
    """``cells[i]``: of the drive's own segments from ``i * cell_segments`` on."""

    drive: int
    segment_count: int
    cell_segments: int
    cells: tuple[SegmentTally, ...]


class SegmentView(Protocol):
    """What tells of the segments of a pool."""

    def segment_maps(self) -> tuple[DriveMap, ...]: ...


class ViewedShelf(Protocol):
    """What is used of :class:`~meshfusion.jbof.shelf.Shelf`."""

    @property
    def numbers(self) -> frozenset[int]: ...

    def segments_of(self, number: int) -> range: ...

    def tally(self, number: int, segments: range, is_quarantined: Callable[[int], bool]) -> SegmentTally | None: ...


class ViewedGrants(Protocol):
    """What is used of :class:`~meshfusion.dpu.store.grants.GrantTable`."""

    def is_quarantined(self, segment: int) -> bool: ...


class SegmentMapper:
    """A :class:`SegmentView`. ``mutex``: the pool's."""

    def __init__(self, shelf: ViewedShelf, grants: ViewedGrants, *, mutex: AbstractContextManager[object]) -> None:
        self._shelf, self._grants, self._mutex = shelf, grants, mutex

    def segment_maps(self) -> tuple[DriveMap, ...]:
        """Of the drives that are here, in the order of their numbers; of one that leaves meanwhile, what was seen."""
        with self._mutex:
            each = {number: self._shelf.segments_of(number) for number in sorted(self._shelf.numbers)}
        most_cells = max(1, MAX_CELLS // len(each))
        return tuple(self._map_of(number, segments, most_cells) for number, segments in each.items())

    def _map_of(self, number: int, segments: range, most_cells: int) -> DriveMap:
        cell_segments = -(-len(segments) // most_cells)
        cells = [_NONE] * -(-len(segments) // cell_segments)
        for pieces in _in_turns(segments, cell_segments):
            with self._mutex:
                tallies = [self._shelf.tally(number, piece, self._grants.is_quarantined) for piece in pieces]
            for piece, tally in zip(pieces, tallies, strict=True):
                at = (piece.start - segments.start) // cell_segments
                cells[at] = _sum(cells[at], tally or _NONE)
            time.sleep(0)  # a mutex is not handed on by being released: whoever waits has to run
        return DriveMap(number, len(segments), cell_segments, tuple(cells))


def _in_turns(segments: range, cell_segments: int) -> Iterator[list[range]]:
    """Pieces of cells, as many at once as may be looked at under the mutex."""
    turn: list[range] = []
    left = SEGMENTS_AT_ONCE
    for cell_start in range(0, len(segments), cell_segments):
        cell = segments[cell_start : cell_start + cell_segments]
        for start in range(0, len(cell), SEGMENTS_AT_ONCE):
            piece = cell[start : start + SEGMENTS_AT_ONCE]
            if len(piece) > left:
                yield turn
                turn, left = [], SEGMENTS_AT_ONCE
            turn.append(piece)
            left -= len(piece)
    yield turn


def _sum(one: SegmentTally, other: SegmentTally) -> SegmentTally:
    return SegmentTally(*map(sum, zip(one, other, strict=True)))


def map_object(maps: Sequence[DriveMap]) -> dict[str, object]:
    """As JSON has it: what the numbers of a cell are is said once."""
    return {
        "fields": list(SegmentTally._fields),
        "drives": [
            {
                "drive": of_drive.drive,
                "segment_count": of_drive.segment_count,
                "cell_segments": of_drive.cell_segments,
                "cells": [list(cell) for cell in of_drive.cells],
            }
            for of_drive in maps
        ],
    }
