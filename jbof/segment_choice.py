"""Which segment goes first, and how many more are needed: what a table of segments chooses by. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshfusion.jbof.segment_format import SEGMENT_HEADER_LBAS, summary_lba_count
from meshfusion.jbof.segment_states import UNVALUED, Segment, SegmentState

MayReclaim = Callable[[int], bool]
"""May the segment with this number be reclaimed, as far as the holders of earlier epochs go?"""


class Filled(NamedTuple):
    """Of an open segment: blocks that are taken, its header's too, and how many extents were handed out."""

    lba_count: int
    extent_count: int

    def takes(self, lba_count: int, segment_lba_count: int) -> bool:
        """Is there room for an extent of so many blocks, and behind it for the summary of all?"""
        return self.lba_count + lba_count + summary_lba_count(self.extent_count + 1) <= segment_lba_count

    def with_extent(self, lba_count: int) -> Filled:
        return Filled(self.lba_count + lba_count, self.extent_count + 1)


_OPENED = Filled(SEGMENT_HEADER_LBAS, 0)


def openings_for(lba_counts: Sequence[int], segment_lba_count: int, current: Filled | None) -> tuple[int, bool]:
    """How many segments have to be opened for these extents, one after the other, and does the ``current`` one take any
    of them? None: there is no current one."""
    filled, openings, is_current_used = current, 0, False
    for lba_count in lba_counts:
        if filled is None or not filled.takes(lba_count, segment_lba_count):
            openings, filled = openings + 1, _OPENED
        is_current_used = is_current_used or not openings
        filled = filled.with_extent(lba_count)
    return openings, is_current_used


def is_victim(index: int, segment: Segment, may_reclaim: MayReclaim) -> bool:
    """Can it be reclaimed now?"""
    return (
        segment.state is SegmentState.SEALED
        and segment.read_pins == 0
        and segment.write_pins == 0
        and not segment.is_held
        and may_reclaim(index)
    )


def victims(segments: Mapping[int, Segment], may_reclaim: MayReclaim) -> Iterator[int]:
    """In the order of their numbers."""
    return (index for index, segment in segments.items() if is_victim(index, segment, may_reclaim))


def next_victim(segments: Mapping[int, Segment], may_reclaim: MayReclaim) -> int | None:
    """That of least worth, and of those the one used last longest ago, and then opened first. With very many
    segments lookups wait for this: next to nothing is done for one that is worth more."""
    least, found = UNVALUED, None
    for index, segment in segments.items():
        if segment.worth <= least and is_victim(index, segment, may_reclaim):
            order = (segment.worth, segment.last_used_s, segment.opened_seq)
            if found is None or order < found[0]:
                least, found = segment.worth, (order, index)
    return None if found is None else found[1]
