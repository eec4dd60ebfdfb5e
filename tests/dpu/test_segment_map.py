"""The map of segments: every segment in one cell, in one state, and no more cells than a page can show."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from meshfusion.dpu import segment_map
from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.segment_map import MAX_CELLS, SEGMENTS_AT_ONCE, DriveMap, SegmentMapper, map_object
from meshfusion.jbof.segment_states import SegmentTally
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord, SegmentTable
from meshfusion.jbof.shelf import Shelf, ShelfDrive
from tests.dpu.pool_cases import DEADLINE_S, FULL_SEGMENT_UNITS, SEGMENT_COUNT, Holder, make_pool

STATE_COUNT = 5  # what follows in a tally are readers and writers


class Doubted:
    """``ViewedGrants``."""

    def __init__(self, *segments: int) -> None:
        self.segments = set(segments)

    def is_quarantined(self, segment: int) -> bool:
        return segment in self.segments


def drive(number: int, segments: int, records: Iterable[SegmentRecord] = ()) -> ShelfDrive:
    return ShelfDrive(SegmentTable(SegmentGeometry(4096, 256, 12, segments, number), records))


def maps_of(shelf: Shelf, *doubted: int) -> tuple[DriveMap, ...]:
    return SegmentMapper(shelf, Doubted(*doubted), mutex=threading.Lock()).segment_maps()


def named(cell: SegmentTally) -> dict[str, int]:
    return {name: count for name, count in cell._asdict().items() if count}


def total(of_drive: DriveMap) -> Counter[str]:
    return sum((Counter(named(cell)) for cell in of_drive.cells), Counter())


def test_each_segment_is_in_the_cell_of_its_number() -> None:
    base = 1 << 24  # of drive 1, as the format numbers segments
    shelf = Shelf([drive(0, 2), drive(1, 5, [SegmentRecord(base + i, 3, i + 1) for i in (0, 2, 4)])])
    shelf.pin_read(base + 2)
    shelf.pin_write(base + 4)
    shelf.pin_write(base)
    first, second = maps_of(shelf, base + 4)
    assert (first.drive, first.segment_count, first.cell_segments) == (0, 2, 1)
    assert [named(cell) for cell in first.cells] == [{"free": 1}] * 2
    assert (second.drive, second.segment_count, second.cell_segments) == (1, 5, 1)
    assert [named(cell) for cell in second.cells] == [
        *({"sealed": 1, "written": 1}, {"free": 1}, {"sealed": 1, "read": 1}, {"free": 1}),
        {"quarantined": 1, "written": 1},
    ]


@pytest.mark.parametrize("counts", [[1], [MAX_CELLS], [MAX_CELLS + 1], [100_000], [3, 40_000], [50] * 255])
def test_no_more_cells_than_can_be_shown_and_no_segment_is_lost(counts: list[int]) -> None:
    shelf = Shelf([drive(number, count) for number, count in enumerate(counts)])
    maps = maps_of(shelf)
    assert sum(len(m.cells) for m in maps) <= MAX_CELLS
    for of_drive, count in zip(maps, counts, strict=True):
        assert total(of_drive) == {"free": count}
        assert all(sum(cell[:STATE_COUNT]) == of_drive.cell_segments for cell in of_drive.cells[:-1])
        assert (
            (len(of_drive.cells) - 1) * of_drive.cell_segments < count <= len(of_drive.cells) * of_drive.cell_segments
        )


class Watched:
    """``ViewedShelf``: how much it is asked for at once, and whether the mutex is held then."""

    def __init__(self, shelf: Shelf, mutex: Mutex, leaves_after: int) -> None:
        self.shelf, self.mutex, self.leaves_after = shelf, mutex, leaves_after
        self.asked: list[int] = []
        self.is_held_on = False

    @property
    def numbers(self) -> frozenset[int]:
        assert self.mutex.locked()
        return self.shelf.numbers

    def segments_of(self, number: int) -> range:
        assert self.mutex.locked()
        return self.shelf.segments_of(number)

    def tally(self, number: int, segments: range, is_quarantined: Callable[[int], bool]) -> SegmentTally | None:
        assert self.mutex.locked()
        if not self.is_held_on:
            self.asked.append(0)
        self.is_held_on = True
        self.asked[-1] += len(segments)
        return self.shelf.tally(number if len(self.asked) <= self.leaves_after else 9, segments, is_quarantined)


class Mutex:
    """A lock that tells when it is given back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watched: Watched | None = None

    def locked(self) -> bool:
        return self.lock.locked()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self.watched is not None:
            self.watched.is_held_on = False
        self.lock.release()


def seen_by(mapped: Shelf, leaves_after: int = 1 << 30) -> tuple[tuple[DriveMap, ...], list[int]]:
    """The maps, and of how many segments at once they were made."""
    mutex = Mutex()
    mutex.watched = watched = Watched(mapped, mutex, leaves_after)
    return SegmentMapper(watched, Doubted(), mutex=mutex).segment_maps(), watched.asked


@pytest.mark.parametrize("count", [5, SEGMENTS_AT_ONCE, 2 * SEGMENTS_AT_ONCE + 10, 100_001])
def test_the_mutex_is_given_back_in_between(count: int) -> None:
    (of_drive,), asked = seen_by(Shelf([drive(0, count)]))
    assert max(asked) <= SEGMENTS_AT_ONCE
    assert sum(asked) == count
    assert len(asked) <= 1 + 2 * count // SEGMENTS_AT_ONCE, "and not for every cell"
    assert total(of_drive) == {"free": count}


def test_a_cell_of_more_segments_than_may_be_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_map, "MAX_CELLS", 2)
    count = 3 * SEGMENTS_AT_ONCE
    (of_drive,), asked = seen_by(Shelf([drive(0, count)]))
    assert (of_drive.cell_segments, [named(cell) for cell in of_drive.cells]) == (
        count // 2,
        [{"free": count // 2}] * 2,
    )
    assert max(asked) <= SEGMENTS_AT_ONCE


def test_a_drive_that_leaves_meanwhile() -> None:
    (of_drive,), _ = seen_by(Shelf([drive(0, 2 * SEGMENTS_AT_ONCE)]), leaves_after=1)
    assert total(of_drive) == {"free": SEGMENTS_AT_ONCE}


def test_a_pool_that_is_used(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    options = PoolOptions(grant_ttl_s=30.0, holder_silence_s=5.0, heartbeat_s=1.0)
    with Pool.open(tmp_path / "pool", options) as pool, Holder(pool) as holder:
        holder.put(0, FULL_SEGMENT_UNITS)
        holder.put(1, FULL_SEGMENT_UNITS)
        holder.match(0)
        doubted = holder.reserve(2)
        pool.abort(api.AbortRequest(holder.id, holder.attachment.epoch, (), (doubted.grant_id,)), deadline_s=DEADLINE_S)
        (of_drive,) = pool.segment_view.segment_maps()
        status = pool.status(deadline_s=DEADLINE_S)
        assert [named(cell) for cell in of_drive.cells] == [
            *({"sealed": 1, "read": 1}, {"sealed": 1}, {"quarantined": 1, "written": 1}),
            *([{"free": 1}] * (SEGMENT_COUNT - 3)),
        ]
        assert (status.segments_free, status.segments_quarantined) == (SEGMENT_COUNT - 3, 1)
        assert map_object((of_drive,)) == {
            "fields": ["free", "opening", "open", "sealed", "quarantined", "read", "written"],
            "drives": [
                {"drive": 0, "segment_count": 6, "cell_segments": 1, "cells": [list(c) for c in of_drive.cells]}
            ],
        }
