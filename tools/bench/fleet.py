"""Years of writes to a shelf of drives, in steps of an hour: what wear a way of placing segments leads to.

A drive here has the wear that its flash has, in points (percent of its life); a placement sees of it only what a host
sees: SMART's whole percent and the bytes that hosts wrote. The segments of the model are large, so that years pass in
seconds: each stands for a day's share of real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from meshfusion.jbof.wear.choice import Choice, choose_drive
from meshfusion.jbof.wear.shares import DEFAULT_POLICY, SharePolicy, target_shares
from meshfusion.jbof.wear.state import DriveState, rated_endurance_bytes

HOURS_PER_DAY: Final = 24
HOURS_PER_YEAR: Final = 365 * HOURS_PER_DAY
SEGMENT_BYTES: Final = 960 * 10**9
RATED_YEARS: Final = 5.0

Placement = Callable[[Sequence[DriveState], int], str | None]


@dataclass(frozen=True, slots=True)
class DriveModel:
    """A drive when it comes into the shelf. ``write_amplification``: of its flash. ``bytes_written``: by hosts before;
    how much of its wear that explains depends on how it was used."""

    drive_id: str
    domain: tuple[str, ...]
    capacity_bytes: int
    wear_points: float = 0.0
    bytes_written: int = 0
    write_amplification: float = 1.0
    drive_writes_per_day: float = 1.0

    @property
    def endurance_bytes(self) -> int:
        return rated_endurance_bytes(
            capacity_bytes=self.capacity_bytes, drive_writes_per_day=self.drive_writes_per_day, rated_years=RATED_YEARS
        )

    @property
    def budget_bytes(self) -> int:
        """What may be written to it in any 24 hours."""
        return round(self.capacity_bytes * self.drive_writes_per_day)


@dataclass(slots=True)
class Drive:
    """One in the shelf. ``log``: bytes of each hour in which it was written, from its first to its last."""

    model: DriveModel
    used_segments: int = 0
    opened_count: int = 0
    is_read_only: bool = False
    log: dict[int, int] = field(default_factory=dict)
    _recent: deque[tuple[int, int]] = field(default_factory=deque)
    _recent_bytes: int = 0

    @property
    def segment_count(self) -> int:
        return self.model.capacity_bytes // SEGMENT_BYTES

    @property
    def written_bytes(self) -> int:
        return self.opened_count * SEGMENT_BYTES

    @property
    def wear_points(self) -> float:
        flash_bytes = self.written_bytes * self.model.write_amplification
        return self.model.wear_points + 100 * flash_bytes / self.model.endurance_bytes

    def open_segment(self, hour: int) -> None:
        assert not self.is_read_only, self.model
        self.opened_count += 1
        self.used_segments = min(self.used_segments + 1, self.segment_count)
        self.log[hour] = self.log.get(hour, 0) + SEGMENT_BYTES
        self._recent.append((hour, SEGMENT_BYTES))
        self._recent_bytes += SEGMENT_BYTES

    def state(self, hour: int) -> DriveState:
        while self._recent and self._recent[0][0] <= hour - HOURS_PER_DAY:
            self._recent_bytes -= self._recent.popleft()[1]
        return DriveState(
            drive_id=self.model.drive_id,
            domain=self.model.domain,
            accepts_segments=not self.is_read_only,
            segment_count=self.segment_count,
            free_segments=self.segment_count - self.used_segments,
            reclaimable_segments=self.used_segments,
            openings_left=1,
            percentage_used=min(int(self.wear_points), 255),
            bytes_written=self.model.bytes_written + self.written_bytes,
            rated_endurance_bytes=self.model.endurance_bytes,
            budget_left_bytes=self.model.budget_bytes - self._recent_bytes,
        )


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """At this hour the drive stops taking writes."""

    hour: int
    drive_id: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """At this hour the drive is gone and another one is in its place."""

    hour: int
    drive_id: str
    by: DriveModel


Event = ReadOnly | Replaced


@dataclass(frozen=True, slots=True)
class History:
    """``spread_points``: of the drives that take writes, at the end of each day. ``refused``: openings for which no
    drive was found, of ``asked``. ``drives``: at the end; ``gone``: those that were replaced."""

    spread_points: tuple[float, ...]
    asked: int
    refused: int
    drives: tuple[Drive, ...]
    gone: tuple[Drive, ...]

    def level_after_days(self, points: float) -> int | None:
        """After how many days the spread stays within ``points`` to the end; None: it does not."""
        wide = [day for day, spread in enumerate(self.spread_points) if spread > points]
        settled = wide[-1] + 1 if wide else 0
        return settled if settled < len(self.spread_points) else None


def simulate(
    models: Sequence[DriveModel],
    place: Placement,
    *,
    years: float,
    written_bytes_per_hour: float,
    events: Sequence[Event] = (),
) -> History:
    """Write ``written_bytes_per_hour`` all the time, to the drives that ``place`` says. The same inputs give the same
    history."""
    drives = [Drive(model) for model in models]
    gone: list[Drive] = []
    spread: list[float] = []
    asked = refused = 0
    due_bytes = 0.0
    for hour in range(round(years * HOURS_PER_YEAR)):
        for event in events:
            if event.hour == hour:
                gone += _happen(drives, event)
        states = {drive.model.drive_id: drive.state(hour) for drive in drives}
        by_id = {drive.model.drive_id: drive for drive in drives}
        due_bytes += written_bytes_per_hour
        while due_bytes >= SEGMENT_BYTES:
            due_bytes -= SEGMENT_BYTES
            asked += 1
            drive_id = place(list(states.values()), hour)
            if drive_id is None:
                refused += 1
                continue
            by_id[drive_id].open_segment(hour)
            states[drive_id] = by_id[drive_id].state(hour)
        if hour % HOURS_PER_DAY == HOURS_PER_DAY - 1:
            worn = [drive.wear_points for drive in drives if not drive.is_read_only]
            spread.append(max(worn) - min(worn))
    return History(tuple(spread), asked, refused, tuple(drives), tuple(gone))


def _happen(drives: list[Drive], event: Event) -> list[Drive]:
    """Returns the drives that are gone by it."""
    at = next(index for index, drive in enumerate(drives) if drive.model.drive_id == event.drive_id)
    if isinstance(event, ReadOnly):
        drives[at].is_read_only = True
        return []
    old, drives[at] = drives[at], Drive(event.by)
    return [old]


def by_wear(policy: SharePolicy = DEFAULT_POLICY) -> Placement:
    """Ours, with shares reckoned anew each day and when the drives are others."""
    credits: Mapping[str, float] = {}
    shares: Mapping[str, float] = {}
    reckoned: tuple[int, frozenset[str]] | None = None

    def place(states: Sequence[DriveState], hour: int) -> str | None:
        nonlocal credits, shares, reckoned
        now = (hour // HOURS_PER_DAY, frozenset(state.drive_id for state in states if state.accepts_segments))
        if now != reckoned:
            shares, reckoned = target_shares(states, policy), now
        found = choose_drive(states, shares, credits, segment_bytes=SEGMENT_BYTES)
        if not isinstance(found, Choice):
            return None
        credits = found.credits
        return found.drive_id

    return place


def _openable(states: Sequence[DriveState]) -> list[DriveState]:
    return [s for s in states if s.accepts_segments and s.budget_left_bytes >= SEGMENT_BYTES]


def round_robin() -> Placement:
    """Each drive that can, in turn."""
    turns = count()

    def place(states: Sequence[DriveState], hour: int) -> str | None:
        candidates = _openable(states)
        return candidates[next(turns) % len(candidates)].drive_id if candidates else None

    return place


def most_free() -> Placement:
    """The drive with the most free segments; when all are full, in proportion to their size: the next in turn by it."""
    opened: dict[str, int] = {}

    def place(states: Sequence[DriveState], hour: int) -> str | None:
        candidates = _openable(states)
        if not candidates:
            return None
        found = min(
            candidates,
            key=lambda s: (-s.free_segments, (opened.get(s.drive_id, 0) + 1) / s.segment_count, s.drive_id),
        )
        opened[found.drive_id] = opened.get(found.drive_id, 0) + 1
        return found.drive_id

    return place


def least_worn() -> Placement:
    """All to the drive that is the least worn: even soonest, but one drive at a time takes nearly everything."""

    def place(states: Sequence[DriveState], hour: int) -> str | None:
        candidates = _openable(states)
        return min(candidates, key=lambda s: (s.wear_points, s.drive_id)).drive_id if candidates else None

    return place
