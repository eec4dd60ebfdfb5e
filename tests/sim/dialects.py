"""Engines of other versions: what they say as the wire carries it, and as this version reads it."""

from __future__ import annotations

import enum

from meshfusion.dpu.api import codec_match, codec_writes
from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

_FIELD_OF_LATER = b"\xfa\x3e\x05later"  # number 1007, length-delimited: nothing that this version knows


class Dialect(enum.Enum):
    """``EARLIER``: of this API's version, without the fields that may be left out. ``LATER``: with one that we do not
    know. ``OLD``: of the API before, which is refused (rule 6)."""

    OURS = "ours"
    EARLIER = "earlier"
    LATER = "later"
    OLD = "old"

    @property
    def api_version(self) -> int:
        return api.API_VERSION - 1 if self is Dialect.OLD else api.API_VERSION


def reserve_as_read(request: api.ReserveRequest, dialect: Dialect) -> api.ReserveRequest:
    if dialect is Dialect.OURS:
        return request
    message = codec_writes.reserve_request_to_pb(request)
    if dialect is not Dialect.LATER:
        message.ClearField("request_ids")
        for item in message.items:
            item.ClearField("request")
    later = _FIELD_OF_LATER if dialect is Dialect.LATER else b""
    return codec_writes.reserve_request_from_pb(pb.ReserveRequest.FromString(message.SerializeToString() + later))


def commit_as_read(request: api.CommitRequest, dialect: Dialect) -> api.CommitRequest:
    """Without bundles each item of an earlier engine is on its own."""
    if dialect is Dialect.OURS:
        return request
    message = codec_writes.commit_request_to_pb(request)
    if dialect is not Dialect.LATER:
        for item in message.items:
            item.ClearField("bundle")
    later = _FIELD_OF_LATER if dialect is Dialect.LATER else b""
    return codec_writes.commit_request_from_pb(pb.CommitRequest.FromString(message.SerializeToString() + later))


def match_as_read(request: api.MatchRequest, dialect: Dialect) -> api.MatchRequest:
    if dialect is Dialect.OURS:
        return request
    later = _FIELD_OF_LATER if dialect is Dialect.LATER else b""
    data = codec_match.match_request_to_pb(request).SerializeToString() + later
    return codec_match.match_request_from_pb(pb.MatchRequest.FromString(data))
