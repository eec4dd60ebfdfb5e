"""Which path a request takes: the one that is expected to have it done first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.speed import Speed

_TIME_FACTOR: Final = 2.0  # what is expected may take this much longer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that may be used for the request.

    ``weight``: how much worse its way to the memory is than the best one, from 1 up. ``share``: of what it could take
    (see :class:`~meshfusion.host.path.flexpath.health.Health`). ``is_optimized``: its controller reaches the namespace
    in the best way (ANA). ``was_tried``: by this request. ``wants_probe``: it was long not heard of.
    """

    path: int
    speed: Speed
    weight: float
    share: float
    outstanding_bytes: int
    outstanding_requests: int
    is_optimized: bool
    was_tried: bool
    wants_probe: bool


def choose(
    candidates: Sequence[Candidate],
    length_bytes: int,
    *,
    backlog_bytes: int,
    time_left_s: float,
    is_probe_allowed: bool,
    settings: SpreadSettings,
) -> int | None:
    """The path to take now, or None: it is better to wait. ``backlog_bytes``: of the requests that wait, this one too.

    A path without room is compared as if everything that waits were put on it: as long as it could do all that sooner
    than a slow path does this one request, the slow one would only hold the request up.
    """
    for attribute, wanted in (("is_optimized", True), ("was_tried", False)):
        preferred = [candidate for candidate in candidates if getattr(candidate, attribute) is wanted]
        candidates = preferred or candidates
    if is_probe_allowed:
        for candidate in candidates:
            if candidate.wants_probe and candidate.outstanding_bytes == 0:
                return candidate.path
    best: Candidate | None = None
    best_s, best_has_room = float("inf"), False
    for candidate in candidates:
        has_room = _has_room(candidate, length_bytes, time_left_s, settings)
        ahead_bytes = candidate.outstanding_bytes + (length_bytes if has_room else backlog_bytes)
        seconds = candidate.speed.completion_s(ahead_bytes) * candidate.weight / candidate.share
        if seconds < best_s:
            best, best_s, best_has_room = candidate, seconds, has_room
    return best.path if best is not None and best_has_room else None


def limit_bytes(speed: Speed, share: float, settings: SpreadSettings) -> int:
    """How much a path may have under way, unless it is a single request."""
    wanted_bytes = float(settings.min_outstanding_bytes)
    if speed.is_measured:
        wanted_bytes = speed.bandwidth_bytes_per_s * (settings.queue_s + speed.latency_s)
        wanted_bytes = min(max(wanted_bytes, settings.min_outstanding_bytes), settings.max_outstanding_bytes)
    return int(wanted_bytes * share)


def _has_room(candidate: Candidate, length_bytes: int, time_left_s: float, settings: SpreadSettings) -> bool:
    """An idle path always has, whatever is thought of it: else nothing would ever show that it is better now."""
    if candidate.outstanding_bytes == 0:
        return True
    if candidate.outstanding_requests >= settings.max_outstanding_requests:
        return False
    ahead_bytes = candidate.outstanding_bytes + length_bytes
    if candidate.speed.completion_s(ahead_bytes) * _TIME_FACTOR > time_left_s:
        return False
    return ahead_bytes <= limit_bytes(candidate.speed, candidate.share, settings)
