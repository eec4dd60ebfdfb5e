"""Index values: round trips, and a damaged value is never read as another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api.types import Access, ChunkRecord, Extent, Shard
from meshfusion.dpu.store.effects import HolderRecord
from meshfusion.dpu.store.records import (
    decode_chunk,
    decode_holder,
    decode_segment,
    encode_chunk,
    encode_holder,
    encode_segment,
)
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.segments import SegmentRecord

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
hash32 = st.binary(min_size=32, max_size=32)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
extents = st.builds(Extent, u32, u32, u64, u32, u64)
digests = st.lists(st.binary(min_size=8, max_size=8), max_size=5).map(tuple)
shards = st.builds(Shard, u32, extents, u32, u32, u32, digests)
chunks = st.builds(ChunkRecord, hash32, hash32, texts, u32, u64, u32, st.lists(shards, max_size=3).map(tuple))
segments = st.builds(SegmentRecord, u32, u64, u64)
holders = st.builds(HolderRecord, texts, texts, texts, texts, u64, hash32, st.booleans(), st.just(Access.LOCAL))
exported = st.builds(
    HolderRecord, texts, texts, texts, texts, u64, hash32, st.booleans(), st.just(Access.NVMEOF), texts
)
values = st.one_of(
    st.tuples(chunks.map(encode_chunk), st.just(decode_chunk)),
    st.tuples(segments.map(encode_segment), st.just(decode_segment)),
    st.tuples((holders | exported).map(encode_holder), st.just(decode_holder)),
)


@given(chunks)
def test_chunks_round_trip(record: ChunkRecord) -> None:
    assert decode_chunk(encode_chunk(record)) == record


@given(segments)
def test_segments_round_trip(record: SegmentRecord) -> None:
    assert decode_segment(encode_segment(record)) == record


@given(holders | exported)
def test_holders_round_trip(record: HolderRecord) -> None:
    assert decode_holder(encode_holder(record)) == record


@given(values, st.data())
def test_a_flipped_byte_is_seen(value: tuple[bytes, Callable[[bytes], object]], data: st.DataObject) -> None:
    raw, decode = value
    at = data.draw(st.integers(0, len(raw) - 1))
    flipped = raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
    with pytest.raises(FormatError, match="damaged"):
        decode(flipped)


@given(values, st.data())
def test_a_cut_value_is_seen(value: tuple[bytes, Callable[[bytes], object]], data: st.DataObject) -> None:
    raw, decode = value
    with pytest.raises(FormatError):
        decode(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(exported)
def test_what_a_target_lets_in_is_no_holder_to_services_of_before(record: HolderRecord) -> None:
    """They read any flag as *fenced*, and would free its space; they refuse a record without just four texts."""
    texts_of_it = encode_holder(record)[32 + 8 + 1 : -4].decode().split("\0")
    assert texts_of_it == [record.holder_id, record.engine_kind, record.engine_version, record.host, record.exported_as]


@given(st.binary(max_size=300), st.sampled_from((decode_chunk, decode_segment, decode_holder)))
def test_any_bytes_are_refused(raw: bytes, decode: Callable[[bytes], object]) -> None:
    with pytest.raises(FormatError):
        decode(raw)


def test_a_value_of_another_kind_is_refused() -> None:
    segment = encode_segment(SegmentRecord(1, 2, 3))
    for decode in (decode_chunk, decode_holder):
        with pytest.raises(FormatError):
            decode(segment)
