"""What reaches the service's main thread from outside: signals, and whatever makes it look up."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from types import FrameType

from meshfusion.jbof.errors import FormatError

log = logging.getLogger("meshfusion.service")

_ENDING = (signal.SIGTERM, signal.SIGINT)


class ServiceSignals:
    """Turns SIGTERM, SIGINT and SIGHUP into a return from :meth:`wait`; before :meth:`defer`, the first two into the
    end of the process. An index that is damaged becomes an error of :meth:`wait`. Must be made in the main thread,
    which waits, too.

    Handlers take no lock: they run in the middle of whatever the main thread does, which may hold one.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._deferred = False
        self._endings: list[str] = []
        self._reloads: list[None] = []
        self._damage: FormatError | None = None
        for number in _ENDING:
            signal.signal(number, self._handle_ending)
        signal.signal(signal.SIGHUP, self._handle_reload)
        # Any thread may get a signal, which interrupts no wait of the main thread, and handlers run in that one only:
        # whoever gets it writes to the pipe at once.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def _handle_ending(self, number: int, frame: FrameType | None) -> None:
        self._endings.append(signal.Signals(number).name)
        self.wake()
        if not self._deferred:
            # Still opening the pool, which may take long: unwind through its clean-up.
            raise SystemExit(0)

    def _handle_reload(self, number: int, frame: FrameType | None) -> None:
        self._reloads.append(None)
        self.wake()

    def defer(self) -> None:
        """From now on a signal waits for :meth:`wait`."""
        self._deferred = True

    def wake(self) -> None:
        """:meth:`wait` returns; from any thread and any signal handler."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._writer, b"\0")

    def damaged(self, error: FormatError) -> None:
        """From any thread: whoever reads on may crash."""
        log.critical("%s: stopping", error.message)
        self._damage = error
        self.wake()

    def wait(self, timeout_s: float | None) -> None:
        """Until something has come, or so long. Raises what :meth:`damaged` was told."""
        select.select([self._reader], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        if self._damage is not None:
            raise self._damage

    def take_endings(self) -> list[str]:
        """Names of the signals to end that have come since."""
        return [self._endings.pop(0) for _ in range(len(self._endings))]

    def take_reload(self) -> bool:
        """Has SIGHUP come since?"""
        return bool([self._reloads.pop() for _ in range(len(self._reloads))])
