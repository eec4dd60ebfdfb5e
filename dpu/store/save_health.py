"""Whether saves work: what last stopped them, since when, and when one is tried again. No I/O, no clock."""

from __future__ import annotations

from typing import Final

SAVE_RETRY_S: Final = 10.0  # after a failed transaction, saves are refused this long before one is tried again


class SaveHealth:
    """After a failure saves are refused for a while. It counts as over only when a transaction that does at least as
    much has worked: an opened segment takes the index and the medium, everything else only the index."""

    def __init__(self) -> None:
        self._problem = ""
        self._since_s = 0.0
        self._refused_until_s = 0.0
        self._failure_count = 0
        self._takes_medium = False

    def failed(self, now_s: float, problem: str, *, opened: int) -> None:
        """``opened``: how many segments were to be opened."""
        if not self._problem:
            self._since_s, self._failure_count, self._takes_medium = now_s, 0, False
        self._problem = problem
        self._failure_count += 1
        self._takes_medium |= opened > 0
        self._refused_until_s = now_s + SAVE_RETRY_S

    def worked(self, *, opened: int) -> None:
        if opened or not self._takes_medium:
            self._problem = ""

    def go_elsewhere(self) -> None:
        """What failed was one drive, and others take what is saved."""
        self._problem = ""

    def refuses(self, now_s: float) -> bool:
        return bool(self._problem) and now_s < self._refused_until_s

    def stopped_s(self, now_s: float) -> float:
        """For how long; 0 while they work."""
        return now_s - self._since_s if self._problem else 0.0

    def reason(self, now_s: float) -> str:
        """ "" while they work."""
        if not self._problem:
            return ""
        left_s = self._refused_until_s - now_s
        again = f"one is tried again in {left_s:.0f} s" if left_s > 0 else "the next one is tried"
        return f"{self._problem} (for {self.stopped_s(now_s):.0f} s, {self._failure_count} failed; {again})"
