"""Keeps systemd's watchdog quiet for as long as all served pools get on, and no longer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from meshfusion.dpu.progress import Progress, ProgressWatch
from meshfusion.tools.mfctl.sd_notify import Notifier

log = logging.getLogger("meshfusion.service")

# Looks in the time that the manager allows between two words, so that one that fails costs nothing yet.
_LOOKS: Final = 4


class Watchdog:
    """``looks``: as :meth:`~meshfusion.dpu.pool.Pool.progress`, of each pool. Times are of one clock, given with each
    call."""

    def __init__(self, notifier: Notifier, *looks: Callable[[], Progress | None]) -> None:
        self._notifier = notifier
        self._interval_s = None if notifier.watchdog_s is None else notifier.watchdog_s / _LOOKS
        self._watches = [(look, ProgressWatch(patience_s=notifier.watchdog_s or 0.0)) for look in looks]
        self._next_s: float | None = None
        self._problem = ""

    def due_in_s(self, now_s: float) -> float | None:
        """When :meth:`tend` is to be called next; None: never."""
        if self._interval_s is None:
            return None
        return 0.0 if self._next_s is None else max(0.0, self._next_s - now_s)

    def tend(self, now_s: float) -> None:
        """Look, if it is time to, and say so if all is well."""
        if self._interval_s is None or (self._next_s is not None and now_s < self._next_s):
            return
        self._next_s = now_s + self._interval_s
        # Each is looked at: a watch that is left out would take the time until its next look for standing still.
        problem = "; ".join(filter(None, [watch.problem(now_s, look()) for look, watch in self._watches]))
        if not problem:
            self._notifier.tell("WATCHDOG=1")
        elif problem != self._problem:
            log.error("%s: the watchdog is not told that all is well", problem)
        self._problem = problem
