"""Where a drive's segments lie. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.jbof.pool_addresses import MAX_DRIVE_SEGMENTS, first_segment
from meshfusion.jbof.segment_format import SEGMENT_HEADER_LBAS, summary_lba_count


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """Where a drive's segments lie: segment ``i`` covers ``segment_lba_count`` blocks of it from ``first_lba(i)``.
    Segments have the pool's numbers (:mod:`meshfusion.jbof.pool_addresses`)."""

    lba_bytes: int
    data_start_lba: int
    segment_lba_count: int
    segment_count: int
    drive_number: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.segment_count <= MAX_DRIVE_SEGMENTS, self

    @property
    def segments(self) -> range:
        first = first_segment(self.drive_number)
        return range(first, first + self.segment_count)

    def first_lba(self, segment: int) -> int:
        assert segment in self.segments, segment
        return self.data_start_lba + (segment - self.segments.start) * self.segment_lba_count

    def end_lba(self, segment: int) -> int:
        """The first block after the segment."""
        return self.first_lba(segment) + self.segment_lba_count

    @property
    def max_extent_lba_count(self) -> int:
        """The longest extent: alone in a segment, between its header and its summary."""
        return self.segment_lba_count - SEGMENT_HEADER_LBAS - summary_lba_count(1)

    @property
    def segment_bytes(self) -> int:
        return self.segment_lba_count * self.lba_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.segment_bytes * self.segment_count
