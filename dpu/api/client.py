"""A :class:`~meshfusion.dpu.api.types.ChunkService` that lives in another process, reached over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshfusion.dpu.api import codec, codec_match, codec_status, codec_writes
from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.address import parse_address
from meshfusion.dpu.api.error_codec import decode_error
from meshfusion.dpu.api.limits import MAX_MESSAGE_BYTES, malformed
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


class GrpcChunkService:
    """The service at ``address`` (``unix:///path`` or ``host:port``). Safe for use by several threads.

    Nothing is opened before the first call, so an engine that forks early is not disturbed. Every call keeps
    its deadline on the wall clock, whether the service is slow, stuck or gone, and raises the errors that
    the Protocol names. The client reconnects by itself; a restarted service answers
    :class:`~meshfusion.jbof.errors.StaleHolderError` until the holder attaches again.
    """

    def __init__(self, address: str) -> None:
        parsed = parse_address(address)
        self.address = str(parsed)
        self._target = parsed.grpc_target
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stubs: dict[str, Callable[..., Any]] | None = None
        self._closed = False

    def attach(self, request: t.AttachRequest, *, deadline_s: float) -> t.Attachment:
        return self._call("Attach", request, codec.attach_request_to_pb, codec.attachment_from_pb, deadline_s)

    def match(self, request: t.MatchRequest, *, deadline_s: float) -> t.MatchReply:
        encode, decode = (codec_match.match_request_to_pb, codec_match.match_reply_from_pb)
        return self._call("Match", request, encode, decode, deadline_s)

    def release(self, request: t.ReleaseRequest, *, deadline_s: float) -> None:
        self._call("Release", request, codec.release_request_to_pb, _nothing, deadline_s)

    def reserve(self, request: t.ReserveRequest, *, deadline_s: float) -> t.ReserveReply:
        encode, decode = (codec_writes.reserve_request_to_pb, codec_writes.reserve_reply_from_pb)
        return self._call("Reserve", request, encode, decode, deadline_s)

    def commit(self, request: t.CommitRequest, *, deadline_s: float) -> t.CommitReply:
        encode, decode = (codec_writes.commit_request_to_pb, codec_writes.commit_reply_from_pb)
        return self._call("Commit", request, encode, decode, deadline_s)

    def abort(self, request: t.AbortRequest, *, deadline_s: float) -> None:
        self._call("Abort", request, codec_writes.abort_request_to_pb, _nothing, deadline_s)

    def heartbeat(self, request: t.HeartbeatRequest, *, deadline_s: float) -> t.HeartbeatReply:
        encode, decode = codec.heartbeat_request_to_pb, codec.heartbeat_reply_from_pb
        return self._call("Heartbeat", request, encode, decode, deadline_s)

    def drop(self, request: t.DropRequest, *, deadline_s: float) -> bool:
        return self._call("Drop", request, codec.drop_request_to_pb, lambda m: bool(m.dropped), deadline_s)

    def detach(self, request: t.DetachRequest, *, deadline_s: float) -> None:
        self._call("Detach", request, lambda r: pb.DetachRequest(holder_id=r.holder_id), _nothing, deadline_s)

    def status(self, *, deadline_s: float) -> t.PoolStatus:
        return self._call("Status", None, lambda _: pb.StatusRequest(), codec_status.pool_status_from_pb, deadline_s)

    def list_chunks(self, request: t.ListRequest, *, deadline_s: float) -> t.ListReply:
        return self._call("ListChunks", request, codec.list_request_to_pb, codec.list_reply_from_pb, deadline_s)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> t.ChunkRecord | None:
        return self._call("GetChunk", key, lambda k: pb.GetChunkRequest(key=k), _optional_chunk, deadline_s)

    def close(self) -> None:
        """Cancel running calls; every later call fails. Leases are not given back: detach first."""
        with self._lock:
            self._closed = True
            channel, self._channel, self._stubs = self._channel, None, None
        if channel is not None:
            channel.close()

    def _call(
        self, name: str, request: Q, encode: Callable[[Q], Message], decode: Callable[[Any], R], deadline_s: float
    ) -> R:
        try:
            message = encode(request)
        except (ValueError, TypeError) as e:
            raise malformed(f"the request of {name}", f"cannot be encoded ({e})") from e
        stubs = self._stubs or self._connect()
        try:
            reply = stubs[name](message, timeout=max(deadline_s, 0.0), wait_for_ready=False)
        except grpc.RpcError as e:
            raise decode_error(e, address=self.address, call=name, deadline_s=deadline_s) from e
        except ValueError as e:
            # gRPC's way of saying that the channel was closed between the lines above.
            raise self._closed_error() from e
        return decode(reply)

    def _connect(self) -> dict[str, Callable[..., Any]]:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._stubs is None:
                self._channel = grpc.insecure_channel(self._target, options=_OPTIONS)
                self._stubs = _stubs(self._channel)
            return self._stubs

    def _closed_error(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(
            f"this client of the chunk service at {self.address} is closed", next_step="Open a new client."
        )


def _stubs(channel: grpc.Channel) -> dict[str, Callable[..., Any]]:
    service = pb.DESCRIPTOR.services_by_name["ChunkService"]
    return {
        m.name: channel.unary_unary(
            f"/{service.full_name}/{m.name}",
            request_serializer=GetMessageClass(m.input_type).SerializeToString,
            response_deserializer=GetMessageClass(m.output_type).FromString,
        )
        for m in service.methods
    }


def _nothing(reply: Any) -> None:
    return None


def _optional_chunk(reply: pb.GetChunkReply) -> t.ChunkRecord | None:
    return codec.chunk_from_pb(reply.chunk) if reply.HasField("chunk") else None
