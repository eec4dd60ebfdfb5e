"""A :class:`~meshfusion.dpu.api.types.ChunkService` that lives in another process, reached over gRPC."""

from __future__ import annotations

from typing import Any

from meshfusion.dpu.api import codec, codec_match, codec_status, codec_writes
from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.caller import GrpcCaller
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


class GrpcChunkService:
    """The service at ``address`` (``unix:///path`` or ``host:port``), called with the files that ``security`` names.
    Safe for use by several threads.

    Nothing is opened before the first call, so an engine that forks early is not disturbed. Every call keeps
    its deadline on the wall clock, whether the service is slow, stuck or gone, and raises the errors that
    the Protocol names. The client reconnects by itself; a restarted service answers
    :class:`~meshfusion.jbof.errors.StaleHolderError` until the holder attaches again.

    ``pool``: which one status and listings are of, where the service has several.
    """

    def __init__(self, address: str, security: ClientSecurity | None = None, *, pool: str = "") -> None:
        self._pool = pool
        self._caller = GrpcCaller(address, "ChunkService", security)
        self.address = self._caller.address

    def attach(self, request: t.AttachRequest, *, deadline_s: float) -> t.Attachment:
        return self._caller.call("Attach", request, codec.attach_request_to_pb, codec.attachment_from_pb, deadline_s)

    def match(self, request: t.MatchRequest, *, deadline_s: float) -> t.MatchReply:
        encode, decode = (codec_match.match_request_to_pb, codec_match.match_reply_from_pb)
        return self._caller.call("Match", request, encode, decode, deadline_s)

    def release(self, request: t.ReleaseRequest, *, deadline_s: float) -> None:
        self._caller.call("Release", request, codec.release_request_to_pb, _nothing, deadline_s)

    def reserve(self, request: t.ReserveRequest, *, deadline_s: float) -> t.ReserveReply:
        encode, decode = (codec_writes.reserve_request_to_pb, codec_writes.reserve_reply_from_pb)
        return self._caller.call("Reserve", request, encode, decode, deadline_s)

    def commit(self, request: t.CommitRequest, *, deadline_s: float) -> t.CommitReply:
        encode, decode = (codec_writes.commit_request_to_pb, codec_writes.commit_reply_from_pb)
        return self._caller.call("Commit", request, encode, decode, deadline_s)

    def abort(self, request: t.AbortRequest, *, deadline_s: float) -> None:
        self._caller.call("Abort", request, codec_writes.abort_request_to_pb, _nothing, deadline_s)

    def heartbeat(self, request: t.HeartbeatRequest, *, deadline_s: float) -> t.HeartbeatReply:
        encode, decode = codec.heartbeat_request_to_pb, codec.heartbeat_reply_from_pb
        return self._caller.call("Heartbeat", request, encode, decode, deadline_s)

    def drop(self, request: t.DropRequest, *, deadline_s: float) -> bool:
        return self._caller.call("Drop", request, codec.drop_request_to_pb, lambda m: bool(m.dropped), deadline_s)

    def detach(self, request: t.DetachRequest, *, deadline_s: float) -> None:
        self._caller.call("Detach", request, lambda r: pb.DetachRequest(holder_id=r.holder_id), _nothing, deadline_s)

    def status(self, *, deadline_s: float) -> t.PoolStatus:
        def encode(_: None) -> pb.StatusRequest:
            return pb.StatusRequest(pool=self._pool)

        return self._caller.call("Status", None, encode, codec_status.pool_status_from_pb, deadline_s)

    def list_chunks(self, request: t.ListRequest, *, deadline_s: float) -> t.ListReply:
        def encode(r: t.ListRequest) -> pb.ListRequest:
            message = codec.list_request_to_pb(r)
            message.pool = self._pool
            return message

        return self._caller.call("ListChunks", request, encode, codec.list_reply_from_pb, deadline_s)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> t.ChunkRecord | None:
        def encode(k: bytes) -> pb.GetChunkRequest:
            return pb.GetChunkRequest(key=k, pool=self._pool)

        return self._caller.call("GetChunk", key, encode, _optional_chunk, deadline_s)

    def close(self) -> None:
        """Cancel running calls; every later call fails. Leases are not given back: detach first."""
        self._caller.close()


def _nothing(reply: Any) -> None:
    return None


def _optional_chunk(reply: pb.GetChunkReply) -> t.ChunkRecord | None:
    return codec.chunk_from_pb(reply.chunk) if reply.HasField("chunk") else None
