"""The drive on which the next segment is opened.

Each opening gives every drive that could take it a part of one credit, by its share, and takes one from the drive that
does: smooth weighted round robin, as in nginx. The richest drive is next; so after any number of openings each drive
has had its share, to within a few. Among drives of nearly the same credit that one is taken which shares the least with
the neighbours' drives.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.wear.state import DriveState

# Drives within this of the richest may be preferred for where they are.
CREDIT_SLACK: Final = 0.5
# A drive that was passed over for long does not make up for all of it at once.
MOST_CREDIT: Final = 8.0


class Obstacle(enum.Enum):
    """Why no segment can be opened: what the most promising drives lack."""

    NO_DRIVE = "no drive accepts new segments"
    NO_SPACE = "no drive that accepts segments has one that is free or may be reclaimed"
    ALL_OPEN = "every drive with space has as many segments open as it may have"
    NO_BUDGET = "no drive with space has enough left of its writes for today"


@dataclass(frozen=True, slots=True)
class Choice:
    """``must_reclaim``: nothing is free there: a segment of this drive is reclaimed first. ``credits``: for the next
    choice."""

    drive_id: str
    must_reclaim: bool
    credits: Mapping[str, float]


def choose_drive(
    drives: Sequence[DriveState],
    shares: Mapping[str, float],
    credits: Mapping[str, float],
    *,
    segment_bytes: int,
    beside: Sequence[str] = (),
) -> Choice | Obstacle:
    """Where to open the next segment.

    ``shares``: from :func:`~meshfusion.jbof.wear.shares.target_shares`; a drive without one is not chosen.
    ``credits``: from the last choice, at first empty. ``beside``: ids of the drives that neighbouring chunks go to:
    others are taken where there are any. The caller counts all of ``segment_bytes`` against the drive's budget and
    reclaims, if it must, on the chosen drive: reclaiming elsewhere would let wear follow the value of old chunks.
    """
    candidates = _candidates(drives, shares, segment_bytes)
    if isinstance(candidates, Obstacle):
        return candidates
    total = math.fsum(shares[drive.drive_id] for drive in candidates)
    # What cannot be opened now earns nothing: it would take all openings once it can.
    earned = {drive.drive_id: credits.get(drive.drive_id, 0.0) for drive in drives if drive.drive_id in shares}
    for drive in candidates:
        grown = earned[drive.drive_id] + shares[drive.drive_id] / total
        earned[drive.drive_id] = min(grown, MOST_CREDIT)
    apart = [drive for drive in candidates if drive.drive_id not in beside] or candidates
    chosen = _preferred(apart, earned, [drive.domain for drive in drives if drive.drive_id in beside])
    earned[chosen.drive_id] = max(earned[chosen.drive_id] - 1, -MOST_CREDIT)
    return Choice(chosen.drive_id, must_reclaim=chosen.free_segments == 0, credits=earned)


def _candidates(
    drives: Sequence[DriveState], shares: Mapping[str, float], segment_bytes: int
) -> list[DriveState] | Obstacle:
    accepting = [drive for drive in drives if drive.accepts_segments and drive.drive_id in shares]
    if not accepting:
        return Obstacle.NO_DRIVE
    with_space = [drive for drive in accepting if drive.free_segments + drive.reclaimable_segments > 0]
    if not with_space:
        return Obstacle.NO_SPACE
    openable = [drive for drive in with_space if drive.openings_left > 0]
    if not openable:
        return Obstacle.ALL_OPEN
    return [drive for drive in openable if drive.budget_left_bytes >= segment_bytes] or Obstacle.NO_BUDGET


def _preferred(
    candidates: Sequence[DriveState], earned: Mapping[str, float], neighbours: Sequence[tuple[str, ...]]
) -> DriveState:
    richest = max(earned[drive.drive_id] for drive in candidates)
    close = [drive for drive in candidates if earned[drive.drive_id] >= richest - CREDIT_SLACK]

    def order(drive: DriveState) -> tuple[int, float, str]:
        shared = sum(_shared_levels(drive.domain, domain) for domain in neighbours)
        return shared, -earned[drive.drive_id], drive.drive_id

    return min(close, key=order)


def _shared_levels(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many failure domains two drives share, from the widest on."""
    for level, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return level
    return min(len(one), len(other))
