"""What a caller holds while something is under way: to wait for its end, and for its memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.memory import RegionPart

_GRACE_S: Final = 1.0
"""How long after its deadline the end of something may be told; later, the poller hangs."""


class FateUnknownError(MediaError):
    """It may have been done, or be done later (rule 3). ``transfer`` tells when its memory is free again."""

    def __init__(self, cause: MeshFusionError, transfer: PendingTransfer) -> None:
        super().__init__(f"its fate is unknown: {cause.message}", next_step=cause.next_step)
        self.transfer = transfer


class Moment:
    """An event that may be waited for, and that calls whoever asked for it.

    Without a lock, which on the way of each command would cost more than the command's own state: a call is appended
    before it is looked whether the moment has come, and the moment comes before calls are taken. So no call is missed,
    and as taking is atomic, none is made twice.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._calls: deque[Callable[[], None]] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        if self._is_set or timeout_s <= 0:
            return self._is_set
        event = threading.Event()
        self.then(event.set)
        if not event.wait(timeout_s):
            with suppress(ValueError):
                self._calls.remove(event.set)
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # it was taken back
                return
            call()

    def then(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._is_set:
            try:
                self._calls.remove(call)
            except ValueError:  # it is being called
                return
            call()


class Waiting(Protocol):
    """How to wait for what a thread must do that may be busy with something else, or asleep."""

    def wait(self, moment: Moment, deadline_s: float) -> bool:
        """Has ``moment`` come? Returns then, or at ``deadline_s``."""
        ...

    def expect(self) -> None:
        """Somebody is to be called: see that it happens although nobody waits."""
        ...


class _Asleep:
    """Where somebody else does all the work."""

    def wait(self, moment: Moment, deadline_s: float) -> bool:
        return moment.wait(deadline_s - time.monotonic())

    def expect(self) -> None: ...


class PendingTransfer:
    """A transfer under way. Its regions cannot be closed until its memory is free. ``waiting``: how callers wait."""

    def __init__(self, parts: Sequence[RegionPart], deadline_s: float, waiting: Waiting | None = None) -> None:
        self._parts = parts
        self._deadline_s = deadline_s
        self._waiting = waiting or _Asleep()
        self._ended = Moment()
        self._memory_free = Moment()
        self._error: MeshFusionError | None = None
        self.is_retryable = False
        self.is_in_doubt = False
        for part in parts:
            part.region.acquire()

    # ---- for the caller ------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """:meth:`wait` returns, or raises, at once. Who only looks, without waiting, may see it 5 ms late."""
        return self._ended.is_set()

    @property
    def error(self) -> MeshFusionError | None:
        """Why it failed or is in doubt; None while it is under way and when it succeeded."""
        return self._error

    def when_ended(self, call: Callable[[], None]) -> None:
        """``call`` once when it has ended, or at once if it has: on any thread, so it must not wait.

        An end that is not in doubt finds the memory free.
        """
        self._ended.then(call)
        self._waiting.expect()

    def when_memory_free(self, call: Callable[[], None]) -> None:
        """The same, once nobody can touch its memory any more."""
        self._memory_free.then(call)
        self._waiting.expect()

    def wait(self) -> None:
        """Until it has ended, or soon after its deadline. Raises its error or :class:`FateUnknownError`."""
        if not self._ended.is_set() and not self._waiting.wait(self._ended, self._deadline_s + _GRACE_S):
            hangs = MediaError(
                "the initiator's thread did not end a transfer by its deadline",
                next_step="See what keeps the process from running its threads.",
            )
            raise FateUnknownError(hangs, self)
        if self.is_in_doubt:
            assert self._error is not None
            raise FateUnknownError(self._error, self)
        if self._error is not None:
            raise self._error

    def wait_memory_free(self, timeout_s: float) -> bool:
        """Can nobody touch its memory any more?"""
        return self._memory_free.wait(timeout_s)

    # ---- for the initiator ---------------------------------------------------------------------------------------

    def end(self, error: MeshFusionError | None = None, *, is_retryable: bool = False) -> None:
        """Its fate is known, and its memory free."""
        self._error, self.is_retryable = error, is_retryable
        self.free_memory()
        self._ended.set()

    def doubt(self, error: MeshFusionError) -> None:
        assert not self._ended.is_set()
        self._error, self.is_in_doubt, self.is_retryable = error, True, True
        self._ended.set()

    def free_memory(self) -> None:
        assert not self._memory_free.is_set()
        for part in self._parts:
            part.region.release()
        self._memory_free.set()


class PendingRequest:
    """A conversation under way, or anything else with one answer."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._result: Any = None
        self._error: MeshFusionError | None = None

    def wait(self) -> Any:
        """What it resulted in. Raises its error."""
        if not self._ended.wait(self._timeout_s):
            raise MediaError(
                f"no answer within {self._timeout_s:g} s", next_step="Look at the target's log, or allow more time."
            )
        if self._error is not None:
            raise self._error
        return self._result

    def end(self, result: Any = None, error: MeshFusionError | None = None) -> None:
        self._result, self._error = result, error
        self._ended.set()
