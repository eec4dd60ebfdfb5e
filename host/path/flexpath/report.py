"""What people and metrics see of a path."""

from __future__ import annotations

from typing import NamedTuple

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.lane import Lane


class PathReport(NamedTuple):
    """As it is now. ``is_measured``: else bandwidth and latency are guesses."""

    name: str
    state: PathState
    is_measured: bool
    bandwidth_bytes_per_s: float
    latency_s: float
    outstanding_bytes: int


def report_of(lane: Lane, name: str) -> PathReport:
    speed = lane.speed
    return PathReport(
        name,
        lane.health.state,
        speed.is_measured,
        speed.bandwidth_bytes_per_s,
        speed.latency_s,
        lane.outstanding_bytes,
    )
