"""What part of the openings each drive should get: by endurance, corrected by wear and free space.

Equal wear per time means writes in proportion to rated endurance: a drive's *fair share*. A drive that is less worn
than the others gets more than that, a more worn one less, within limits: a young drive that took everything would hold
chunks for a short time only, and all writes would wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshfusion.jbof.wear.state import DriveState


@dataclass(frozen=True, slots=True)
class SharePolicy:
    """``gain_per_point``: how much of its fair share more a drive gets for each point of wear below the mean.
    ``space_gain``: how much more for being empty where the mean is full: a new drive is filled without reclaiming.
    ``least_factor``, ``most_factor``: of the fair share; what a drive gets always lies between them.
    """

    gain_per_point: float = 0.5
    space_gain: float = 1.0
    least_factor: float = 0.25
    most_factor: float = 4.0

    def __post_init__(self) -> None:
        assert self.gain_per_point >= 0, self
        assert self.space_gain >= 0, self
        assert 0 < self.least_factor < 1 < self.most_factor, self


DEFAULT_POLICY = SharePolicy()


def target_shares(drives: Sequence[DriveState], policy: SharePolicy = DEFAULT_POLICY) -> dict[str, float]:
    """Share of the openings by drive id, for drives that accept segments; they sum to 1. Empty when none does.

    The order of ``drives`` changes nothing, not even by rounding. Wear and filling change slowly: it is enough to ask
    again when health was read, every few minutes.
    """
    takers = [drive for drive in drives if drive.accepts_segments]
    if not takers:
        return {}
    endurance = sum(drive.rated_endurance_bytes for drive in takers)
    fair = {drive.drive_id: drive.rated_endurance_bytes / endurance for drive in takers}
    assert len(fair) == len(takers), "two drives with one id"
    mean_wear = math.fsum(fair[drive.drive_id] * drive.wear_points for drive in takers)
    mean_free = math.fsum(fair[drive.drive_id] * drive.free_share for drive in takers)
    wanted = {
        drive.drive_id: 1
        + policy.gain_per_point * (mean_wear - drive.wear_points)
        + policy.space_gain * (drive.free_share - mean_free)
        for drive in takers
    }
    shift = _balancing_shift(fair, wanted, policy)
    shares = {drive_id: fair[drive_id] * _within(wanted[drive_id] + shift, policy) for drive_id in fair}
    total = math.fsum(shares.values())  # 1 but for the bisection's last step
    return {drive_id: share / total for drive_id, share in shares.items()}


def _within(factor: float, policy: SharePolicy) -> float:
    return min(max(factor, policy.least_factor), policy.most_factor)


def _balancing_shift(fair: Mapping[str, float], wanted: Mapping[str, float], policy: SharePolicy) -> float:
    """What is added to all factors so that shares sum to 1 within the limits.

    The sum grows with the shift, from ``least_factor`` (below 1) to ``most_factor`` (above 1): bisection finds it.
    """
    low = policy.least_factor - max(wanted.values())
    high = policy.most_factor - min(wanted.values())
    for _ in range(60):
        middle = (low + high) / 2
        if math.fsum(fair[drive_id] * _within(wanted[drive_id] + middle, policy) for drive_id in fair) < 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2
