"""Lookups over what is stored, all chunks at once, against the search that takes each of them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.packed_chunk import PackedChunks, pack_chunk, unpack_chunk
from meshfusion.dpu.store.store import Store
from meshfusion.dpu.store.stored_chunks import StoredChunks, Wanted
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord, SegmentTable
from tests.dpu.store.driver import IDENTITY, OPTIONS, key

TOKENS = 16
SEGMENTS = 8
GEOMETRY = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=64, segment_count=SEGMENTS)


def record(
    i: int, group: int = 0, *, segments: tuple[int, ...] = (0,), units: int = 4, **changes: object
) -> api.ChunkRecord:
    shards = tuple(
        api.Shard(rank, api.Extent(1, segment, 300 + i, 5, 1), 1, 1, 4096, (bytes([i]) * 8,) * units)
        for rank, segment in enumerate(segments)
    )
    plain = api.ChunkRecord(key(i, group), IDENTITY, "default", group, TOKENS * i, TOKENS, shards)
    return replace(plain, **changes)  # type: ignore[arg-type]


def other(chunk: api.ChunkRecord, what: str) -> api.ChunkRecord:
    """The same but for one thing, for which it must not be served, or which a lookup does not mind."""
    shard = chunk.shards[0]
    match what:
        case "identity":
            return replace(chunk, identity=b"?" * 32)
        case "tenant":
            return replace(chunk, tenant="another")
        case "as long a tenant":
            return replace(chunk, tenant="DEFAULT")
        case "group":
            return replace(chunk, group=chunk.group + 7)
        case "position":
            return replace(chunk, position_tokens=chunk.position_tokens + TOKENS)
        case "token count":
            return replace(chunk, token_count=TOKENS + 1)
        case "generation":
            extent = replace(shard.extent, generation=2)
        case "segment":
            extent = replace(shard.extent, segment=SEGMENTS)  # no such segment
        case "no shard":
            return replace(chunk, shards=())
        case "units":  # servable: made in another way
            return replace(chunk, shards=(replace(shard, unit_digests=(b"a digest",) * 9), *chunk.shards[1:]))
        case "rank":  # the same
            return replace(chunk, shards=(replace(shard, rank=9), *chunk.shards[1:]))
        case _:
            return chunk
    return replace(chunk, shards=(replace(shard, extent=extent), *chunk.shards[1:]))


WHATS = (
    *("identity", "tenant", "as long a tenant", "group", "position", "token count", "generation", "segment"),
    *("no shard", "units", "rank"),
)


def stored_chunks(chunks: list[api.ChunkRecord]) -> StoredChunks:
    return StoredChunks.of({chunk.key: chunk for chunk in chunks})


def make_store() -> tuple[Store, str]:
    table = SegmentTable(GEOMETRY, [SegmentRecord(i, 1, i + 1) for i in range(SEGMENTS)])
    store = Store(table, OPTIONS, epoch=1, now_s=0.0)
    step = store.attach(0.0, api.AttachRequest("one", "vllm", "1", "h", 1, IDENTITY, 1))
    store.durable(step.ticket)
    return store, step.reply


def matched(
    groups: tuple[api.GroupKeys, ...], found: Mapping[bytes, api.ChunkRecord], pinned: set[int]
) -> tuple[int, tuple[api.ChunkRecord, ...], list[tuple[int, ...]], dict[str, int]]:
    """Boundary, chunks, what the lease pins, and the counters."""
    store, holder_id = make_store()
    for segment in pinned:
        store.segments.pin_read(segment)
    reply = store.match(1.0, api.MatchRequest(holder_id, "r", TOKENS, groups), found)
    return reply.chunk_count, tuple(reply.chunks), [lease.segments for lease in store.leases], dict(store.counts)


@st.composite
def stores(draw: st.DrawFn) -> tuple[tuple[api.GroupKeys, ...], list[api.ChunkRecord]]:
    count = draw(st.integers(1, 7))
    groups, stored = [], []
    for group in range(draw(st.integers(1, 3))):
        window = draw(st.sampled_from((None, None, None, 2)))
        needs = tuple(0 if window is None else max(0, i - window + 1) for i in range(count))
        groups.append(api.GroupKeys(group, tuple(key(i, group) for i in range(count)), needs))
        ranks = draw(st.integers(1, 2))
        for i in range(count):
            places = st.integers(0, SEGMENTS - 1)
            chunk = record(i, group, segments=tuple(draw(places) for _ in range(ranks)))
            what = draw(st.sampled_from(("", "", "", "", "", "", "gone", *WHATS)))
            if what != "gone":
                stored.append(other(chunk, what))
    return tuple(groups), stored


@given(stored=stores(), pinned=st.sets(st.integers(0, SEGMENTS - 1), max_size=3))
def test_looking_at_all_at_once_finds_what_looking_at_each_does(
    stored: tuple[tuple[api.GroupKeys, ...], list[api.ChunkRecord]], pinned: set[int]
) -> None:
    groups, chunks = stored
    one_by_one = matched(groups, {chunk.key: chunk for chunk in chunks}, pinned)
    assert matched(groups, stored_chunks(chunks), pinned) == one_by_one


def test_of_several_groups_only_what_the_boundary_needs_is_pinned() -> None:
    first, second = ([record(i, group, segments=(3 * group + i,)) for i in range(3)] for group in (0, 1))
    groups = tuple(api.GroupKeys(group, tuple(key(i, group) for i in range(3)), (0,) * 3) for group in (0, 1))
    for chunks in ([*first, second[0]], [first[0], *second]):
        count, found, pinned, _ = matched(groups, stored_chunks(chunks), set())
        assert (count, found, pinned) == (1, (first[0], second[0]), [(0, 3)])


def sure(found: StoredChunks, count: int) -> list[tuple[int, ...]]:
    table = SegmentTable(GEOMETRY, [SegmentRecord(i, 1, i + 1) for i in range(SEGMENTS)])
    keys = [key(i) for i in range(count)]
    return found.sure_prefix(Wanted(keys, 0, IDENTITY, "default", TOKENS, table.is_readable))


def test_the_segments_of_all_shards_of_each_chunk() -> None:
    stored = stored_chunks([record(0, segments=(5, 2)), record(1, segments=(5, 3)), record(2, segments=(1, 1))])
    assert sure(stored, 3) == [(5, 2), (5, 3), (1, 1)]
    assert sure(stored, 5) == [(5, 2), (5, 3), (1, 1)]
    assert sure(StoredChunks({}), 2) == []


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("at", [0, 2])
def test_it_ends_before_one_that_is_another(what: str, at: int) -> None:
    chunks = [record(i) for i in range(4)]
    chunks[at] = other(chunks[at], what)
    is_first_of_its_kind = at == 0 and what in ("units", "rank")  # the others are not made like it
    assert len(sure(stored_chunks(chunks), 4)) == (1 if is_first_of_its_kind else at)


def test_a_key_under_which_another_chunk_is_stored_ends_it() -> None:
    values = {key(i): pack_chunk(record(i)) for i in range(3)}
    values[key(1)] = pack_chunk(record(1, key=key(2)))
    assert len(sure(StoredChunks(values), 3)) == 1


def test_a_bit_that_is_another_in_any_place_is_a_miss_of_that_chunk() -> None:
    intact = pack_chunk(record(1))
    for bit in range(8 * len(intact)):
        damaged = (int.from_bytes(intact, "big") ^ (1 << bit)).to_bytes(len(intact), "big")
        found = StoredChunks({key(0): pack_chunk(record(0)), key(1): damaged, key(2): pack_chunk(record(2))})
        assert len(sure(found, 3)) == 1
        assert key(1) not in found
        assert found.get(key(1)) is None


def test_what_is_cut_off_or_empty_is_a_miss() -> None:
    intact = pack_chunk(record(1))
    for damaged in (b"", intact[:3], intact[:-1], intact + b"\0"):
        found = StoredChunks({key(0): pack_chunk(record(0)), key(1): damaged})
        assert len(sure(found, 2)) == 1
        assert list(found) == [key(0)]
        assert len(found) == 1


def test_the_usual_lookup_is_passed_on_as_it_is_stored() -> None:
    """Nothing is taken apart on the way: that is what it is fast by."""
    store, holder_id = make_store()
    chunks = [record(i) for i in range(5)]
    asked = api.GroupKeys(0, tuple(key(i) for i in range(7)), (0,) * 7)
    reply = store.match(1.0, api.MatchRequest(holder_id, "r", TOKENS, (asked,)), stored_chunks(chunks))
    assert reply.chunk_count == 5
    assert isinstance(reply.chunks, PackedChunks)
    assert reply.chunks.values == tuple(map(pack_chunk, chunks))
    assert reply.chunks == tuple(map(unpack_chunk, reply.chunks.values)) == tuple(chunks)
