"""Serves what a service tells operators over gRPC, beside the chunk service: events, and its calls of a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from meshfusion.dpu.api.codec_events import event_to_pb
from meshfusion.dpu.api.codec_traces import trace_to_pb
from meshfusion.dpu.api.error_codec import encode_error
from meshfusion.dpu.api.event_types import Event
from meshfusion.dpu.api.limits import check_text, malformed
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.trace_types import TraceSource
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import MeshFusionError

log = logging.getLogger(__name__)

OBSERVE_NAME = "meshfusion.v1.Observe"

M = TypeVar("M", bound=Message)


class WatchedEvents(Protocol):
    """What is used of :class:`~meshfusion.dpu.telemetry.event_log.EventLog`."""

    def events(
        self,
        after_sequence: int,
        *,
        follow: bool,
        is_wanted: Callable[[], bool],
        cut_off: Callable[[], object],
    ) -> Iterator[Event]: ...


def observe_handler(events: WatchedEvents | None, traces: TraceSource | None, guard: Guard) -> grpc.GenericRpcHandler:
    """Ready to be added to a server, which says of what is None that it does not know it. A stream that is followed
    holds one of the server's threads; the log bounds how many there are."""
    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {}
    if events is not None:
        handlers["Events"] = grpc.unary_stream_rpc_method_handler(_events_handler(events, guard))
    if traces is not None:
        handlers["Trace"] = grpc.unary_unary_rpc_method_handler(_trace_handler(traces, guard))
    return grpc.method_handlers_generic_handler(OBSERVE_NAME, handlers)


def _events_handler(events: WatchedEvents, guard: Guard) -> Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]:
    def answer(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        guard.admit("Observe.Events", context)
        request = _parsed(pb.EventsRequest, raw, "Events")
        found = events.events(
            request.after_sequence, follow=request.follow, is_wanted=context.is_active, cut_off=context.cancel
        )
        for event in found:
            yield event_to_pb(event).SerializeToString()

    def handle(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from answer(raw, context)
        except MeshFusionError as e:
            _refuse("Events", e, context)

    return handle


def _trace_handler(traces: TraceSource, guard: Guard) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def handle(raw: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            guard.admit("Observe.Trace", context)
            request = _parsed(pb.TraceRequest, raw, "Trace")
            wanted = check_text("request_id", request.request_id)
            return trace_to_pb(traces.trace(wanted)).SerializeToString()
        except MeshFusionError as e:
            _refuse("Trace", e, context)

    return handle


def _parsed(kind: type[M], raw: bytes, call: str) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError as e:
        raise malformed(f"the request of {call}", f"cannot be parsed ({e})") from e


def _refuse(call: str, error: MeshFusionError, context: grpc.ServicerContext) -> NoReturn:
    log.debug("%s refused: %s", call, error.message)
    code, details, metadata = encode_error(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, details)
    raise AssertionError("abort raises")
