"""The owner's epoch on the medium: bytes by hand, and what a damaged, torn or foreign record tells."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.epoch_record import EpochRecord, decode_epoch_record, encode_epoch_record, last_epoch
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.label import Label

LABEL = Label(b"p" * 16, b"d" * 16, 0, 256, 4)


def record(epoch: int, drive_uuid: bytes = LABEL.drive_uuid) -> bytes:
    return encode_epoch_record(EpochRecord(epoch, LABEL.pool_uuid, drive_uuid))


def test_bytes_by_hand() -> None:
    body = b"MESHEPOC\x03\0\0\0\0\0\0\0" + (7).to_bytes(8, "little") + b"p" * 16 + b"d" * 16
    assert record(7) == (body + zlib.crc32(body).to_bytes(4, "little")).ljust(LBA_BYTES, b"\0")
    assert decode_epoch_record(record(7)) == EpochRecord(7, b"p" * 16, b"d" * 16)


def test_epochs_lie_in_turn() -> None:
    assert [EpochRecord(epoch, b"", b"").lba for epoch in (1, 2, 3)] == [3, 2, 3]


@given(position=st.integers(0, LBA_BYTES - 1), flip=st.integers(1, 255))
def test_any_flipped_byte_is_seen(position: int, flip: int) -> None:
    data = bytearray(record(7))
    data[position] ^= flip
    with pytest.raises(FormatError):
        decode_epoch_record(bytes(data))


def test_the_last_epoch_is_what_a_right_record_tells() -> None:
    blank = bytes(LBA_BYTES)
    assert last_epoch((blank, blank), LABEL) == 0
    assert last_epoch((blank, record(1)), LABEL) == 1
    assert last_epoch((record(2), record(1)), LABEL) == 2
    assert last_epoch((record(2), record(3)), LABEL) == 3
    assert last_epoch((record(4)[:-1] + b"x", record(3)), LABEL) == 3, "a torn one leaves that before"


def test_what_belongs_elsewhere_tells_nothing() -> None:
    blank = bytes(LBA_BYTES)
    assert last_epoch((record(9), blank), LABEL) == 0, "an odd epoch lies at block 3"
    assert last_epoch((blank, record(9, b"x" * 16)), LABEL) == 0, "another drive's"


def test_truncated() -> None:
    with pytest.raises(FormatError):
        decode_epoch_record(record(7)[:100])
