"""What a probe of the pool comes to."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ProbeState(enum.Enum):
    OK = "ok"  # a chunk was written, found, read and proven; the write may be a while ago
    DEGRADED = "degraded"  # hits go on, saves do not
    FAILING = "failing"  # not even hits
    UNKNOWN = "unknown"  # not tried yet, or never: it is switched off


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """``reasons``: why it is not simply OK; for people. ``written_age_s``: how long ago the chunk that was read had
    been written; None where none was read."""

    state: ProbeState
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    written_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class ProbeView:
    """The last result as it is now. ``age_s``: since it ended; None before the first."""

    state: ProbeState
    reasons: tuple[str, ...]
    seconds: float = 0.0
    age_s: float | None = None
    written_age_s: float | None = None
