"""Does a served pool still get on? For watchdogs. No I/O, no clock."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """Of the index' one writer: tickets of the last transaction that was handed to it, and of the last that was made
    durable, or failed."""

    submitted: int
    settled: int


class ProgressWatch:
    """``patience_s``: a writer that has work and settles nothing for longer is stuck."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: Progress | None = None
        self._moved_s = 0.0

    def problem(self, now_s: float, progress: Progress | None) -> str:
        """Why the pool is stuck; "" while it gets on. ``progress``: None where the pool's lock could not be had. Only
        for how long a look takes may that be so: nothing is done under it that waits."""
        if progress is None:
            return "the pool's lock cannot be had"
        is_idle = progress.settled >= progress.submitted
        if self._seen is None or is_idle or progress.settled != self._seen.settled or self._was_idle:
            self._moved_s = now_s
        self._seen = progress
        if now_s - self._moved_s > self._patience_s:
            return f"the index settles nothing since {now_s - self._moved_s:.0f} s"
        return ""

    @property
    def _was_idle(self) -> bool:
        """At the last look: what waits since then waits for less than the time in between."""
        return self._seen is not None and self._seen.settled >= self._seen.submitted
