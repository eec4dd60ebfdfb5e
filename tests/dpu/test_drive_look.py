"""One look at a drive: what is there, whether it answers, and what a failed command means."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meshfusion.dpu.drive_look import Sighting, fault_of, look_at
from meshfusion.jbof.drives.identity import label_identity
from meshfusion.jbof.drives.life_words import Fault
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.faults import DataFileError
from meshfusion.jbof.media.file import DataFile
from tests.dpu.pool_cases import SIZE_BYTES, make_pool


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "pool" / "data"


@pytest.fixture
def label(tmp_path: Path) -> Label:
    return make_pool(tmp_path / "pool")


def test_a_drive_in_its_place(label: Label, data: Path) -> None:
    before = data.stat()
    seen = look_at(data, label, [300, 400, 10**9])
    assert seen.identity == label_identity(label.drive_uuid)
    assert (seen.fault, seen.problem, len(seen.epochs)) == (None, "", 2)
    assert len(seen.latencies_s) == 2, "of blocks that it has"
    assert seen.place is not None
    assert (seen.place.device, seen.place.inode) == (before.st_dev, before.st_ino)
    assert data.stat().st_mtime_ns == before.st_mtime_ns, "nothing is written"


def test_nothing_there(label: Label, data: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path, tmp_path / "none" / "none"):
        seen = look_at(path, label, [])
        assert (seen.identity, seen.fault) == (None, None)
        assert str(path) in seen.problem


def test_what_is_blank_or_cut_short_is_not_the_drive(label: Label, data: Path) -> None:
    os.truncate(data, SIZE_BYTES // 2)
    seen = look_at(data, label, [])
    assert (seen.identity, "cut short" in seen.problem) == (None, True)
    data.write_bytes(bytes(SIZE_BYTES))
    seen = look_at(data, label, [])
    assert seen.identity not in (None, label_identity(label.drive_uuid))
    assert "label" in seen.problem
    os.truncate(data, 0)
    assert look_at(data, label, []).identity is None


@pytest.mark.parametrize(
    ("error", "bad_lbas", "identified", "fault"),
    [
        (errno.EIO, range(2), True, Fault.MEDIA),
        (errno.EIO, range(300, 301), True, Fault.MEDIA),
        (errno.ETIMEDOUT, range(300, 301), True, Fault.TIMEOUT),
        (errno.ENODEV, range(2), False, Fault.ABSENT),
        (errno.EBADE, range(2, 4), True, Fault.CONFLICT),
    ],
)
def test_reads_that_fail(
    label: Label,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    bad_lbas: range,
    identified: bool,
    fault: Fault,
) -> None:
    read = DataFile.read_into

    def reading(self: DataFile, lba: int, buffer: memoryview) -> None:
        if lba in bad_lbas:
            raise DataFileError.from_os_error(OSError(error, os.strerror(error)), "reading failed", self.path)
        read(self, lba, buffer)

    monkeypatch.setattr(DataFile, "read_into", reading)
    seen = look_at(data, label, [299, 300])
    assert (seen.identity == label_identity(label.drive_uuid), seen.fault) == (identified, fault)
    assert "reading failed" in seen.problem


def test_a_drive_never_seen_before_that_cannot_be_read_is_not_taken_for_it(
    label: Label, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: DataFile, lba: int, buffer: memoryview) -> None:
        raise DataFileError.from_os_error(OSError(errno.EIO, "EIO"), "reading failed", self.path)

    monkeypatch.setattr(DataFile, "read_into", broken)
    seen = look_at(data, None, [])
    assert isinstance(seen, Sighting)
    assert (seen.identity, seen.fault) == (None, None)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (errno.EIO, Fault.MEDIA),
        (errno.EROFS, Fault.READ_ONLY),
        (errno.ENOSPC, Fault.NO_SPACE),
        (errno.ENXIO, Fault.ABSENT),
        (errno.ENODEV, Fault.ABSENT),
        (errno.EBADE, Fault.CONFLICT),
        (errno.ETIMEDOUT, Fault.TIMEOUT),
    ],
)
def test_what_linux_calls_it(code: int, fault: Fault) -> None:
    error = DataFileError.from_os_error(OSError(code, os.strerror(code)), "writing failed", Path("d"))
    assert fault_of(error) is fault
    assert fault_of(MediaError("something else", next_step="none")) is Fault.MEDIA
