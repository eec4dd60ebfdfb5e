"""A file system's free space: extents, handed out next-fit, in pieces where no single one is large enough."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

# How many extents are looked at for one that is large enough: ext4's default (mb_max_to_scan).
MOST_EXAMINED: Final = 200


@dataclass(frozen=True, slots=True)
class Extent:
    first_page: int
    page_count: int


class FreeExtents:
    """Free pages of one area, as extents that touch nowhere."""

    def __init__(self, first_page: int, page_count: int) -> None:
        self._starts = [first_page]
        self._lengths = {first_page: page_count}
        self._cursor = first_page
        self.free_pages = page_count

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, page_count: int) -> list[Extent]:
        """``page_count`` pages: the next extent that is large enough, or pieces of the next ones."""
        assert 0 < page_count <= self.free_pages, (page_count, self.free_pages)
        at = bisect.bisect_left(self._starts, self._cursor)
        taken: list[Extent] = []
        fitting = self._fitting(at, page_count)
        left, at = page_count, at if fitting is None else fitting
        while left:
            at %= len(self._starts)
            start = self._starts[at]
            piece = min(left, self._lengths[start])
            taken.append(Extent(start, piece))
            self._shorten(at, piece)
            left -= piece
        self.free_pages -= page_count
        self._cursor = taken[-1].first_page + taken[-1].page_count
        return taken

    def give_back(self, extent: Extent) -> None:
        start, end = extent.first_page, extent.first_page + extent.page_count
        at = bisect.bisect_left(self._starts, start)
        if at < len(self._starts):
            assert end <= self._starts[at], f"{extent} is free already"
        if at and self._starts[at - 1] + self._lengths[self._starts[at - 1]] >= start:
            at -= 1
            before = self._starts[at]
            assert before + self._lengths[before] == start, f"{extent} is free already"
            start = before
        else:
            self._starts.insert(at, start)
        if at + 1 < len(self._starts) and self._starts[at + 1] == end:
            end += self._lengths.pop(self._starts.pop(at + 1))
        self._lengths[start] = end - start
        self.free_pages += extent.page_count

    def _fitting(self, at: int, page_count: int) -> int | None:
        count = len(self._starts)
        for step in range(min(MOST_EXAMINED, count)):
            if self._lengths[self._starts[(at + step) % count]] >= page_count:
                return (at + step) % count
        return None

    def _shorten(self, at: int, page_count: int) -> None:
        start = self._starts[at]
        length = self._lengths.pop(start)
        if length == page_count:
            del self._starts[at]
        else:
            self._starts[at] = start + page_count
            self._lengths[start + page_count] = length - page_count
