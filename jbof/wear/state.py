"""What the placement of segments needs to know of a drive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DAYS_PER_YEAR: Final = 365
_MOST_PERCENTAGE: Final = 255


@dataclass(frozen=True, slots=True)
class DriveState:
    """One drive, at one moment.

    ``domain``: failure domains, the widest first, without the drive itself: ``("rack 1", "enclosure 2", "DPU 0")``.
    ``accepts_segments``: its life allows new segments: it is neither read-only nor draining, failing or gone.
    ``reclaimable_segments``: sealed ones that nobody holds: they can become free. ``openings_left``: how many more
    segments may be open on it at once (:func:`~meshfusion.jbof.wear.placement.most_open_segments`).
    ``percentage_used``: SMART's, 0 to 255. ``bytes_written``: by hosts, over the drive's life.
    ``rated_endurance_bytes``: what the maker allows to be written over its life (TBW).
    ``budget_left_bytes``: what may still be written now without exceeding its writes per day.
    """

    drive_id: str
    domain: tuple[str, ...]
    accepts_segments: bool
    segment_count: int
    free_segments: int
    reclaimable_segments: int
    openings_left: int
    percentage_used: int
    bytes_written: int
    rated_endurance_bytes: int
    budget_left_bytes: int

    def __post_init__(self) -> None:
        assert self.segment_count > 0, self
        assert self.free_segments >= 0, self
        assert self.reclaimable_segments >= 0, self
        assert self.free_segments + self.reclaimable_segments <= self.segment_count, self
        assert 0 <= self.percentage_used <= _MOST_PERCENTAGE, self
        assert self.rated_endurance_bytes > 0, self

    @property
    def free_share(self) -> float:
        return self.free_segments / self.segment_count

    @property
    def wear_points(self) -> float:
        """Percent of its life that is used: SMART's figure, and within its whole percent the written bytes.

        SMART (NVM Express base specification, SMART / Health Information log, Percentage Used) is the maker's own
        estimate and counts what the flash wrote, but in whole percent. Rounding is left to the maker; taken as down.
        """
        by_bytes = 100 * self.bytes_written / self.rated_endurance_bytes
        return min(max(by_bytes, self.percentage_used), self.percentage_used + 1)


def rated_endurance_bytes(*, capacity_bytes: int, drive_writes_per_day: float, rated_years: float) -> int:
    """Endurance of a drive that is rated in drive writes per day (DWPD) over ``rated_years``."""
    assert capacity_bytes > 0, capacity_bytes
    assert drive_writes_per_day > 0, drive_writes_per_day
    assert rated_years > 0, rated_years
    return round(capacity_bytes * drive_writes_per_day * rated_years * DAYS_PER_YEAR)
