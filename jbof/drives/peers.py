"""Which drive is slow: against its peers, for a load that makes all of them slow is nobody's fault. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshfusion.jbof.drives.life_words import Speed

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Window:
    """Of one drive, some seconds: ``latency_s`` is a high quantile (say the 95th percentile) of equal commands."""

    command_count: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Slow: more than ``slow_factor`` times its peers, and more than ``floor_s``. Normal: less than ``normal_factor``
    times, or below the floor. Between both, and with fewer commands or peers, nothing is told.
    """

    slow_factor: float = 3.0
    normal_factor: float = 1.5
    floor_s: float = 0.005
    min_commands: int = 20
    min_peers: int = 2


def speeds(windows: Mapping[Key, Window], limits: PeerLimits | None = None) -> dict[Key, Speed]:
    """Each drive's verdict of one window, against the median of the others."""
    limits = limits or PeerLimits()
    told = {key: window.latency_s for key, window in windows.items() if window.command_count >= limits.min_commands}
    return {key: _speed(key, told, limits) for key in windows}


def _speed(key: Key, latencies_s: Mapping[Key, float], limits: PeerLimits) -> Speed:
    others_s = [latency_s for other, latency_s in latencies_s.items() if other != key]
    if key not in latencies_s or len(others_s) < limits.min_peers:
        return Speed.UNTOLD
    latency_s, peers_s = latencies_s[key], statistics.median(others_s)
    if latency_s <= limits.floor_s or latency_s < limits.normal_factor * peers_s:
        return Speed.NORMAL
    return Speed.SLOW if latency_s > limits.slow_factor * peers_s else Speed.UNTOLD
