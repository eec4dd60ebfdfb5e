"""Chunk headers: round trips, hand-made bytes, and everything that can be wrong with bytes on a medium."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.envelope import FormatFault, MediumFormatError
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import (
    LBA_BYTES,
    ChunkHeader,
    decode_chunk_header,
    encode_chunk_header,
    header_lba_count,
    peek_unit_count,
    shard_lba_count,
    unit_lba_count,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
digests = st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=40).map(tuple)
tenants = st.text(max_size=48).filter(lambda text: len(text.encode(errors="replace")) <= 48 and _encodable(text))
headers = st.builds(
    ChunkHeader,
    pool_uuid=st.binary(min_size=16, max_size=16),
    identity=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=32, max_size=32),
    tenant=tenants,
    group=u32,
    rank=u32,
    shard_count=st.integers(1, 2**16 - 1),
    position_tokens=u64,
    token_count=u32,
    segment=u32,
    generation=u64,
    lba=u64,
    unit_bytes=st.integers(1, 2**32 - 1),
    unit_digests=digests,
    first_lba=u64,
    first_generation=u64,
)
HEADER = ChunkHeader(
    pool_uuid=bytes(range(16)),
    identity=b"i" * 32,
    key=b"k" * 32,
    tenant="default",
    group=1,
    rank=2,
    shard_count=9,
    position_tokens=3,
    token_count=4,
    segment=5,
    generation=6,
    lba=7,
    unit_bytes=8,
    unit_digests=(b"digest_0", b"digest_1"),
    first_lba=10,
    first_generation=11,
)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def resealed(data: bytes, body_bytes: int) -> bytes:
    """``data`` with the checksum made right again."""
    return data[:body_bytes] + zlib.crc32(data[:body_bytes]).to_bytes(4, "little") + data[body_bytes + 4 :]


def test_chunk_header_bytes_by_hand() -> None:
    def numbers(size: int, *values: int) -> bytes:
        return b"".join(value.to_bytes(size, "little") for value in values)

    body = (
        b"MESHCHNK"
        + numbers(4, 3, 2, 8, 1, 2, 5, 4)  # version, units, unit bytes, group, rank, segment, tokens
        + numbers(2, 7, 9)  # tenant bytes, shards
        + numbers(8, 3, 6, 7)  # position, generation, lba
        + bytes(range(16))
        + b"i" * 32
        + b"k" * 32
        + b"default".ljust(48, b"\0")
        + numbers(8, 10, 11)  # where the first shard begins, its generation
        + b"digest_0digest_1"
    )
    assert encode_chunk_header(HEADER) == (body + zlib.crc32(body).to_bytes(4, "little")).ljust(4096, b"\0")


@given(header=headers, lba_bytes=st.sampled_from([512, 4096]), payload=st.binary(max_size=600))
def test_chunk_header_round_trip(header: ChunkHeader, lba_bytes: int, payload: bytes) -> None:
    data = encode_chunk_header(header, lba_bytes)
    assert len(data) == header_lba_count(header.unit_count, lba_bytes) * lba_bytes
    assert peek_unit_count(data[:lba_bytes]) == header.unit_count
    assert decode_chunk_header(data + payload, lba_bytes=lba_bytes) == header


def test_a_header_of_many_blocks() -> None:
    header = replace(HEADER, unit_digests=tuple(i.to_bytes(8, "big") for i in range(2000)))
    data = encode_chunk_header(header)
    assert len(data) == 4 * LBA_BYTES
    assert decode_chunk_header(data) == header
    with pytest.raises(FormatError, match="truncated"):
        decode_chunk_header(data[:-1])


@settings(max_examples=300)
@given(header=headers, position=st.integers(0), flip=st.integers(1, 255))
def test_any_flipped_byte_of_a_header_is_seen(header: ChunkHeader, position: int, flip: int) -> None:
    data = bytearray(encode_chunk_header(header, 512))
    data[position % len(data)] ^= flip
    with pytest.raises(FormatError):
        decode_chunk_header(bytes(data), lba_bytes=512)


@given(header=headers, length_bytes=st.integers(0))
def test_a_truncated_header_is_seen(header: ChunkHeader, length_bytes: int) -> None:
    data = encode_chunk_header(header, 512)
    with pytest.raises(FormatError):
        decode_chunk_header(data[: length_bytes % len(data)], lba_bytes=512)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (16, bytes(4)),  # unit_bytes 0
        (36, b"\x31\0"),  # tenant of 49 bytes
        (38, bytes(2)),  # no shards
        (144, b"\xff"),  # tenant not UTF-8
        (12, bytes(4)),  # no units
        (12, b"\xff\xff\xff\xff"),
    ],
)
def test_impossible_headers_are_damage_even_with_a_right_checksum(position: int, value: bytes) -> None:
    data = bytearray(encode_chunk_header(HEADER))
    data[position : position + len(value)] = value
    with pytest.raises(MediumFormatError) as caught:
        decode_chunk_header(resealed(bytes(data), 224))
    assert caught.value.fault is FormatFault.DAMAGED


garbage = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda tail: (b"MESHCHNK\x03\0\0\0" + tail).ljust(LBA_BYTES, b"\0")),
    st.binary(max_size=300).map(lambda tail: b"MESHCHNK\x03\0\0\0" + tail),
)


@settings(max_examples=300)
@given(data=garbage)
def test_garbage_raises_format_errors_only(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_chunk_header(data)


@pytest.mark.parametrize(
    ("unit_count", "lba_bytes", "expected"),
    [(1, 4096, 1), (485, 4096, 1), (486, 4096, 2), (37, 512, 1), (38, 512, 2), (997, 4096, 2), (998, 4096, 3)],
)
def test_header_sizes(unit_count: int, lba_bytes: int, expected: int) -> None:
    """208 + 8n + 4 bytes: n = 485 fills 4092 of 4096."""
    assert header_lba_count(unit_count, lba_bytes) == expected


@pytest.mark.parametrize(
    ("unit_bytes", "unit_count", "expected"), [(1, 1, 2), (4096, 3, 4), (4097, 3, 7), (2_949_120, 16, 1 + 16 * 720)]
)
def test_shard_sizes(unit_bytes: int, unit_count: int, expected: int) -> None:
    assert shard_lba_count(unit_bytes, unit_count, LBA_BYTES) == expected
    assert unit_lba_count(unit_bytes, LBA_BYTES) * unit_count == expected - 1
