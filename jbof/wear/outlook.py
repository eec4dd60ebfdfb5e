"""How even wear can become at all: what any placement could reach, with all writes known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WearPosition:
    """A drive at the start: its wear in points (percent of life), its endurance, and the most it may be written."""

    wear_points: float
    rated_endurance_bytes: int
    most_bytes: float

    def filled_to(self, level_points: float) -> float:
        """Bytes that lift its wear to ``level_points``, as far as it may be written."""
        wanted = (level_points - self.wear_points) / 100 * self.rated_endurance_bytes
        return min(max(wanted, 0.0), self.most_bytes)

    def worn_by(self, written_bytes: float) -> float:
        return self.wear_points + 100 * written_bytes / self.rated_endurance_bytes


def least_spread_points(drives: Sequence[WearPosition], written_bytes: float) -> float:
    """The smallest difference between the most and the least worn drive, in points, after ``written_bytes`` in all.

    The least worn drives are filled up first, all to one level, each up to what it may be written; no other division
    leaves the least worn higher or the most worn lower. ``written_bytes`` above what all may be written counts as that.
    """
    assert drives, "no drive"
    total = min(written_bytes, sum(drive.most_bytes for drive in drives))
    low = min(drive.wear_points for drive in drives)
    high = max(drive.worn_by(drive.most_bytes) for drive in drives)
    for _ in range(100):
        level = (low + high) / 2
        if sum(drive.filled_to(level) for drive in drives) < total:
            low = level
        else:
            high = level
    worn = [drive.worn_by(drive.filled_to(high)) for drive in drives]
    return max(worn) - min(worn)
