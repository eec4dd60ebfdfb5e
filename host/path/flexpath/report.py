"""What people and metrics see of a path."""

from __future__ import annotations

from typing import NamedTuple

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.lane import Lane


class PathReport(NamedTuple):
    """As it is now. ``is_measured``: else bandwidth and latency are guesses. ``state`` is that of a path that is not
    disabled; ``is_disabled``: by an operator. ``read_bytes``, ``written_bytes``: so far. ``last_error``: what went
    wrong on it last, also when it is over; empty if nothing has."""

    name: str
    state: PathState
    is_measured: bool
    bandwidth_bytes_per_s: float
    latency_s: float
    outstanding_bytes: int
    read_bytes: int
    written_bytes: int
    last_error: str
    is_disabled: bool


def report_of(lane: Lane, last_error: str) -> PathReport:
    speed = lane.speed
    return PathReport(
        lane.name,
        lane.health.state,
        speed.is_measured,
        speed.bandwidth_bytes_per_s,
        speed.latency_s,
        lane.outstanding_bytes,
        lane.read_bytes,
        lane.written_bytes,
        last_error,
        lane.is_disabled,
    )
