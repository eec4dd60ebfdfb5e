"""Work on files whose disk may not answer: it is waited for in bounds, whatever the disk does (rule 8).

A thread in the kernel cannot be called back. So each piece of work has a thread of its own, of which there is one at a
time: what hangs keeps that one, and none of the threads that answer calls.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("meshfusion.security")


class PatientWork:
    """Pieces of work on one thing, one at a time and in no order. For several threads. ``name``: of their threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._change = threading.Condition()
        self._busy_since_s: float | None = None

    def do(self, work: Callable[[], object], *, within_s: float, when_late: Callable[[], None] | None = None) -> None:
        """Returns when it is done. ``when_late``: done after it, where it ended well after all.

        Raises what ``work`` raises, and TimeoutError when it, or that before it, takes longer than ``within_s``: then
        it has not been begun, or it may still be done.
        """
        end_s = time.monotonic() + within_s
        piece = _Piece(work, when_late)
        with self._change:
            self._await_turn(end_s, within_s)
            self._busy_since_s = time.monotonic()
        try:
            threading.Thread(target=self._run, args=(piece,), name=self._name, daemon=True).start()
        except BaseException:
            self._free()
            raise
        with self._change:
            if not self._change.wait_for(lambda: piece.is_done, max(0.0, end_s - time.monotonic())):
                piece.is_left = True
                raise _silent()
        if piece.error is not None:
            raise piece.error

    def _await_turn(self, end_s: float, within_s: float) -> None:
        """Under the lock."""
        while self._busy_since_s is not None:
            left_s = min(end_s, self._busy_since_s + within_s) - time.monotonic()
            if left_s <= 0:
                raise _silent()
            self._change.wait(left_s)

    def _run(self, piece: _Piece) -> None:
        try:
            piece.work()
        except BaseException as error:  # whoever waits raises it
            piece.error = error
        with self._change:
            piece.is_done = True
            self._change.notify_all()
        if piece.is_left and piece.error is None and piece.when_late is not None:
            try:
                piece.when_late()
            except OSError as error:
                log.error("what follows work that came late could not be done: %s", error.strerror)
        self._free()

    def _free(self) -> None:
        with self._change:
            self._busy_since_s = None
            self._change.notify_all()


class _Piece:
    """Changed under the lock of the work. ``is_left``: nobody waits for it any more."""

    def __init__(self, work: Callable[[], object], when_late: Callable[[], None] | None) -> None:
        self.work, self.when_late = work, when_late
        self.error: BaseException | None = None
        self.is_done = self.is_left = False


def _silent() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "its disk does not answer")
