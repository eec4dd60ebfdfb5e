"""Value types of what happened in a service. Nothing here does I/O."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Severity(enum.Enum):
    INFO = "info"  # as it should be
    WARNING = "warning"  # costs hits, or soon will
    ERROR = "error"  # somebody should look


@dataclass(frozen=True, slots=True)
class Event:
    """``sequence``: from 1 on, without gaps within a life of the service. ``time_s``: Unix time at which it was seen.
    ``kind``: as in docs/events.md. ``fields``: what the text names, for programs. ``pool``: the name of that which it
    is of; "" of the service's own, and where it has one pool without a name."""

    sequence: int
    time_s: float
    kind: str
    severity: Severity
    text: str
    fields: tuple[tuple[str, str], ...] = ()
    pool: str = ""


class EventSource(Protocol):
    """In process or over gRPC, same meaning."""

    def events(self, after_sequence: int, *, follow: bool) -> Iterator[Event]:
        """Those after ``after_sequence`` that are still known, in order; with ``follow``, then those to come, until the
        service ends. More than a few followers at once, and one that falls behind so far that events are gone that it
        has not been given, are refused with :class:`~meshfusion.jbof.errors.ServiceError`."""
        ...
