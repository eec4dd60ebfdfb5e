"""One look at the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.api.types import PoolStatus
from meshfusion.dpu.segment_map import DriveMap


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``taken_s``: by the watch's clock. ``saves_stopped_s``: for how long no saves have been accepted, as far as looks
    can tell; 0 while they are. ``index_bytes``: what its files take, -1 where that cannot be read. ``maps``: of the
    segments, of this look or of one before; empty when nobody has asked for them yet."""

    taken_s: float
    status: PoolStatus
    drives: tuple[DriveStatus, ...]
    saves_stopped_s: float = 0.0
    index_bytes: int = -1
    maps: tuple[DriveMap, ...] = ()
    counters: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", dict(self.status.counters))


@dataclass(frozen=True, slots=True)
class Limits:
    """From the service's configuration: fractions of the pool's segments; and what may be written to a drive in a day,
    as a multiple of its capacity, None without a bound."""

    quarantine_max_fraction: float
    max_pinned_fraction: float
    drive_writes_per_day: float | None = None
