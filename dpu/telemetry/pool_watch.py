"""Looks at a pool once a second, on one thread of its own.

Everything that tells of the pool reads what was seen here. However many ask, and however long the pool does not answer,
one thread waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from meshfusion.dpu.api.drive_types import DriveAdmin
from meshfusion.dpu.api.types import ChunkService
from meshfusion.dpu.segment_map import DriveMap, SegmentView
from meshfusion.dpu.telemetry.changes import tell_changes, tell_first
from meshfusion.dpu.telemetry.event_log import EventSink
from meshfusion.dpu.telemetry.pool_words import called
from meshfusion.dpu.telemetry.snapshot import Snapshot
from meshfusion.jbof.errors import ServiceUnavailableError

logger = logging.getLogger("meshfusion.telemetry")

PERIOD_S: Final = 1.0
MAX_SHARE: Final = 0.02  # of the time is spent looking, unless somebody asks
MAX_PAUSE_S: Final = 10.0
DEADLINE_S: Final = 5.0  # a pool that takes longer to tell its status does not answer


class PoolWatch:
    """``name``: as :func:`~meshfusion.dpu.telemetry.pool_words.called` takes it. ``segments``: asked for maps when
    somebody wants them. ``index_directory``: whose files are the index. ``clock`` reads monotonic seconds."""

    def __init__(
        self,
        service: ChunkService,
        admin: DriveAdmin,
        sink: EventSink,
        *,
        version: str,
        name: str = "",
        segments: SegmentView | None = None,
        index_directory: Path | None = None,
        period_s: float = PERIOD_S,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._admin = admin
        self._sink = sink
        self._version = version
        self._called = called(name)
        self._segments = segments
        self._index_directory = index_directory
        self._period_s = period_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._change = threading.Condition()
        self._begun = 0
        self._done = 0
        self._latest: Snapshot | None = None
        self._saves_stopped_since_s: float | None = None
        self._is_wanted_now = False
        self._are_maps_wanted = False
        self._maps: tuple[DriveMap, ...] = ()
        self._maps_due_s = clock()
        self._is_closing = False
        self._is_silent = False
        self._problem = ""
        self._looks = threading.Thread(target=self._loop, name="meshfusion-watch", daemon=True)
        self._guard = threading.Thread(target=self._guard_loop, name="meshfusion-watch-guard", daemon=True)

    def start(self) -> None:
        self._looks.start()
        self._guard.start()

    def stop(self) -> None:
        """No more looks. Does not wait, for whoever has several to end."""
        with self._change:
            self._is_closing = True
            self._change.notify_all()

    def close(self, *, wait_s: float | None = None) -> None:
        """A look that hangs is left behind: the pool's own end will say why. ``wait_s``: its deadline, without one."""
        self.stop()
        if self._looks.ident is not None:
            end_s = time.monotonic() + (self._deadline_s if wait_s is None else wait_s)
            for thread in (self._looks, self._guard):
                thread.join(max(0.0, end_s - time.monotonic()))

    def fresh(self, *, deadline_s: float, with_maps: bool = False) -> Snapshot:
        """From a look that began after this call; ``with_maps``: of the segments, which on large drives may be some
        seconds old.

        Raises :class:`~meshfusion.jbof.errors.ServiceUnavailableError` when the pool does not answer in time.
        """
        return self.told(self.ask(with_maps=with_maps), wait_s=deadline_s)

    def ask(self, *, with_maps: bool = False) -> int:
        """For a look that begins after this call; what it is called, for :meth:`told`. Never waits."""
        with self._change:
            self._is_wanted_now = True
            self._are_maps_wanted |= with_maps
            self._change.notify_all()
            return self._begun + 1

    def told(self, number: int, *, wait_s: float) -> Snapshot:
        """Of that look, or of a later one. Raises as :meth:`fresh`."""
        with self._change:
            is_done = self._change.wait_for(lambda: self._done >= number or self._is_closing, wait_s)
            if is_done and self._latest is not None and not self._problem:
                return self._latest
            problem = self._problem or "the pool did not tell its status in time"
        raise ServiceUnavailableError(problem, next_step="see the service's log")

    def _loop(self) -> None:
        while True:
            with self._change:
                if self._is_closing:
                    return
                self._begun += 1
                self._is_wanted_now = False
            begun_s = time.monotonic()
            try:
                self._look()
            except Exception as error:  # without looks nothing would be told any more
                with self._change:
                    self._problem = f"the pool's status cannot be read: {error}"
                logger.exception("a look at %s failed", self._called)
            with self._change:
                self._done = self._begun
                self._change.notify_all()
                wait_s = pause_s(self._period_s, time.monotonic() - begun_s)
                self._change.wait_for(lambda: self._is_wanted_now or self._is_closing, wait_s)

    def _look(self) -> None:
        status = self._service.status(deadline_s=self._deadline_s)
        drives = self._admin.drives(deadline_s=self._deadline_s)
        now_s = self._clock()
        if not status.saves_stopped_reason:
            self._saves_stopped_since_s = None
        elif self._saves_stopped_since_s is None:
            self._saves_stopped_since_s = now_s
        stopped_s = 0.0 if self._saves_stopped_since_s is None else now_s - self._saves_stopped_since_s
        # The pool's own count began with the failure itself, a look may have come later.
        stopped_s = max(stopped_s, dict(status.counters).get("saves_stopped_ms", 0) / 1000)
        now = Snapshot(now_s, status, drives, stopped_s, _taken_bytes(self._index_directory), self._look_at_segments())
        with self._change:
            before, self._latest, self._problem = self._latest, now, ""
        if before is None:
            tell_first(now, self._version, self._sink)
        else:
            tell_changes(before, now, self._sink)

    def _look_at_segments(self) -> tuple[DriveMap, ...]:
        """Only when somebody wants it, and no more often than with the share of time that looks may take."""
        with self._change:
            is_wanted, self._are_maps_wanted = self._are_maps_wanted, False
        begun_s = self._clock()
        if self._segments is not None and is_wanted and begun_s >= self._maps_due_s:
            self._maps = self._segments.segment_maps()
            ended_s = self._clock()
            self._maps_due_s = ended_s + min((ended_s - begun_s) / MAX_SHARE, MAX_PAUSE_S)
        return self._maps

    def _guard_loop(self) -> None:
        """The looks cannot say themselves that one of them hangs."""
        with self._change:
            while not self._is_closing:
                done, is_busy = self._done, self._begun > self._done
                self._change.wait_for(lambda d=done: self._done > d or self._is_closing, self._deadline_s)  # type: ignore[misc]
                if self._is_closing:
                    return
                hangs = is_busy and self._done == done
                if hangs and not self._is_silent:
                    self._is_silent = True
                    text = f"{self._called} has not told its status within {self._deadline_s:g} s"
                    self._sink.tell("pool_silent", text)
                    logger.error("%s", text)
                elif self._done > done and self._is_silent:
                    self._is_silent = False
                    self._sink.tell("pool_answers", f"{self._called} tells its status again")


def pause_s(period_s: float, took_s: float) -> float:
    """Until the next look: while one is taken, lookups may wait for it, so that many engines with many leases are
    looked at less often."""
    return max(period_s, min(took_s / MAX_SHARE, MAX_PAUSE_S))


def _taken_bytes(directory: Path | None) -> int:
    if directory is None:
        return -1
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_blocks * 512 for entry in directory.iterdir())
    return -1
