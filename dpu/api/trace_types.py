"""Value types of what a service remembers of its calls. Nothing here does I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TracedCall:
    """What one call was to one request. ``time_s``: Unix time of its end. ``code``: gRPC's name of how it ended.
    ``sent_under``: the id that it came with, which is another one where a call serves several requests. ``counts``: by
    name, of the chunks and leases of this request alone; () where it was refused, or has none."""

    time_s: float
    call: str
    seconds: float
    code: str
    sent_under: str
    counts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """``calls``: those that are remembered, the oldest first. ``kept_since_s``: Unix time of the oldest call of any
    request that is; 0 where none is."""

    calls: tuple[TracedCall, ...]
    kept_since_s: float


class TraceSource(Protocol):
    """In process or over gRPC, same meaning."""

    def trace(self, request_id: str) -> Trace: ...
