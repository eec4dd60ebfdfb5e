"""What may be written to each drive of a pool in a day."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.policy.write_budget import BURST_SHARE, WriteBudget
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.sizes import format_size


@dataclass(frozen=True, slots=True)
class Budgets:
    """``drive_writes_per_day``: as a multiple of a drive's capacity, None for no bound. ``left_bytes``: by drive
    number, what was left when the pool was served last; a drive that was not, begins with all of it."""

    drive_writes_per_day: float | None
    left_bytes: Mapping[int, int]

    def of(self, geometry: SegmentGeometry, now_s: float) -> WriteBudget | None:
        if self.drive_writes_per_day is None:
            return None
        bytes_per_day = geometry.capacity_bytes * self.drive_writes_per_day
        return WriteBudget(bytes_per_day, now_s, self.left_bytes.get(geometry.drive_number))

    def check(self, geometry: SegmentGeometry) -> None:
        """Raises ConfigError for a budget that never has as much at once as a segment."""
        if self.drive_writes_per_day is None:
            return
        least = geometry.segment_bytes / BURST_SHARE / geometry.capacity_bytes
        if self.drive_writes_per_day < least:
            raise ConfigError(
                f"drive_writes_per_day = {self.drive_writes_per_day:g}: a quarter of what drive "
                f"{geometry.drive_number} may be written in a day is less than a segment of "
                f"{format_size(geometry.segment_bytes)}, so none could ever be opened",
                next_step=f"use {math.ceil(least * 1000) / 1000:g} or more, or make the pool with smaller segments",
            )
