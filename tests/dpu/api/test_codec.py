"""Every value type survives the wire; every bound is kept on the way in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.dpu.api import codec, codec_match, codec_status, codec_writes, limits
from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.limits import MalformedMessageError
from meshfusion.dpu.api.packed_chunk import PackedChunks, pack_chunk
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from tests.dpu.api.fake_service import make_chunk, make_status

u32 = st.integers(0, 2**32 - 1)
u63 = st.integers(0, 2**63 - 1)
reached = st.none() | st.builds(t.Reached, u63, st.lists(st.integers(1, 2**32 - 1), max_size=9).map(tuple))
positive = st.integers(1, 2**63 - 1)
keys = st.binary(min_size=32, max_size=32)
# Any text a str can hold and UTF-8 can carry.
texts = st.text(st.characters(codec="utf-8"), max_size=50)
ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=limits.MAX_ID_CHARS)
seconds = st.floats(0, 1e9)
digests = st.lists(st.binary(min_size=8, max_size=8), max_size=6).map(tuple)


def tuples_of(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


extents = st.builds(t.Extent, u32, u32, u63, positive, u63)
shards = st.builds(t.Shard, u32, extents, u63, positive, positive, digests)
chunks = st.builds(t.ChunkRecord, keys, keys, ids, u32, u63, positive, tuples_of(shards))
shard_sizes = st.builds(t.ShardSize, u32, positive, st.integers(1, limits.MAX_UNITS_PER_SHARD))
reserve_items = st.builds(
    t.ReserveItem,
    *(keys, u32, u63, positive, tuples_of(shard_sizes)),
    copies=st.integers(1, 255),
    request_id=st.sampled_from(("", "r1", "r2")),
)
results = st.one_of(
    st.builds(t.ReserveResult, st.just(t.ReserveOutcome.GRANTED), ids, tuples_of(extents)),
    st.builds(t.ReserveResult, st.sampled_from(list(t.ReserveOutcome)[1:])),
)
match_replies = st.one_of(
    st.just(t.MatchReply("", 0, ())),
    st.builds(
        t.MatchReply,
        ids,
        st.integers(1, limits.MAX_KEYS_PER_MATCH),
        st.lists(chunks, min_size=1, max_size=3).map(tuple),
    ),
)
# What an index can hold.
u32_positive = st.integers(1, 2**32 - 1)
stored_extents = st.builds(t.Extent, u32, u32, u63, u32_positive, u63)
stored_shards = st.builds(t.Shard, u32, stored_extents, u32, u32_positive, u32_positive, digests)
stored_chunks = st.builds(t.ChunkRecord, keys, keys, ids, u32, u63, u32_positive, tuples_of(stored_shards))
packed_replies = st.builds(
    t.MatchReply,
    ids,
    st.integers(1, limits.MAX_KEYS_PER_MATCH),
    st.lists(stored_chunks, min_size=1, max_size=3).map(lambda found: PackedChunks(map(pack_chunk, found))),
)


@st.composite
def key_groups(draw: st.DrawFn) -> tuple[t.GroupKeys, ...]:
    """Up to four groups with the same number of chunks."""
    count = draw(st.integers(0, 8))
    groups = []
    for group in draw(st.lists(u32, max_size=4, unique=True)):
        first_needed: list[int] = []
        for i in range(count):
            first_needed.append(draw(st.integers(first_needed[-1] if first_needed else 0, i + 1)))
        is_whole = draw(st.booleans())
        needs = (0,) * count if is_whole else tuple(first_needed)
        names = tuple(draw(keys | st.just(b"") if need > i else keys) for i, need in enumerate(needs))
        groups.append(t.GroupKeys(group, names, needs))
    return tuple(groups)


accesses = st.sampled_from(list(t.Access))
portals = st.builds(t.Portal, ids, ids, st.integers(1, 65_535))
holders = st.builds(
    t.HolderStatus, ids, texts, texts, texts, u32, u63, u63, seconds, ids, accesses.map(lambda access: access.value)
)
statuses = st.builds(
    t.PoolStatus,
    pool_uuid=ids,
    path=texts,
    saves_stopped_reason=texts,
    exports_problem=texts,
    format_version=u32,
    lba_bytes=u32,
    holders=tuples_of(holders),
    counters=tuples_of(st.tuples(ids, u63)),
    **{n: u63 for n in codec_status._POOL_INTS if n not in {"format_version", "lba_bytes"}},
    **dict.fromkeys(codec_status._POOL_SECONDS, seconds),
)

Codec = tuple[Callable[[Any], Message], Callable[[Any], Any]]
CASES: dict[str, tuple[st.SearchStrategy[Any], Codec]] = {
    "extent": (extents, (codec.extent_to_pb, codec.extent_from_pb)),
    "chunk": (chunks, (codec.chunk_to_pb, codec.chunk_from_pb)),
    "attach": (
        st.builds(
            t.AttachRequest,
            ids,
            ids,
            texts,
            texts,
            u32,
            keys,
            st.integers(1, limits.MAX_SHARDS),
            ids,
            u32,
            texts,
            accesses,
        ),
        (codec.attach_request_to_pb, codec.attach_request_from_pb),
    ),
    "attachment": (
        st.builds(
            t.Attachment,
            ids,
            ids,
            u63,
            tuples_of(st.builds(t.Namespace, u32, texts, st.integers(1, 2**32 - 1), u63)),
            texts,
            seconds,
            seconds,
            seconds,
            st.none() | st.builds(t.Export, texts, texts, tuples_of(portals), texts),
        ),
        (codec.attachment_to_pb, codec.attachment_from_pb),
    ),
    "match": (
        st.builds(t.MatchRequest, ids, texts, st.integers(1, 2**32 - 1), key_groups()),
        (codec_match.match_request_to_pb, codec_match.match_request_from_pb),
    ),
    "match reply": (
        match_replies,
        (partial(codec_match.match_reply_to_pb, packed=False), codec_match.match_reply_from_pb),
    ),
    "match reply, packed": (
        packed_replies,
        (partial(codec_match.match_reply_to_pb, packed=True), codec_match.match_reply_from_pb),
    ),
    "release": (
        st.builds(t.ReleaseRequest, ids, tuples_of(ids)),
        (codec.release_request_to_pb, codec.release_request_from_pb),
    ),
    "reserve": (
        st.builds(t.ReserveRequest, ids, u63, tuples_of(reserve_items)),
        (codec_writes.reserve_request_to_pb, codec_writes.reserve_request_from_pb),
    ),
    "reserve reply": (
        st.builds(t.ReserveReply, tuples_of(results)),
        (codec_writes.reserve_reply_to_pb, codec_writes.reserve_reply_from_pb),
    ),
    "commit": (
        st.builds(t.CommitRequest, ids, u63, tuples_of(st.builds(t.CommitItem, ids, tuples_of(digests), u32))),
        (codec_writes.commit_request_to_pb, codec_writes.commit_request_from_pb),
    ),
    "commit reply": (
        st.builds(t.CommitReply, tuples_of(st.booleans())),
        (codec_writes.commit_reply_to_pb, codec_writes.commit_reply_from_pb),
    ),
    "abort": (
        st.builds(t.AbortRequest, ids, u63, tuples_of(ids), tuples_of(ids)),
        (codec_writes.abort_request_to_pb, codec_writes.abort_request_from_pb),
    ),
    "heartbeat": (
        st.builds(t.HeartbeatRequest, ids, u63, tuples_of(ids), reached),
        (codec.heartbeat_request_to_pb, codec.heartbeat_request_from_pb),
    ),
    "heartbeat reply": (
        st.builds(t.HeartbeatReply, tuples_of(ids)),
        (codec.heartbeat_reply_to_pb, codec.heartbeat_reply_from_pb),
    ),
    "drop": (
        st.builds(t.DropRequest, ids, keys, extents, texts),
        (codec.drop_request_to_pb, codec.drop_request_from_pb),
    ),
    "list": (
        st.builds(t.ListRequest, keys | st.just(b""), st.integers(1, limits.MAX_LIST_LIMIT), keys | st.just(b"")),
        (codec.list_request_to_pb, codec.list_request_from_pb),
    ),
    "list reply": (
        st.builds(t.ListReply, tuples_of(chunks), keys | st.just(b"")),
        (codec.list_reply_to_pb, codec.list_reply_from_pb),
    ),
    "status": (statuses, (codec_status.pool_status_to_pb, codec_status.pool_status_from_pb)),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_round_trip_over_the_wire(name: str, data: st.DataObject) -> None:
    strategy, (to_pb, from_pb) = CASES[name]
    value = data.draw(strategy)
    message = to_pb(value)
    assert from_pb(type(message).FromString(message.SerializeToString())) == value


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_garbage_is_refused_or_decodes_to_a_value_within_bounds(name: str, data: st.DataObject) -> None:
    """Whatever bytes arrive: a typed refusal, or a value that encodes again. Never another exception."""
    strategy, (to_pb, from_pb) = CASES[name]
    raw = bytearray(to_pb(data.draw(strategy)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = type(to_pb(data.draw(strategy))).FromString(bytes(raw))
    except DecodeError:  # protobuf's own refusal; the server turns it into INVALID_ARGUMENT
        return
    try:
        value = from_pb(message)
    except MalformedMessageError:
        return
    to_pb(value)


CHUNK = t.ChunkRecord(b"k" * 32, b"i" * 32, "default", 0, 0, 16, ())


def _packed(value: bytes) -> pb.MatchReply:
    return pb.MatchReply(lease_id="l", chunk_count=1, packed_chunks=[value])


def _match(*groups: pb.GroupKeys, **changes: Any) -> pb.MatchRequest:
    fields: dict[str, Any] = {"holder_id": "h", "chunk_tokens": 64, "groups": groups or [_group(0)], **changes}
    return pb.MatchRequest(**fields)


def _group(group: int, count: int = 1, steps: tuple[int, ...] = (), key: bytes = b"k" * 32) -> pb.GroupKeys:
    return pb.GroupKeys(group=group, keys=[key] * count, first_needed_steps=steps)


def _reserve(**changes: Any) -> pb.ReserveRequest:
    size = pb.ShardSize(rank=0, unit_bytes=4096, unit_count=1)
    item: dict[str, Any] = {"key": b"k" * 32, "token_count": 64, "shards": [size], "copies": 1, **changes}
    return pb.ReserveRequest(holder_id="h", epoch=1, items=[pb.ReserveItem(**item)])


@pytest.mark.parametrize(
    ("decode", "message", "field"),
    [
        (codec_match.match_request_from_pb, _match(_group(0), _group(1, key=b"k" * 31)), r"groups\[1\].keys"),
        (codec_match.match_request_from_pb, _match(_group(0, 32_768), _group(1, 32_769)), "groups"),
        (codec_match.match_request_from_pb, _match(*(_group(i) for i in range(65))), "groups"),
        (codec_match.match_request_from_pb, _match(_group(0, 2, (0, 0, 0))), "group.first_needed_steps"),
        (codec_match.match_request_from_pb, _match(holder_id="h" * 201), "holder_id"),
        (codec_match.match_request_from_pb, _match(holder_id=""), "holder_id"),
        (codec_match.match_request_from_pb, _match(chunk_tokens=0), "chunk_tokens"),
        (codec_match.match_reply_from_pb, pb.MatchReply(chunk_count=1), "chunk_count"),
        (codec_match.match_reply_from_pb, pb.MatchReply(chunk_count=65_537), "chunk_count"),
        (codec_match.match_reply_from_pb, pb.MatchReply(lease_id="l", chunks=[pb.ChunkRecord()]), "chunk_count"),
        (codec_match.match_reply_from_pb, _packed(b""), "packed_chunks"),
        (codec_match.match_reply_from_pb, _packed(pack_chunk(CHUNK)[:-1] + b"?"), "packed_chunks"),
        (codec_match.match_reply_from_pb, _packed(pack_chunk(replace(CHUNK, token_count=0))), "chunk.token_count"),
        (codec_match.match_reply_from_pb, _packed(pack_chunk(replace(CHUNK, tenant=""))), "chunk.tenant"),
        (
            codec_match.match_reply_from_pb,
            pb.MatchReply(
                lease_id="l", chunk_count=1, packed_chunks=[pack_chunk(CHUNK)], chunks=[codec.chunk_to_pb(CHUNK)]
            ),
            "packed_chunks",
        ),
        (codec_writes.reserve_request_from_pb, _reserve(key=b""), "item.key"),
        (codec_writes.reserve_request_from_pb, _reserve(position_tokens=2**63), "item.position_tokens"),
        (codec_writes.reserve_request_from_pb, _reserve(copies=0), "item.copies"),
        (
            codec_writes.reserve_request_from_pb,
            pb.ReserveRequest(holder_id="h", items=[pb.ReserveItem()] * 4_097),
            "items",
        ),
        (
            codec_writes.reserve_request_from_pb,
            _reserve(shards=[pb.ShardSize(unit_bytes=0, unit_count=1)]),
            "shard.unit_bytes",
        ),
        (
            codec_writes.reserve_reply_from_pb,
            pb.ReserveReply(results=[pb.ReserveResult(outcome="RESERVE_OUTCOME_UNSPECIFIED")]),
            "result.outcome",
        ),
        (
            codec_writes.reserve_reply_from_pb,
            pb.ReserveReply(results=[pb.ReserveResult(outcome="RESERVE_OUTCOME_GRANTED")]),
            "result.grant_id",
        ),
        (
            codec_writes.commit_request_from_pb,
            pb.CommitRequest(holder_id="h", items=[pb.CommitItem(grant_id="g", unit_digests=[b"1234567"])]),
            "unit_digests",
        ),
        (
            codec.attachment_from_pb,
            pb.Attachment(pool_uuid="p", holder_id="h", lease_ttl_s=float("nan")),
            "lease_ttl_s",
        ),
        (codec.list_request_from_pb, pb.ListRequest(limit=0), "limit"),
        (codec.list_request_from_pb, pb.ListRequest(limit=1, after_key=b"x"), "after_key"),
        (codec.chunk_from_pb, pb.ChunkRecord(key=b"k" * 32, identity=b"i"), "chunk.identity"),
    ],
)
def test_a_broken_bound_is_named(decode: Callable[[Any], Any], message: Message, field: str) -> None:
    with pytest.raises(MalformedMessageError, match=f"malformed message: {field} "):
        decode(message)


def _asked(first_needed: tuple[int, ...], *, group: int = 0, keys: int | None = None) -> t.GroupKeys:
    return t.GroupKeys(group, (b"k" * 32,) * (len(first_needed) if keys is None else keys), first_needed)


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ((_asked((0,)), _asked((0,), group=2), _asked((0,))), r"groups\[2\].group is 0 once more; each group may be "),
        (
            (_asked((0,)), _asked((0, 0), group=1)),
            r"groups\[1\].keys has 2 entries; it must have those of the first, 1",
        ),
        ((_asked((0, 0), keys=1),), r"groups\[0\].first_needed has 2 entries; it must have one for each key, 1"),
        ((_asked((1, 3)),), r"groups\[0\].first_needed\[1\] is 3; it must lie between 1 and 2"),
        ((_asked((1, 2, 1)),), r"groups\[0\].first_needed\[2\] is 1; it must lie between 2 and 3"),
        ((_asked((-1, 0)),), r"groups\[0\].first_needed\[0\] is -1; it must lie between 0 and 1"),
        (
            (t.GroupKeys(0, (b"k" * 32, b""), (0, 1)),),
            r"groups\[0\].first_needed\[1\] is 1; chunk 1 has no key, so it must be 2: nothing needs that chunk",
        ),
        ((_asked((0,), group=2**32),), r"groups\[0\].group is 4294967296; it must lie between 0 and 4294967295"),
    ],
)
def test_a_lookup_that_makes_no_sense_is_refused_by_field_value_and_bound(
    groups: tuple[t.GroupKeys, ...], problem: str
) -> None:
    with pytest.raises(MalformedMessageError, match=f"malformed message: {problem}"):
        limits.check_groups(groups)


@given(groups=key_groups())
def test_a_lookup_that_makes_sense_is_not_refused(groups: tuple[t.GroupKeys, ...]) -> None:
    limits.check_groups(groups)


def test_groups_are_packed() -> None:
    """1000 chunks: a key is 34 bytes with its tag and length, one of a chunk that is not stored 2, a need 1."""
    count = 1_000
    window = t.GroupKeys(1, (b"w" * 32,) * count, tuple(max(0, i - 7) for i in range(count)))
    nothing = t.GroupKeys(2, (b"",) * count, tuple(range(1, count + 1)))
    sizes = [
        len(codec_match.match_request_to_pb(t.MatchRequest("h", "r", 16, groups)).SerializeToString())
        for groups in ((), (window,), (nothing,))
    ]
    assert 35 * count <= sizes[1] - sizes[0] < 35 * count + 16
    assert 3 * count <= sizes[2] - sizes[0] < 3 * count + 16


def test_digests_are_packed_back_to_back() -> None:
    chunk = make_chunk(3, unit_count=2)
    message = codec.chunk_to_pb(chunk)
    assert message.shards[0].unit_digests == (3000).to_bytes(8, "little") + (3001).to_bytes(8, "little")


def test_every_plain_status_field_crosses() -> None:
    """Distinct values, so that a swapped field shows."""
    numbers: dict[str, Any] = {name: 100 + i for i, name in enumerate(codec_status._POOL_INTS)}
    status = dataclasses.replace(make_status(), **numbers)
    message = codec_status.pool_status_to_pb(status)
    assert {name: getattr(message, name) for name in numbers} == numbers
    assert codec_status.pool_status_from_pb(message) == status
