"""The longest boundary at which all KV groups of a request can resume. No I/O, no clock.

Boundary ``n`` is after ``n`` chunks. A group that needs everything from the start ends where its first chunk is
missing: that is found from below, and a miss costs next to nothing. From there on it goes down. Since ``first_needed``
never decreases, what a group needs then loses chunks at its upper end and gains some at its lower end: every chunk is
looked at once at most, and the whole takes time in proportion to the number of keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from meshfusion.dpu.api.types import ChunkRecord, GroupKeys
from meshfusion.dpu.store.segments import Segments

Find = Callable[[GroupKeys, int], ChunkRecord | None]  # the servable record of a group's chunk


@dataclass(frozen=True, slots=True)
class Boundary:
    """``chunk_count``: 0 for none. ``chunks``: what it takes, by group as asked and then by position; ``segments``:
    where they lie. ``is_shortened``: a longer one was there, and would have pinned too many segments."""

    chunk_count: int
    chunks: Sequence[ChunkRecord]
    segments: Collection[int]
    is_shortened: bool


def longest_boundary(groups: Sequence[GroupKeys], find: Find, segments: Segments, pinned_max: int) -> Boundary:
    """``pinned_max``: segments that may be pinned by leases, with those that are pinned already.

    A boundary that takes no chunk at all is none: nothing stored would speak for it.
    """
    load = _Load(segments)
    needs = [_GroupNeeds(group, find, load) for group in groups]
    boundary = len(groups[0].keys) if groups else 0
    unpinned_max = pinned_max - segments.read_pinned_count
    is_shortened = False
    for group_needs in needs:
        boundary = group_needs.end_of_prefix(boundary)
    while boundary:
        lower = _lower(needs, boundary)
        if lower < boundary:
            boundary = lower
        elif load.unpinned_count > unpinned_max:
            is_shortened = True
            boundary -= 1
        elif not load.segments:
            boundary -= 1
        else:
            chunks = tuple(chunk for group in needs for chunk in group.chunks())
            return Boundary(boundary, chunks, load.segments, is_shortened)
    return Boundary(0, (), (), is_shortened)


def _lower(needs: Sequence[_GroupNeeds], boundary: int) -> int:
    """``boundary`` when all groups can resume there, else the next one that may do."""
    for group in needs:
        lower = group.lower_to(boundary)
        if lower < boundary:
            return lower
    return boundary


class _Load:
    """The segments that needed chunks lie in. A segment that is pinned already costs nothing: what many requests share
    is pinned once."""

    def __init__(self, segments: Segments) -> None:
        self._table = segments
        self.segments: dict[int, int] = {}  # segment -> needed shards in it
        self.unpinned_count = 0

    def add(self, record: ChunkRecord) -> None:
        for shard in record.shards:
            segment = shard.extent.segment
            count = self.segments.get(segment, 0)
            self.segments[segment] = count + 1
            if not count and not self._table.pins(segment)[0]:
                self.unpinned_count += 1

    def remove(self, record: ChunkRecord) -> None:
        for shard in record.shards:
            segment = shard.extent.segment
            self.segments[segment] -= 1
            if not self.segments[segment]:
                del self.segments[segment]
                if not self._table.pins(segment)[0]:
                    self.unpinned_count -= 1


class _GroupNeeds:
    """What one group needs at a boundary that only goes down."""

    def __init__(self, asked: GroupKeys, find: Find, load: _Load) -> None:
        self._asked = asked
        self._find = find
        self._load = load
        self._checked_from = len(asked.keys)  # chunks from here on were looked at, or are needed no more
        self._needed: deque[tuple[int, ChunkRecord]] = deque()  # by position, the last one first

    def end_of_prefix(self, boundary: int) -> int:
        """The first boundary, up to ``boundary``, above which a chunk is missing; of a group that needs them all."""
        if not boundary or self._asked.first_needed[boundary - 1]:
            return boundary
        self._checked_from = 0
        for i, key in enumerate(self._asked.keys[:boundary]):
            assert key, "needed, and has no key"
            record = self._find(self._asked, i)
            if record is None:
                return i
            self._needed.appendleft((i, record))
            self._load.add(record)
        return boundary

    def lower_to(self, boundary: int) -> int:
        """``boundary`` when the group can resume there, else the next one that may do."""
        while self._needed and self._needed[0][0] >= boundary:
            self._load.remove(self._needed.popleft()[1])
        keys = self._asked.keys
        first = self._asked.first_needed[boundary - 1]
        for i in range(min(self._checked_from, boundary) - 1, first - 1, -1):
            assert keys[i], "needed, and has no key"
            record = self._find(self._asked, i)
            if record is None:
                self._checked_from = i
                return i  # those in between need it, too
            self._needed.append((i, record))
            self._load.add(record)
        self._checked_from = min(self._checked_from, first)
        return boundary

    def chunks(self) -> list[ChunkRecord]:
        return [record for _, record in reversed(self._needed)]
