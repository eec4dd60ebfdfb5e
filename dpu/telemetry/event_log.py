"""The last things that happened, for whoever asks and whoever watches."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from meshfusion.dpu.api.event_types import Event, Severity
from meshfusion.dpu.telemetry.event_kinds import EVENT_KINDS
from meshfusion.jbof.errors import ServiceError, ServiceUnavailableError

logger = logging.getLogger("meshfusion.events")

KEPT_EVENTS: Final = 1000
MAX_WATCHERS: Final = 4  # each holds a thread of the server
_LOOK_S: Final = 1.0  # a watcher looks so often whether it is still wanted


class EventSink(Protocol):
    """What a part is given that has something to tell."""

    def tell(self, kind: str, text: str, *, severity: Severity | None = None, **fields: object) -> None:
        """``severity``: for kinds that have none of their own, and only for these."""
        ...


class EventLog:
    """Safe for use by several threads. ``unix_time_s`` reads the clock."""

    def __init__(self, *, kept: int = KEPT_EVENTS, unix_time_s: Callable[[], float] = time.time) -> None:
        self._unix_time_s = unix_time_s
        self._events: deque[Event] = deque(maxlen=kept)
        self._change = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._last_sequence = 0
        self._watchers: dict[int, _Watcher] = {}
        self._last_watcher = 0
        self._is_closed = False

    def tell(self, kind: str, text: str, *, severity: Severity | None = None, **fields: object) -> None:
        """See :class:`EventSink`; of the service itself."""
        self._tell("", kind, text, severity, fields)

    def of_pool(self, name: str) -> EventSink:
        """For what happens in one of several pools. ``name``: "" where there is one, without a name."""
        return _OfPool(partial(self._tell, name))

    def _tell(self, pool: str, kind: str, text: str, severity: Severity | None, fields: Mapping[str, object]) -> None:
        own = EVENT_KINDS[kind].severity
        assert (own is None) != (severity is None), f"the severity of {kind} is told twice or not at all"
        told = own or severity
        assert told is not None
        named = tuple((name, str(value)) for name, value in fields.items())
        with self._change:
            self._last_sequence += 1
            self._counts[kind] += 1
            self._events.append(Event(self._last_sequence, self._unix_time_s(), kind, told, text, named, pool))
            stuck = [w for w in self._watchers.values() if w.given < self._events[0].sequence - 1 and w.has_begun]
            self._change.notify_all()
        for watcher in stuck:
            watcher.cut_off()
        logger.debug(
            "%s%s: %s", f"pool {pool}: " if pool else "", kind, text
        )  # the part that saw it has logged it at its own level

    def recent(self, count: int) -> tuple[Event, ...]:
        """The last ones, oldest first."""
        with self._change:
            return tuple(self._events)[-count:] if count else ()

    @property
    def counts(self) -> dict[str, int]:
        """Of all that were told, by kind."""
        with self._change:
            return dict(self._counts)

    @property
    def watcher_count(self) -> int:
        return len(self._watchers)

    def close(self) -> None:
        """Every watcher gets what there is, and ends."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def events(
        self,
        after_sequence: int,
        *,
        follow: bool,
        is_wanted: Callable[[], bool] = lambda: True,
        cut_off: Callable[[], object] = lambda: None,
    ) -> Iterator[Event]:
        """See :class:`~meshfusion.dpu.api.event_types.EventSource`. ``is_wanted``: asked now and then by one that
        waits; False ends it. ``cut_off``: called, by any thread and maybe again and again, for one that does not even
        come to be told that it is too slow: it takes nothing, and its thread waits for it. A service that has begun
        anew counts from 1 again: a sequence that it has not reached is of another life, and everything is new."""
        if not follow:
            yield from self._after(after_sequence)
            return
        with self._change:
            if len(self._watchers) >= MAX_WATCHERS:
                raise ServiceUnavailableError(
                    f"{MAX_WATCHERS} watchers follow the events already, and no more are served",
                    next_step="End one of them, or ask now and then without following.",
                )
            self._last_watcher += 1
            number = self._last_watcher
            watcher = self._watchers[number] = _Watcher(after_sequence, cut_off)
        try:
            yield from self._followed(watcher, is_wanted)
        finally:
            with self._change:
                del self._watchers[number]

    def _followed(self, watcher: _Watcher, is_wanted: Callable[[], bool]) -> Iterator[Event]:
        while is_wanted():
            with self._change:
                if watcher.given > self._last_sequence:
                    watcher.given = 0 if self._last_sequence else watcher.given
                event = self._next(watcher)
                if event is None:
                    if self._is_closed:
                        return
                    self._change.wait(_LOOK_S)
                    continue
                watcher.given, watcher.has_begun = event.sequence, True
            yield event

    def _next(self, watcher: _Watcher) -> Event | None:
        """Under the lock. What was gone before it came is no fault of its."""
        if not self._events or watcher.given >= self._last_sequence:
            return None
        first = self._events[0].sequence
        missed = first - watcher.given - 1
        if missed > 0 and watcher.has_begun:
            raise ServiceError(
                f"this watcher is too slow: the events {watcher.given + 1} to {watcher.given + missed} are gone",
                next_step="Follow anew, and read faster; at most the last "
                f"{self._events.maxlen} events are kept for a watcher.",
            )
        return self._events[max(0, -missed)]

    def _after(self, sequence: int) -> tuple[Event, ...]:
        with self._change:
            if sequence > self._last_sequence:
                sequence = 0
            return tuple(event for event in self._events if event.sequence > sequence)


class _OfPool:
    """An :class:`EventSink`. ``put``: kind, text, severity and fields."""

    def __init__(self, put: Callable[[str, str, Severity | None, Mapping[str, object]], None]) -> None:
        self._put = put

    def tell(self, kind: str, text: str, *, severity: Severity | None = None, **fields: object) -> None:
        self._put(kind, text, severity, fields)


@dataclass(slots=True)
class _Watcher:
    """``given``: the sequence of what it was given last, or of what it has from before it came."""

    given: int
    cut_off: Callable[[], object]
    has_begun: bool = False
