"""Between wire messages and value types: lookups over KV groups. Pure functions."""

from __future__ import annotations

from itertools import accumulate
from operator import sub

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.codec import check_chunk, chunk_from_pb, chunk_to_pb
from meshfusion.dpu.api.limits import (
    MAX_KEYS_PER_MATCH,
    MAX_UINT32,
    check_count,
    check_group_counts,
    check_groups,
    check_id,
    check_int,
    check_text,
    malformed,
)
from meshfusion.dpu.api.packed_chunk import PackedChunkError, PackedChunks, unpack_chunk
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


def match_request_to_pb(r: t.MatchRequest) -> pb.MatchRequest:
    return pb.MatchRequest(
        holder_id=r.holder_id,
        request_id=r.request_id,
        chunk_tokens=r.chunk_tokens,
        groups=[pb.GroupKeys(group=g.group, keys=g.keys, first_needed_steps=_steps(g.first_needed)) for g in r.groups],
        takes_packed=True,
    )


def match_request_from_pb(m: pb.MatchRequest) -> t.MatchRequest:
    check_group_counts([len(group.keys) for group in m.groups])
    groups = tuple(t.GroupKeys(g.group, tuple(g.keys), _first_needed(g)) for g in m.groups)
    check_groups(groups)
    return t.MatchRequest(
        holder_id=check_id("holder_id", m.holder_id),
        # The engine's, and through it its user's: not ours to keep short.
        request_id=check_text("request_id", m.request_id),
        chunk_tokens=check_int("chunk_tokens", m.chunk_tokens, 1, MAX_UINT32),
        groups=groups,
    )


def match_reply_to_pb(r: t.MatchReply, *, packed: bool) -> pb.MatchReply:
    """``packed``: does the caller read packed chunks? Clients of earlier versions do not."""
    if packed and isinstance(r.chunks, PackedChunks):
        return pb.MatchReply(lease_id=r.lease_id, chunk_count=r.chunk_count, packed_chunks=r.chunks.values)
    return pb.MatchReply(lease_id=r.lease_id, chunk_count=r.chunk_count, chunks=map(chunk_to_pb, r.chunks))


def match_reply_from_pb(m: pb.MatchReply) -> t.MatchReply:
    """Of services of earlier versions, too, which know of no packed chunks."""
    count = len(m.chunks) + len(m.packed_chunks)
    check_count("chunks", range(count), MAX_KEYS_PER_MATCH)
    check_int("chunk_count", m.chunk_count, 0, MAX_KEYS_PER_MATCH)
    if bool(m.chunk_count) != bool(count):
        raise malformed("chunk_count", f"is {m.chunk_count} with {count} chunks; one without the other is none")
    if m.chunks and m.packed_chunks:
        raise malformed("packed_chunks", "come with others, which say the same")
    return t.MatchReply(
        lease_id=check_id("lease_id", m.lease_id, allow_empty=not count),
        chunk_count=m.chunk_count,
        chunks=tuple(map(_unpacked, m.packed_chunks)) if m.packed_chunks else tuple(map(chunk_from_pb, m.chunks)),
    )


def _unpacked(value: bytes) -> t.ChunkRecord:
    try:
        return check_chunk(unpack_chunk(value))
    except PackedChunkError as error:
        raise malformed("packed_chunks", f"has one that is damaged: {error}") from error


def _steps(first_needed: tuple[int, ...]) -> list[int]:
    """A byte each, however far on; nothing at all for a group that always needs everything."""
    if not any(first_needed):
        return []
    return [first_needed[0], *map(sub, first_needed[1:], first_needed)]


def _first_needed(m: pb.GroupKeys) -> tuple[int, ...]:
    steps = m.first_needed_steps
    if not steps:
        return (0,) * len(m.keys)
    check_count("group.first_needed_steps", steps, len(m.keys))
    return tuple(accumulate(steps))
