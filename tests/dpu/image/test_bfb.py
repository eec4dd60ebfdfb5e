"""The boot stream's format: what is made can be read, what is read is whole, all else is refused with a place."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshfusion.dpu.image.bfb import HEADER_BYTES, BfbImage, make_bfb, parse_bfb, scan_bfb
from meshfusion.dpu.image.errors import BfbError

IMAGES = st.lists(
    st.builds(BfbImage, image_id=st.integers(0, 63), version=st.integers(0, 15), data=st.binary(max_size=100)),
    min_size=1, max_size=6,
)  # fmt: skip

# What mlx-mkbfb 1.2 writes for `--bl2-v1 FILE --bl2-v2 FILE --boot-args "=quiet"`, with files that hold "one" and
# "second": headers by hand from its source, so that nothing of ours made them.
BY_HAND = b"".join((
    struct.pack("<QQQ", 0x0131_2021_1302_6642, 3 | zlib.crc32(b"one" + bytes(5)) << 32, 1 << 1 | 1 << 59),
    b"one", bytes(5),
    struct.pack("<QQQ", 0x0132_0021_1302_6642, 6 | zlib.crc32(b"second" + bytes(2)) << 32, 1 << 59),
    b"second", bytes(2),
    struct.pack("<QQQ", 0x3B30_0021_1302_6642, 5 | zlib.crc32(b"quiet" + bytes(3)) << 32, 0),
    b"quiet", bytes(3),
))  # fmt: skip
ITS_IMAGES = (BfbImage(1, 1, b"one"), BfbImage(1, 2, b"second"), BfbImage(59, 0, b"quiet"))


def test_it_is_the_format_of_the_makers_tool() -> None:
    assert make_bfb(ITS_IMAGES) == BY_HAND
    assert parse_bfb(BY_HAND) == ITS_IMAGES


def test_a_summary_tells_places_and_chips() -> None:
    summary = scan_bfb(io.BytesIO(BY_HAND))
    assert [(p.image_id, p.version, p.offset_bytes, p.length_bytes) for p in summary.parts] == [
        (1, 1, 0, 3), (1, 2, 32, 6), (59, 0, 64, 5),
    ]  # fmt: skip
    assert summary.size_bytes == len(BY_HAND)
    assert summary.chip_families == {"BlueField-2", "BlueField-3"}


@given(IMAGES)
def test_what_is_made_is_read_again(images: list[BfbImage]) -> None:
    made = make_bfb(images)
    assert parse_bfb(made) == tuple(images)
    assert len(scan_bfb(io.BytesIO(made)).parts) == len(images)


@given(st.binary(max_size=300))
@example(b"")
@example(BY_HAND[:HEADER_BYTES])
def test_anything_else_is_refused_with_a_place(data: bytes) -> None:
    with pytest.raises(BfbError) as raised:
        parse_bfb(data)
    assert 0 <= raised.value.offset_bytes <= len(data)
    assert raised.value.reason in raised.value.message


@given(IMAGES, st.data())
def test_a_stream_with_a_changed_byte_is_refused_or_differs(images: list[BfbImage], data: st.DataObject) -> None:
    """Of a header not all bits are covered by a checksum: versions and ids can change, and what follows."""
    made = bytearray(make_bfb(images))
    at = data.draw(st.integers(0, len(made) - 1))
    made[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = parse_bfb(bytes(made))
    except BfbError:
        return
    assert b"".join(i.data for i in found) == b"".join(i.data for i in images), "bytes of an image changed unseen"


@given(IMAGES, st.data())
def test_both_readers_refuse_the_same(images: list[BfbImage], data: st.DataObject) -> None:
    made = make_bfb(images)[: data.draw(st.integers(0, 200))]
    whole, piecewise = _refusal(lambda: parse_bfb(made)), _refusal(lambda: scan_bfb(io.BytesIO(made)))
    assert whole == piecewise


def _refusal(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except BfbError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("data", "offset", "word"),
    [
        (b"", 0, "the file is empty"),
        (BY_HAND[:10], 0, "ends 10 bytes into a header of 24"),
        (b"\x7fELF" + bytes(40), 0, "0x464c457f"),
        (BY_HAND + b"device=/dev/mmcblk0\nERASE_SSD=no\n", 96, "has a bf.cfg been appended already"),
        (BY_HAND[:-4], 92, "ends 4 bytes before image 59 does"),
        (BY_HAND[:25] + b"X" + BY_HAND[26:], 0, "image 1 has the checksum"),
        (BY_HAND[:4] + b"\x22" + BY_HAND[5:], 0, "the format has version 2.2"),
        (BY_HAND[:4] + b"\x31" + BY_HAND[5:], 0, "the format has version 1.3"),
        (BY_HAND[:6] + b"\x41" + BY_HAND[7:], 0, "the header has 32 bytes"),
        (BY_HAND[:7] + b"\x40" + BY_HAND[8:], 0, "the image id is 64"),
    ],
)
def test_each_fault_is_told_where_it_is(data: bytes, offset: int, word: str) -> None:
    with pytest.raises(BfbError, match=word) as raised:
        parse_bfb(data)
    assert raised.value.offset_bytes == offset
