"""Spans of a request, where somebody collects them: what the connector and the service know of tracing.

A request comes with headers of the W3C's Trace Context, or it is not traced and costs nothing. They go on with each RPC
beside the request id, so that the service's spans join the request's trace; also where only one side collects spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final, Protocol

Headers = tuple[tuple[str, str], ...]
"""``traceparent`` and perhaps ``tracestate``; empty: not traced."""

Attributes = Mapping[str, str | int | float]
NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})
NO_HEADERS: Final[Headers] = ()
HEADER_NAMES: Final = ("traceparent", "tracestate")
REQUEST_ID: Final = "meshfusion.request_id"
"""Attribute of spans."""
_CHARS_MAX: Final = 512  # of a value: what https://www.w3.org/TR/trace-context/ asks one to pass on at least

current_trace: ContextVar[Headers] = ContextVar("meshfusion_trace", default=NO_HEADERS)
"""What the calls that this thread makes belong to."""


@contextmanager
def within_trace(headers: Headers) -> Iterator[None]:
    """Calls that this thread makes meanwhile go out with ``headers``."""
    token = current_trace.set(headers)
    try:
        yield
    finally:
        current_trace.reset(token)


class Span(Protocol):
    @property
    def headers(self) -> Headers:
        """For what is done on its behalf elsewhere."""
        ...

    def end(self, attributes: Attributes = NO_ATTRIBUTES, *, error: str = "") -> None:
        """Once. ``error``: why it did not go well."""
        ...


class Tracer(Protocol):
    def begin(
        self, name: str, parent: Headers, attributes: Attributes = NO_ATTRIBUTES, *, is_server: bool = False
    ) -> Span:
        """A span as a child of ``parent``; without one, none."""
        ...


class PassedOn:
    """Keeps the contract of :class:`Span`, and is none: its headers are those of what it would belong to."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers

    def end(self, attributes: Attributes = NO_ATTRIBUTES, *, error: str = "") -> None:
        pass


UNTRACED: Final = PassedOn(NO_HEADERS)


class NobodyCollects:
    """Keeps the contract of :class:`Tracer`."""

    def begin(
        self, name: str, parent: Headers, attributes: Attributes = NO_ATTRIBUTES, *, is_server: bool = False
    ) -> Span:
        return PassedOn(parent) if parent else UNTRACED


def headers_of(found: Mapping[str, str] | None) -> Headers:
    """Of a request that came with ``found``."""
    return received_headers(found.items()) if found else NO_HEADERS


def received_headers(metadata: Iterable[tuple[str, str | bytes]] | None) -> Headers:
    """Of a call or a request. What cannot go on as metadata is left out, the whole of it without a ``traceparent``."""
    found = {
        key: value
        for key, value in metadata or ()
        if key in HEADER_NAMES and isinstance(value, str) and _is_passable(value)
    }
    return tuple(found.items()) if "traceparent" in found else NO_HEADERS


def _is_passable(value: str) -> bool:
    return 0 < len(value) <= _CHARS_MAX and all(" " <= c < "\x7f" for c in value)
