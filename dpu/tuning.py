"""What of a served pool may be changed while it is served. Nothing here does I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """As in :class:`~meshfusion.dpu.pool_opening.PoolOptions` and
    :class:`~meshfusion.dpu.running_drives.DriveOptions`. Nobody was told of these, and all of them are asked for anew
    each time."""

    drive_writes_per_day: float | None
    free_fraction: float
    max_pinned_fraction: float
    quarantine_max_fraction: float
    check_interval_s: float
    drain_s: float
