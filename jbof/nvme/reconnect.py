"""When to try again, and when to give up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

_MAX_DOUBLINGS: Final = 32
_JITTER: Final = 0.5  # of the delay, so that hosts which lost a target together do not come back together


class Reconnecting:
    """``random`` gives numbers from 0 to 1. Times count from when the connection was lost."""

    def __init__(self, first_s: float, max_s: float, loss_timeout_s: float, random: Callable[[], float]) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._loss_timeout_s = loss_timeout_s
        self._random = random
        self._failures = 0
        self.give_up_s = math.inf

    def lost(self, now_s: float) -> None:
        """The clock starts, unless it runs already."""
        if self.give_up_s == math.inf:
            self.give_up_s = now_s + self._loss_timeout_s

    def succeeded(self) -> None:
        self._failures = 0
        self.give_up_s = math.inf

    def next_attempt_s(self, now_s: float) -> float:
        """Of the next attempt, after one more failure."""
        delay_s = min(self._max_s, self._first_s * 2.0 ** min(self._failures, _MAX_DOUBLINGS))
        self._failures += 1
        return now_s + delay_s * (1 - _JITTER * self._random())
