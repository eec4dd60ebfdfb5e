"""A drive on the shelf: its segments, whether it is written and read, its wear; and what drives have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.policy.write_budget import WriteBudget
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.segments import SegmentTable
from meshfusion.jbof.wear.state import DriveState

_UNBOUNDED_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class DriveWear:
    """See :class:`~meshfusion.jbof.wear.state.DriveState`. ``rated_endurance_bytes`` 0: not known, and taken to be in
    proportion to the drive's capacity."""

    percentage_used: int = 0
    bytes_written: int = 0
    rated_endurance_bytes: int = 0


UNKNOWN_WEAR: Final = DriveWear()


@dataclass(frozen=True, slots=True)
class ShelfDrive:
    """``segments``: of the drive, whose number its geometry has. ``is_offered``: is what it holds to be found?
    ``domain``: as in :class:`~meshfusion.jbof.wear.state.DriveState`. ``budget``: of what may be written to it, None
    without bounds. All of a segment is counted when it is opened, so that no more is ever written than was counted."""

    segments: SegmentTable
    takes_segments: bool = True
    wear: DriveWear = UNKNOWN_WEAR
    domain: tuple[str, ...] = ()
    is_offered: bool = True
    budget: WriteBudget | None = None

    @property
    def number(self) -> int:
        return self.segments.geometry.drive_number

    def budget_left_bytes(self, now_s: float) -> int:
        return _UNBOUNDED_BYTES if self.budget is None else self.budget.left_bytes(now_s)


@dataclass(frozen=True, slots=True)
class ShelfGeometry:
    """What the segments of all drives have in common, and how many there are on the drives that are here."""

    lba_bytes: int
    segment_bytes: int
    max_extent_lba_count: int
    segment_count: int

    @property
    def capacity_bytes(self) -> int:
        return self.segment_bytes * self.segment_count


def shelf_geometry(each: Sequence[SegmentGeometry]) -> ShelfGeometry:
    first = each[0]
    sizes = {(geometry.lba_bytes, geometry.segment_lba_count) for geometry in each}
    assert len(sizes) == 1, f"drives of one pool with different segments: {sizes}"
    return ShelfGeometry(
        lba_bytes=first.lba_bytes,
        segment_bytes=first.segment_bytes,
        max_extent_lba_count=first.max_extent_lba_count,
        segment_count=sum(geometry.segment_count for geometry in each),
    )


def never(_: int) -> bool:
    return False


def state_of(
    drive: ShelfDrive, now_s: float, may_reclaim: Callable[[int], bool], *, is_open: bool = False
) -> DriveState:
    """``is_open``: it has a segment in the stripe, and takes no other one."""
    segments, wear = drive.segments, drive.wear
    free = segments.free_count
    return DriveState(
        drive_id=str(drive.number),
        domain=drive.domain,
        accepts_segments=True,
        segment_count=segments.geometry.segment_count,
        free_segments=free,
        # Whether there is one is all that the choice asks; counting them would take a look at each.
        reclaimable_segments=int(free == 0 and segments.has_victim(may_reclaim)),
        openings_left=0 if is_open else 1,
        percentage_used=wear.percentage_used,
        bytes_written=wear.bytes_written,
        rated_endurance_bytes=wear.rated_endurance_bytes or segments.geometry.capacity_bytes,
        budget_left_bytes=drive.budget_left_bytes(now_s),
    )
