"""Which chunks load after load fails to read, while others can be read. No I/O, no clock.

A chunk that lies on a bad spot of the medium is worth dropping; one behind a path that reads nothing is not: the pool
is not this engine's alone, and the path may come back.
"""

from __future__ import annotations

from collections.abc import Sequence

READ_FAILURES_MAX = 3
REMEMBERED_MAX = 10_000
"""Chunks: those that failed first are forgotten first, since what is reclaimed is never read again."""


class ReadFailures:
    """By chunk key."""

    def __init__(self) -> None:
        self._failures: dict[bytes, tuple[int, int]] = {}  # how many counted; loads that read something, until then
        self._good_loads = 0

    def were_read(self, keys: Sequence[bytes]) -> None:
        """One load read these."""
        self._good_loads += bool(keys)
        if self._failures:
            for key in keys:
                self._failures.pop(key, None)

    def is_lost(self, key: bytes) -> bool:
        """It could not be read: for the last time? A failure counts when something was read since the one before."""
        count, good_loads = self._failures.get(key, (0, -1))
        if good_loads < self._good_loads:
            count += 1
        if count >= READ_FAILURES_MAX:
            del self._failures[key]
            return True
        self._failures[key] = (count, self._good_loads)
        if len(self._failures) > REMEMBERED_MAX:
            del self._failures[next(iter(self._failures))]
        return False
