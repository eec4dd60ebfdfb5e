"""Serves an :class:`~meshfusion.dpu.api.event_types.EventSource` over gRPC, beside the chunk service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from meshfusion.dpu.api.codec_events import event_to_pb
from meshfusion.dpu.api.error_codec import encode_error
from meshfusion.dpu.api.event_types import Event
from meshfusion.dpu.api.limits import malformed
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import MeshFusionError

log = logging.getLogger(__name__)

OBSERVE_NAME = "meshfusion.v1.Observe"


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


def observe_handler(events: WatchedEvents, guard: Guard) -> grpc.GenericRpcHandler:
    """Ready to be added to a server. A stream that is followed holds one of the server's threads; the log bounds how
    many there are."""

    def answer(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        guard.admit("Observe.Events", context)
        try:
            request = pb.EventsRequest.FromString(raw)
        except DecodeError as e:
            raise malformed("the request of Events", f"cannot be parsed ({e})") from e
        found = events.events(
            request.after_sequence, follow=request.follow, is_wanted=context.is_active, cut_off=context.cancel
        )
        for event in found:
            yield event_to_pb(event).SerializeToString()

    def handle(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from answer(raw, context)
        except MeshFusionError as e:
            log.debug("Events refused: %s", e.message)
            code, details, metadata = encode_error(e)
            context.set_trailing_metadata(metadata)
            context.abort(code, details)

    return grpc.method_handlers_generic_handler(OBSERVE_NAME, {"Events": grpc.unary_stream_rpc_method_handler(handle)})
