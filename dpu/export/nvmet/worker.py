"""Runs changes that the kernel may hold up for as long as a drive does, without waiting as long.

Disabling a namespace waits for its requests in flight, uninterruptibly and with nvmet's configuration lock held, so
that every further change and every Connect waits too (drivers/nvme/target/configfs.c, nvmet_ns_enable_store). There is
nothing to be done about that but to know it: one change at a time, in a thread; until it ends all others are refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from meshfusion.dpu.export.errors import StepPendingError


class Worker:
    """``patience_s``: how long :meth:`run` waits for a change."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._thread: threading.Thread | None = None
        self._what = ""
        self._since = ""

    @property
    def busy_with(self) -> str:
        """What has been under way for longer than that; empty if nothing is."""
        if self._thread is None or not self._thread.is_alive():
            return ""
        return f"the kernel has been at it since {self._since}: {self._what}"  # a text that stays is told once

    def run(self, what: str, change: Callable[[], None]) -> None:
        """Raises what ``change`` raises, or :class:`~meshfusion.dpu.export.errors.StepPendingError` when it takes
        longer; it goes on then, and what it raises later is lost: the tree shows how far it came.
        """
        self._refuse_while_busy()
        raised: list[BaseException] = []

        def work() -> None:
            try:
                change()
            except BaseException as error:
                raised.append(error)

        self._what, self._since = what, time.strftime("%H:%M:%S UTC", time.gmtime())
        self._thread = threading.Thread(target=work, name="nvmet-change", daemon=True)
        self._thread.start()
        self._thread.join(self._patience_s)
        self._refuse_while_busy()
        if raised:
            raise raised[0]

    def _refuse_while_busy(self) -> None:
        if busy := self.busy_with:
            raise StepPendingError(
                busy, next_step="wait: a drive has not finished its requests; if it never does, reset the drive"
            )
