"""The label: round trips, hand-made bytes, copies that disagree, and what can be wrong with bytes on a medium."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.envelope import FormatFault, MediumFormatError
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.label import Label, decode_label, decode_label_copies, encode_label, examine_label_copies

names = st.text(max_size=32).filter(lambda text: len(text.encode(errors="replace")) <= 64 and _encodable(text))


@st.composite
def any_label(draw: st.DrawFn) -> Label:
    alignment = draw(st.integers(1, 1 << 16))
    return Label(
        pool_uuid=draw(st.binary(min_size=16, max_size=16)),
        drive_uuid=draw(st.binary(min_size=16, max_size=16)),
        created_unix_s=draw(st.integers(0, 2**64 - 1)),
        segment_lba_count=alignment * draw(st.integers(1, 1 << 15)),
        segment_count=draw(st.integers(1, 2**32 - 1)),
        data_start_lba=alignment * draw(st.integers(6, 1 << 15)),
        alignment_lba_count=alignment,
        drive_number=draw(st.integers(0, 2**16 - 1)),
        drive_name=draw(names),
    )


LABEL = Label(
    pool_uuid=bytes(range(16)),
    drive_uuid=b"d" * 16,
    created_unix_s=1_764_000_000,
    segment_lba_count=16384,
    segment_count=63,
    alignment_lba_count=16,
    drive_number=2,
    drive_name="S4EWNX0R",
)
CRC_AT = 144


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fault_of(data: bytes) -> FormatFault:
    with pytest.raises(MediumFormatError) as caught:
        decode_label(data)
    return caught.value.fault


def resealed(data: bytes) -> bytes:
    """``data`` with the checksum made right again."""
    return data[:CRC_AT] + zlib.crc32(data[:CRC_AT]).to_bytes(4, "little") + data[CRC_AT + 4 :]


def test_label_bytes_by_hand() -> None:
    body = (
        b"MESHFUSN\x03\0\0\0\0\0\0\0"
        + bytes(range(16))
        + b"d" * 16
        + (1_764_000_000).to_bytes(8, "little")
        + b"\x00\x10\0\0"  # 4096
        + b"\x00\x40\0\0"  # 16384
        + b"\x3f\0\0\0"
        + b"\x00\x01\0\0"  # 256
        + b"\x10\0\0\0"
        + b"\x02\0"
        + b"\x08\0"
        + b"S4EWNX0R".ljust(64, b"\0")
    )
    assert encode_label(LABEL) == (body + zlib.crc32(body).to_bytes(4, "little")).ljust(4096, b"\0")


@given(label=any_label())
def test_label_round_trip(label: Label) -> None:
    data = encode_label(label)
    assert len(data) == LBA_BYTES
    assert decode_label(data) == label


def test_label_end() -> None:
    assert LABEL.end_lba == 256 + 16384 * 63


def test_every_flipped_byte_of_a_label_is_seen() -> None:
    good = encode_label(LABEL)
    for position in range(LBA_BYTES):
        data = bytearray(good)
        data[position] ^= 0x40
        expected = FormatFault.DAMAGED
        if position < 12:
            expected = FormatFault.FOREIGN if position < 8 else FormatFault.VERSION
        assert fault_of(bytes(data)) is expected, position


@pytest.mark.parametrize("data", [b"", b"MESHFUS", bytes(LBA_BYTES), b"\x7fELF" + bytes(4092), b"\xff" * LBA_BYTES])
def test_other_data_is_not_a_pool(data: bytes) -> None:
    assert fault_of(data) is FormatFault.FOREIGN


@pytest.mark.parametrize("length_bytes", [8, 11, 12, 147, 148, 4095, 4097])
def test_a_label_of_another_length_is_damaged(length_bytes: int) -> None:
    assert fault_of(encode_label(LABEL).ljust(5000, b"\0")[:length_bytes]) is FormatFault.DAMAGED


def test_another_version_names_both() -> None:
    data = bytearray(encode_label(LABEL))
    data[8] = 7
    with pytest.raises(FormatError, match=r"/pools/a.*version 7.*version 3") as caught:
        decode_label(bytes(data), where="/pools/a")
    assert caught.value.next_step


@pytest.mark.parametrize(("position", "value"), [(12, 1), (56, 1)])
def test_unknown_flags_and_block_sizes_are_another_version(position: int, value: int) -> None:
    data = bytearray(encode_label(LABEL))
    data[position] = value
    assert fault_of(resealed(bytes(data))) is FormatFault.VERSION


@pytest.mark.parametrize("field", [60, 64, 68, 72])
def test_impossible_sizes_are_damage_even_with_a_right_checksum(field: int) -> None:
    data = bytearray(encode_label(LABEL))
    data[field : field + 4] = bytes(4)
    assert fault_of(resealed(bytes(data))) is FormatFault.DAMAGED


def test_the_second_label_stands_in_for_the_first() -> None:
    good = encode_label(LABEL)
    assert examine_label_copies([good, good]) == (LABEL, ())
    assert decode_label_copies([good, good]) == LABEL
    for bad, text in ((bytes(LBA_BYTES), "does not start with MESHFUSN"), (good[:-1] + b"x", "is damaged")):
        label, (problem,) = examine_label_copies([bad, good], where="/p")
        assert label == LABEL
        assert problem.startswith(f"/p: the first copy of its label (byte 0) {text}")
        label, (problem,) = examine_label_copies([good, bad], where="/p")
        assert label == LABEL
        assert problem.startswith(f"/p: the second copy of its label (byte 4096) {text}")


def test_a_copy_of_another_version_is_refused_beside_a_good_one() -> None:
    good = encode_label(LABEL)
    version = good[:8] + b"\x04" + good[9:]
    for copies, ordinal in (([version, good], "first"), ([good, version], "second")):
        with pytest.raises(MediumFormatError, match=f"{ordinal} copy.*format version 4") as caught:
            decode_label_copies(copies)
        assert caught.value.fault is FormatFault.VERSION


def test_two_valid_labels_that_differ_are_refused() -> None:
    other = replace(LABEL, segment_count=9)
    with pytest.raises(MediumFormatError, match="contradict each other") as caught:
        decode_label_copies([encode_label(LABEL), encode_label(other)])
    assert caught.value.fault is FormatFault.DAMAGED


def test_the_most_telling_error_wins() -> None:
    good = encode_label(LABEL)
    foreign, damaged, version = bytes(LBA_BYTES), good[:-1] + b"x", good[:8] + b"\x04" + good[9:]
    for copies, fault in [
        ([foreign, foreign], FormatFault.FOREIGN),
        ([foreign, damaged], FormatFault.DAMAGED),
        ([version, damaged], FormatFault.VERSION),
    ]:
        with pytest.raises(MediumFormatError) as caught:
            decode_label_copies(copies)
        assert caught.value.fault is fault


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (60, b"\x08\x40"),  # segments of 16392 blocks, aligned to 16
        (68, b"\x01\x01"),  # data from block 257 on
        (72, b"\0\0\0\1"),  # alignment larger than a segment
        (78, b"\x41\0"),  # a name of 65 bytes
        (80, b"\xff"),  # that is not UTF-8
    ],
)
def test_a_label_that_contradicts_itself_is_damaged(position: int, value: bytes) -> None:
    data = bytearray(encode_label(LABEL))
    data[position : position + len(value)] = value
    assert fault_of(resealed(bytes(data))) is FormatFault.DAMAGED


@settings(max_examples=200)
@given(tail=st.binary(max_size=300), is_block=st.booleans())
def test_garbage_raises_format_errors_only(tail: bytes, is_block: bool) -> None:
    data = b"MESHFUSN\x03\0\0\0" + tail
    with pytest.raises(FormatError):
        decode_label(data.ljust(LBA_BYTES, b"\0") if is_block else data)
