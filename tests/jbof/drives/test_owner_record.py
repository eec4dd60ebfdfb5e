from __future__ import annotations

import contextlib
import errno
import os
import uuid
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.drives.owner_record import (
    BLOCK_BYTES,
    StoredRecord,
    decode_record,
    encode_record,
    newest_record,
)
from meshfusion.jbof.drives.ownership import KIND, DriveOwnedError, OwnerRecord, carry_out, close, take
from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.drives.system.file_lock import FileReservations
from meshfusion.jbof.drives.system.medium_records import MediumRecords
from meshfusion.jbof.envelope import FormatFault, MediumFormatError
from meshfusion.jbof.errors import MediaError, UnsupportedError

OWNER = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
RECORD = OwnerRecord(epoch=5, owner=OWNER, key=0x1122334455667788, is_clean=True)
BLANK = bytes(BLOCK_BYTES)

records = st.builds(
    StoredRecord,
    st.integers(0, 2**64 - 1),
    st.builds(OwnerRecord, st.integers(1, 2**64 - 1), st.uuids(), st.integers(1, 2**64 - 1), st.booleans()),
)


def test_the_layout() -> None:
    """By hand, from the module's table."""
    body = (
        b"MESHOWNR"
        + bytes.fromhex("01000000 01000000 0900000000000000 0500000000000000 8877665544332211")
        + OWNER.bytes
    )
    whole = (body + zlib.crc32(body).to_bytes(4, "little")).ljust(4096, b"\0")
    assert encode_record(StoredRecord(9, RECORD)) == whole


@given(records)
def test_read_back(stored: StoredRecord) -> None:
    assert decode_record(encode_record(stored), where="x") == stored


@given(records, st.integers(0, BLOCK_BYTES - 1), st.integers(1, 255))
def test_no_changed_byte_is_taken_for_a_record(stored: StoredRecord, at: int, change: int) -> None:
    data = bytearray(encode_record(stored))
    data[at] ^= change
    with pytest.raises(MediumFormatError):
        decode_record(bytes(data), where="x")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MediumFormatError):
        decode_record(data.ljust(BLOCK_BYTES, b"\1"), where="x")


def test_the_newest_counts_and_a_torn_one_does_not() -> None:
    old, new = StoredRecord(3, RECORD), StoredRecord(4, RECORD)
    assert newest_record([encode_record(new), encode_record(old)], where="x") == new
    assert newest_record([encode_record(old), encode_record(new)], where="x") == new
    torn = encode_record(new)[:50] + encode_record(old)[50:]
    assert newest_record([torn, encode_record(old)], where="x") == old
    assert newest_record([BLANK, encode_record(old)], where="x") == old
    assert newest_record([BLANK, BLANK], where="x") is None


def test_what_is_no_record_at_all_is_refused() -> None:
    with pytest.raises(MediumFormatError) as caught:
        newest_record([b"x" * BLOCK_BYTES, BLANK], where="/dev/x")
    assert caught.value.fault is FormatFault.FOREIGN
    other_version = bytearray(encode_record(StoredRecord(1, RECORD)))
    other_version[8] = 2
    with pytest.raises(MediumFormatError) as caught:
        newest_record([bytes(other_version), encode_record(StoredRecord(2, RECORD))], where="/dev/x")
    assert caught.value.fault is FormatFault.VERSION


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.write_bytes(bytes(1 << 20))
    return path


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def medium_records(request: pytest.FixtureRequest, medium: Path) -> MediumRecords:
    if request.param:
        try:
            os.close(os.open(medium, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("needs hardware: no O_DIRECT on this filesystem")
    return MediumRecords(medium, 64 << 10, direct=request.param)


def test_records_on_a_medium(medium_records: MediumRecords, medium: Path) -> None:
    assert medium_records.read() is None
    written = [OwnerRecord(epoch, OWNER, epoch, is_clean=False) for epoch in range(1, 5)]
    for record in written:
        medium_records.write(record)
        assert medium_records.read() == record
    content = medium.read_bytes()
    assert not any(content[: 64 << 10])
    assert not any(content[(64 << 10) + 2 * BLOCK_BYTES :])
    # The write before the last one is still there.
    assert decode_record(content[(64 << 10) :][:BLOCK_BYTES], where="x").record == written[2]


def test_a_torn_write_leaves_the_record_before(medium_records: MediumRecords, medium: Path) -> None:
    for epoch in (1, 2, 3):
        medium_records.write(OwnerRecord(epoch, OWNER, epoch, is_clean=False))
    with medium.open("r+b") as file:
        file.seek(64 << 10)  # where the third one is
        file.write(b"torn")
    record = medium_records.read()
    assert record is not None
    assert record.epoch == 2


def test_a_conflict_is_told_as_one(medium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium_records = MediumRecords(medium, 0, direct=False)

    def refuse(*_: object) -> Any:
        raise OSError(errno.EBADE, os.strerror(errno.EBADE))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(ReservationConflictError, match="another host holds its reservation"):
        medium_records.write(RECORD)


def test_a_medium_that_is_not_there_or_too_short(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="cannot be used"):
        MediumRecords(tmp_path / "nothing", 0).read()
    short = tmp_path / "short"
    short.write_bytes(bytes(BLOCK_BYTES))
    with pytest.raises(MediaError, match="it ends before the owner record"):
        MediumRecords(short, 0, direct=False).read()


def test_one_owner_of_a_file(medium: Path) -> None:
    """By the lock of the machine: the second is refused, and nobody can be cut off; the lock ends with its holder."""
    medium_records = MediumRecords(medium, 0, direct=False)
    first, second = FileReservations(medium), FileReservations(medium)
    one = carry_out(take(OWNER, 1, may_take_over=False), first, medium_records)
    for may_take_over in (False, True):
        with pytest.raises(DriveOwnedError, match="in use by another process"):
            carry_out(take(OWNER, 2, may_take_over=may_take_over), second, medium_records)
    with pytest.raises(UnsupportedError, match="cannot be cut off"):
        second.preempt_and_abort(2, 1, KIND)
    first.close()  # as when its process dies
    other = carry_out(take(OWNER, 2, may_take_over=False), second, medium_records)
    assert (one.record.epoch, other.record.epoch, other.needs_rebuild) == (1, 2, True)
    carry_out(close(other), second, medium_records)
    second.close()
    third = FileReservations(medium)
    with contextlib.closing(third):
        assert not carry_out(take(OWNER, 3, may_take_over=False), third, medium_records).needs_rebuild


def test_a_file_that_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="cannot be locked"):
        FileReservations(tmp_path / "nothing")
