"""Headers and summaries of segments: bytes by hand, round trips, and everything that can be wrong with them."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.segment_format import (
    SegmentHeader,
    SegmentSummary,
    SummaryEntry,
    decode_segment_header,
    decode_summary,
    decode_summary_part,
    encode_segment_header,
    encode_summary,
    summary_lba_count,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
uuids = st.binary(min_size=16, max_size=16)
headers = st.builds(
    SegmentHeader,
    pool_uuid=uuids,
    drive_uuid=uuids,
    drive_number=u16,
    segment=u32,
    generation=u64,
    opened_seq=u64,
    owner_epoch=u64,
    lifetime_class=u16,
    lba=u64,
)
HEADER = SegmentHeader(b"p" * 16, b"d" * 16, 1, 2, 3, 4, 5, 6, 7)
SUMMARY = SegmentSummary(b"p" * 16, b"d" * 16, 1, 2, 3, 1000, (SummaryEntry(1, 4, b"12345678"),))


def entries(count: int) -> tuple[SummaryEntry, ...]:
    return tuple(SummaryEntry(1 + 3 * i, 3, i.to_bytes(8, "big")) for i in range(count))


def flipped(data: bytes, position: int, flip: int) -> bytes:
    changed = bytearray(data)
    changed[position % len(data)] ^= flip
    return bytes(changed)


def test_header_bytes_by_hand() -> None:
    body = b"MESHSEGM" + struct.pack("<IIQQQQHHI", 3, 2, 3, 4, 5, 7, 1, 6, 0) + b"p" * 16 + b"d" * 16
    assert encode_segment_header(HEADER) == (body + zlib.crc32(body).to_bytes(4, "little")).ljust(4096, b"\0")


@given(header=headers)
def test_header_round_trip(header: SegmentHeader) -> None:
    assert decode_segment_header(encode_segment_header(header)) == header


@given(header=headers, position=st.integers(0), flip=st.integers(1, 255))
def test_any_flipped_byte_of_a_header_is_seen(header: SegmentHeader, position: int, flip: int) -> None:
    with pytest.raises(FormatError):
        decode_segment_header(flipped(encode_segment_header(header), position, flip))


def test_summary_bytes_by_hand() -> None:
    entry = struct.pack("<II8s", 1, 4, b"12345678")
    body = b"MESHSUMM" + struct.pack("<IIQQIIIHH", 3, 2, 3, 999, 1, 0, zlib.crc32(entry), 1, 0) + b"p" * 16 + b"d" * 16
    body += entry
    assert encode_summary(SUMMARY) == (body + zlib.crc32(body).to_bytes(4, "little")).ljust(4096, b"\0")


@pytest.mark.parametrize(("count", "lba_count"), [(0, 1), (1, 1), (250, 1), (251, 2), (500, 2), (501, 3)])
def test_summary_sizes(count: int, lba_count: int) -> None:
    """80 + 16n + 4 bytes: n = 250 fills 4084 of 4096."""
    summary = replace(SUMMARY, entries=entries(count))
    data = encode_summary(summary)
    assert summary_lba_count(count) == lba_count == len(data) // LBA_BYTES
    assert decode_summary(data, 1000) == summary
    last = decode_summary_part(data[-LBA_BYTES:], 999)
    assert (last.entry_count, last.first_entry) == (count, 0), "the last block tells how many there are"


@settings(max_examples=200)
@given(count=st.sampled_from((0, 1, 249, 251)), position=st.integers(0), flip=st.integers(1, 255))
def test_any_flipped_byte_of_a_summary_is_seen(count: int, position: int, flip: int) -> None:
    data = encode_summary(replace(SUMMARY, entries=entries(count)))
    with pytest.raises(FormatError):
        decode_summary(flipped(data, position, flip), 1000)


def test_blocks_of_two_writings_are_no_summary() -> None:
    """A summary is written anew after a restart; a cut may leave a block of each."""
    old = encode_summary(replace(SUMMARY, entries=entries(300)))
    new = encode_summary(replace(SUMMARY, entries=(replace(entries(1)[0], key_prefix=b"replaced"), *entries(300)[1:])))
    assert old[:LBA_BYTES] != new[:LBA_BYTES], "the checksum of all is in every block"
    with pytest.raises(FormatError, match="do not belong together"):
        decode_summary(old[:LBA_BYTES] + new[LBA_BYTES:], 1000)
    generation = encode_summary(replace(SUMMARY, entries=entries(300), generation=4))
    with pytest.raises(FormatError, match="do not belong together"):
        decode_summary(old[:LBA_BYTES] + generation[LBA_BYTES:], 1000)


def test_a_summary_that_lacks_a_block_is_none() -> None:
    data = encode_summary(replace(SUMMARY, entries=entries(300)))
    with pytest.raises(FormatError, match="do not belong together"):
        decode_summary(data[LBA_BYTES:], 1000)


def test_a_misdirected_block_is_seen() -> None:
    with pytest.raises(FormatError, match="lies at block 1999 and was meant for block 999"):
        decode_summary(encode_summary(SUMMARY), 2000)


def test_entries_over_each_other_are_damage() -> None:
    for wrong in ((SummaryEntry(1, 4, b"12345678"), SummaryEntry(4, 4, b"12345678")), (SummaryEntry(1, 0, b"1" * 8),)):
        with pytest.raises(AssertionError):
            encode_summary(replace(SUMMARY, entries=wrong))
    data = bytearray(encode_summary(SUMMARY))
    data[84:88] = bytes(4)  # lba_count 0
    data[40:44] = zlib.crc32(data[80:96]).to_bytes(4, "little")
    data[96:100] = zlib.crc32(data[:96]).to_bytes(4, "little")
    with pytest.raises(FormatError, match="do not belong together"):
        decode_summary(bytes(data), 1000)


@settings(max_examples=300)
@given(tail=st.binary(max_size=300), is_block=st.booleans())
def test_garbage_raises_format_errors_only(tail: bytes, is_block: bool) -> None:
    for magic in (b"MESHSEGM\x03\0\0\0", b"MESHSUMM\x03\0\0\0", b""):
        data = (magic + tail).ljust(LBA_BYTES, b"\0") if is_block else magic + tail
        with pytest.raises(FormatError):
            decode_segment_header(data)
        with pytest.raises(FormatError):
            decode_summary_part(data, 999)
