"""How long an engine's thread stands still beside others of its process: the gaps between its signs of life."""

from __future__ import annotations

import time
from typing import NamedTuple

ENGINES = ("computes", "sleeps")
_STEP_S = 0.001
_LOST_S = 0.0001


class Gaps(NamedTuple):
    """Between signs of life. ``lost_share``: of the time, in gaps of more than a tenth of a millisecond."""

    p99_ms: float
    worst_ms: float
    lost_share: float


def gaps_of(engine: str, duration_s: float) -> Gaps:
    """Of the calling thread, which either ``computes`` all the time, in Python, or ``sleeps`` a millisecond in turn.

    One that computes loses the global lock every few milliseconds to any thread that wants it. One that sleeps must get
    the lock when it wakes; its gap is what it sleeps longer than it wanted.
    """
    assert engine in ENGINES
    gaps_s = []
    end_s = time.monotonic() + duration_s
    before_s = time.monotonic()
    while before_s < end_s:
        if engine == "sleeps":
            time.sleep(_STEP_S)
        else:
            sum(range(500))  # about 5 µs
        now_s = time.monotonic()
        gaps_s.append(now_s - before_s - (_STEP_S if engine == "sleeps" else 0.0))
        before_s = now_s
    gaps_s.sort()
    lost_s = sum(gap_s for gap_s in gaps_s if gap_s > _LOST_S)
    return Gaps(gaps_s[len(gaps_s) * 99 // 100] * 1e3, gaps_s[-1] * 1e3, lost_s / duration_s)
