"""What our pool writes: large segments, appended to, a few open at once, deallocated whole before they are reused."""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass

import numpy as np

from meshfusion.tools.ftl.device import FlashDrive


class ReclaimOrder(enum.Enum):
    """Which sealed segment is given up next."""

    OLDEST = "oldest"  # in the order of opening
    EXPECTED = "expected"  # when its class's lifetime, give or take half of it, has passed
    RANDOM = "random"  # any: the worst that a policy could do to the drive


@dataclass(frozen=True, slots=True)
class LifetimeClass:
    """``write_share``: of all appends. ``lifetime``: of its segments, relative to other classes'."""

    write_share: float
    lifetime: float = 1.0


ONE_CLASS = (LifetimeClass(1.0),)
FOUR_CLASSES = (LifetimeClass(0.4, 1), LifetimeClass(0.3, 2), LifetimeClass(0.2, 4), LifetimeClass(0.1, 8))


@dataclass(frozen=True, slots=True)
class SegmentPattern:
    """``chunk_pages``: length of an append. ``free_share``: of segments kept deallocated, as spare for the drive.
    One segment is open for each class; with ``names_handles`` each class's writes name a placement handle.
    """

    segment_pages: int
    chunk_pages: int
    classes: tuple[LifetimeClass, ...] = ONE_CLASS
    order: ReclaimOrder = ReclaimOrder.OLDEST
    free_share: float = 0.0
    names_handles: bool = False


class SegmentWriter:
    """Writes the pattern to a new ``drive``, whose logical pages hold whole segments only."""

    def __init__(self, pattern: SegmentPattern, drive: FlashDrive, generator: np.random.Generator) -> None:
        self.payload_pages = 0
        self._pattern = pattern
        self._drive = drive
        self._generator = generator
        count = drive.geometry.logical_pages // pattern.segment_pages
        # One is opened while the others stay open, and what is kept free is kept beside it.
        self._kept_free = round(count * pattern.free_share)
        assert count > self._kept_free + len(pattern.classes) + 1, f"{count} segments are too few"
        assert not pattern.names_handles or len(pattern.classes) <= drive.geometry.handle_count
        self._free = list(range(count))
        self._free.reverse()  # the lowest first
        self._sealed: list[tuple[float, int]] = []  # (when to give it up, segment): a heap, but for RANDOM
        self._open = [self._free.pop() for _ in pattern.classes]
        self._next_page = [0] * len(pattern.classes)
        self._opened = float(len(pattern.classes))
        shares = np.array([one.write_share for one in pattern.classes])
        self._shares = shares / shares.sum()
        # In openings: how long a class's segment lives when the pool is full and lifetimes relate as they should.
        held = count - self._kept_free - len(pattern.classes)
        relative = np.array([one.lifetime for one in pattern.classes])
        self._lifetimes = relative * held / float(self._shares @ relative)

    def write(self, chunk_count: int) -> None:
        """Append this many chunks."""
        for index in self._generator.choice(self._shares.size, size=chunk_count, p=self._shares):
            self._append(int(index))

    def _append(self, index: int) -> None:
        pattern = self._pattern
        if self._next_page[index] + pattern.chunk_pages > pattern.segment_pages:
            self._reopen(index)
        first = self._open[index] * pattern.segment_pages + self._next_page[index]
        self._drive.write(first, pattern.chunk_pages, index if pattern.names_handles else 0)
        self._next_page[index] += pattern.chunk_pages
        self.payload_pages += pattern.chunk_pages

    def _reopen(self, index: int) -> None:
        self._seal(index)
        while len(self._free) <= self._kept_free:
            victim = self._next_victim()
            self._drive.deallocate(victim * self._pattern.segment_pages, self._pattern.segment_pages)
            self._free.insert(0, victim)  # the longest free is reused first
        self._open[index] = self._free.pop()
        self._next_page[index] = 0
        self._opened += 1

    def _seal(self, index: int) -> None:
        due = self._opened
        if self._pattern.order is ReclaimOrder.EXPECTED:
            due += self._lifetimes[index] * self._generator.uniform(0.5, 1.5)
        entry = (due, self._open[index])
        if self._pattern.order is ReclaimOrder.RANDOM:
            self._sealed.append(entry)
        else:
            heapq.heappush(self._sealed, entry)

    def _next_victim(self) -> int:
        if self._pattern.order is not ReclaimOrder.RANDOM:
            return heapq.heappop(self._sealed)[1]
        at = int(self._generator.integers(len(self._sealed)))
        self._sealed[at], self._sealed[-1] = self._sealed[-1], self._sealed[at]
        return self._sealed.pop()[1]

    def live_segments(self) -> frozenset[int]:
        """Open or sealed: what a reader may still find."""
        return frozenset((*self._open, *(segment for _, segment in self._sealed)))
