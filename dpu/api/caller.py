"""Calls of one gRPC service of ours in another process: deadlines, errors, and a channel that reconnects."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshfusion.dpu.api.address import parse_address
from meshfusion.dpu.api.error_codec import decode_error
from meshfusion.dpu.api.limits import MAX_MESSAGE_BYTES, malformed
from meshfusion.dpu.api.request_ids import METADATA_KEY, request_id_of
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import ServiceUnavailableError

Q = TypeVar("Q")
R = TypeVar("R")

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A restarted service is found within a second; until then calls fail at once instead of waiting.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The service is on this machine: a proxy from the environment would only lose the calls.
    ("grpc.enable_http_proxy", 0),
    # Own connection per client: one client's failed attempts do not delay another's first call.
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcCaller:
    """``service``: its name in the proto file. Safe for use by several threads. Nothing is opened before the first
    call, so an engine that forks early is not disturbed."""

    def __init__(self, address: str, service: str) -> None:
        parsed = parse_address(address)
        self.address = str(parsed)
        self._service = service
        self._target = parsed.grpc_target
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stubs: dict[str, Callable[..., Any]] | None = None
        self._closed = False

    def close(self) -> None:
        """Cancel running calls; every later call fails."""
        with self._lock:
            self._closed = True
            channel, self._channel, self._stubs = self._channel, None, None
        if channel is not None:
            channel.close()

    def call(
        self, name: str, request: Q, encode: Callable[[Q], Message], decode: Callable[[Any], R], deadline_s: float
    ) -> R:
        try:
            message = encode(request)
        except (ValueError, TypeError) as e:
            raise malformed(f"the request of {name}", f"cannot be encoded ({e})") from e
        stubs = self._stubs or self._connect()
        metadata = ((METADATA_KEY, request_id_of(request)),)
        try:
            reply = stubs[name](message, timeout=max(deadline_s, 0.0), wait_for_ready=False, metadata=metadata)
        except grpc.RpcError as e:
            raise decode_error(e, address=self.address, call=name, deadline_s=deadline_s) from e
        except ValueError as e:
            # gRPC's way of saying that the channel was closed between the lines above.
            raise self._closed_error() from e
        return decode(reply)

    def stream(self, name: str, request: Q, encode: Callable[[Q], Message], decode: Callable[[Any], R]) -> Iterator[R]:
        """Answers as they come, without a deadline: until the service ends the stream, or the iterator is closed."""
        stubs = self._stubs or self._connect()
        try:
            replies = stubs[name](encode(request), metadata=((METADATA_KEY, request_id_of(request)),))
        except ValueError as e:
            raise self._closed_error() from e
        try:
            for reply in replies:
                yield decode(reply)
        except grpc.RpcError as e:
            raise decode_error(e, address=self.address, call=name, deadline_s=math.inf) from e
        finally:
            replies.cancel()

    def _connect(self) -> dict[str, Callable[..., Any]]:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._stubs is None:
                self._channel = grpc.insecure_channel(self._target, options=_OPTIONS)
                self._stubs = _stubs(self._channel, self._service)
            return self._stubs

    def _closed_error(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(
            f"this client of the chunk service at {self.address} is closed", next_step="Open a new client."
        )


def _stubs(channel: grpc.Channel, name: str) -> dict[str, Callable[..., Any]]:
    service = pb.DESCRIPTOR.services_by_name[name]
    return {
        m.name: (channel.unary_stream if m.server_streaming else channel.unary_unary)(
            f"/{service.full_name}/{m.name}",
            request_serializer=GetMessageClass(m.input_type).SerializeToString,
            response_deserializer=GetMessageClass(m.output_type).FromString,
        )
        for m in service.methods
    }
