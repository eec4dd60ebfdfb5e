"""Calls of one gRPC service of ours in another process: deadlines, errors, and a channel that reconnects."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshfusion.dpu.api.address import parse_address
from meshfusion.dpu.api.error_codec import decode_error
from meshfusion.dpu.api.limits import MAX_MESSAGE_BYTES, malformed
from meshfusion.dpu.api.request_ids import METADATA_KEY, request_id_of
from meshfusion.dpu.api.security.client_security import ClientCredentials, ClientSecurity
from meshfusion.dpu.api.tracing import current_trace
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import ConfigError, ServiceUnavailableError

Q = TypeVar("Q")
R = TypeVar("R")
Metadata = tuple[tuple[str, str], ...]

_LOOK_EVERY_S = 1.0  # how often the files of TLS are looked at

_OPTIONS: list[tuple[str, object]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A restarted service is found within a second; until then calls fail at once instead of waiting.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The service is on this machine or near it: a proxy from the environment would only lose the calls.
    ("grpc.enable_http_proxy", 0),
    # Own connection per client: one client's failed attempts do not delay another's first call.
    ("grpc.use_local_subchannel_pool", 1),
]


class _Connection:
    """A channel, and how many calls are on it: one that newer files replace ends with the last of them."""

    def __init__(self, channel: grpc.Channel, service: str, version: int) -> None:
        self.version = version
        self.stubs = _stubs(channel, service)
        self.call_count = 0
        self.is_retired = False
        self.channel = channel


class GrpcCaller:
    """``service``: its name in the proto file. ``security``: with which files; read at the first call, and again within
    a second of a change, from when on calls go over a new connection.

    Safe for use by several threads. Nothing is opened before the first call, so an engine that forks early is not
    disturbed. Raises :class:`~meshfusion.jbof.errors.ConfigError` of an address that is none or needs other files; and
    the first call does, when the files are bad.
    """

    def __init__(self, address: str, service: str, security: ClientSecurity | None = None) -> None:
        parsed = parse_address(address)
        self.address = str(parsed)
        self._service = service
        self._target = parsed.grpc_target
        self._security = security or ClientSecurity()
        problem = self._security.problem(parsed)
        if problem is not None:
            label = self._security.label(problem.field)
            raise ConfigError(f"{label}: {problem.problem}", next_step=f"{problem.fix[0].upper()}{problem.fix[1:]}.")
        self._lock = threading.Lock()
        self._credentials: ClientCredentials | None = None
        self._connection: _Connection | None = None
        self._retired: set[_Connection] = set()
        self._looked_s = 0.0
        self._closed = False

    def close(self) -> None:
        """Cancel running calls; every later call fails."""
        with self._lock:
            self._closed = True
            connections = {*self._retired, *(() if self._connection is None else (self._connection,))}
            self._connection, self._retired = None, set()
        for connection in connections:
            connection.channel.close()

    def call(
        self, name: str, request: Q, encode: Callable[[Q], Message], decode: Callable[[Any], R], deadline_s: float
    ) -> R:
        try:
            message = encode(request)
        except (ValueError, TypeError) as e:
            raise malformed(f"the request of {name}", f"cannot be encoded ({e})") from e
        connection, metadata = self._enter()
        try:
            stub = connection.stubs[name]
            reply = stub(
                message, timeout=max(deadline_s, 0.0), wait_for_ready=False, metadata=_with_id(metadata, request)
            )
        except grpc.RpcError as e:
            is_tls = self._security.ca is not None
            raise decode_error(e, address=self.address, call=name, deadline_s=deadline_s, is_tls=is_tls) from e
        except ValueError as e:
            # gRPC's way of saying that the channel was closed between the lines above.
            raise self._closed_error() from e
        finally:
            self._leave(connection)
        return decode(reply)

    def stream(self, name: str, request: Q, encode: Callable[[Q], Message], decode: Callable[[Any], R]) -> Iterator[R]:
        """Answers as they come, without a deadline: until the service ends the stream, or the iterator is closed."""
        connection, metadata = self._enter()
        try:
            replies = connection.stubs[name](encode(request), metadata=_with_id(metadata, request))
            try:
                for reply in replies:
                    yield decode(reply)
            finally:
                replies.cancel()
        except grpc.RpcError as e:
            is_tls = self._security.ca is not None
            raise decode_error(e, address=self.address, call=name, deadline_s=math.inf, is_tls=is_tls) from e
        except ValueError as e:
            raise self._closed_error() from e
        finally:
            self._leave(connection)

    def _enter(self) -> tuple[_Connection, Metadata | None]:
        """A connection that stays open until :meth:`_leave`, and what goes with the call."""
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._credentials is None:
                self._credentials = ClientCredentials(self._security)
            if self._connection is None or self._is_outdated(self._connection, self._credentials):
                self._connect(self._credentials)
            assert self._connection is not None
            metadata = self._credentials.metadata()
            self._connection.call_count += 1
            return self._connection, metadata

    def _is_outdated(self, connection: _Connection, credentials: ClientCredentials) -> bool:
        now_s = time.monotonic()
        if self._security.ca is None or now_s - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        return credentials.version() != connection.version

    def _connect(self, credentials: ClientCredentials) -> None:
        version = credentials.version()  # before the files are used: at worst they are used once more
        connection = _Connection(credentials.channel(self._target, [*_OPTIONS]), self._service, version)
        former, self._connection = self._connection, connection
        if former is not None:
            former.is_retired = True
            self._retired.add(former)
            self._end_if_unused(former)

    def _leave(self, connection: _Connection) -> None:
        with self._lock:
            connection.call_count -= 1
            self._end_if_unused(connection)

    def _end_if_unused(self, connection: _Connection) -> None:
        if connection.is_retired and not connection.call_count and connection in self._retired:
            self._retired.discard(connection)
            connection.channel.close()

    def _closed_error(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(
            f"this client of the chunk service at {self.address} is closed", next_step="Open a new client."
        )


def _with_id(metadata: Metadata | None, request: object) -> Metadata:
    """What goes with every call of a connection, what this one is called in logs, and which trace it belongs to."""
    return (*(metadata or ()), (METADATA_KEY, request_id_of(request)), *current_trace.get())


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
