"""What may be written to each drive of a pool in a day."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.policy.write_budget import BURST_SHARE, DAY_S, WriteBudget
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.sizes import format_size


class BudgetProblem(NamedTuple):
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class SpentBudgets:
    """Budgets that begin with nothing, for how long a service has to run. ``first_segment_s_at_1_dwpd``: until a
    segment may be opened on one of the drives, with one drive write per day; with N of them, an Nth of it. ``whole_s``:
    until each drive may be written as much at once as ever."""

    first_segment_s_at_1_dwpd: float
    whole_s: float


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

    def check(self, *geometries: SegmentGeometry) -> None:
        """Raises ConfigError for a budget that, on one of these drives, never has as much at once as a segment."""
        if self.drive_writes_per_day is None:
            return
        found = budget_problem(self.drive_writes_per_day, geometries)
        if found is not None:
            field = f"medium.drive_writes_per_day = {self.drive_writes_per_day:g}"
            raise ConfigError(f"{field}: {found.problem}", next_step=found.fix)


def budget_problem(drive_writes_per_day: float, geometries: Iterable[SegmentGeometry]) -> BudgetProblem | None:
    """Why this bound cannot be kept on these drives; None when it can. Told of the drive that needs the most, so that
    what the fix names is enough for all."""
    worst = max(geometries, key=_least_drive_writes_per_day, default=None)
    if worst is None or drive_writes_per_day >= (least := _least_drive_writes_per_day(worst)):
        return None
    return BudgetProblem(
        f"a quarter of what drive {worst.drive_number} may be written in a day is less than a segment of "
        f"{format_size(worst.segment_bytes)}, so none could ever be opened",
        f"use {math.ceil(least * 1000) / 1000:g} or more, or make the pool with smaller segments",
    )


def spent_budgets(geometries: Iterable[SegmentGeometry]) -> SpentBudgets:
    """``geometries``: at least one. As :class:`~meshfusion.jbof.policy.write_budget.WriteBudget` has it: a day's bytes
    are a bucket, and what flows into it within the day."""
    inflow_per_s = (1 - BURST_SHARE) / DAY_S  # of a drive's capacity
    first_s = min(geometry.segment_bytes / geometry.capacity_bytes for geometry in geometries) / inflow_per_s
    return SpentBudgets(first_s, BURST_SHARE / inflow_per_s)


def _least_drive_writes_per_day(geometry: SegmentGeometry) -> float:
    return geometry.segment_bytes / BURST_SHARE / geometry.capacity_bytes
