from __future__ import annotations

import shutil
from pathlib import Path

from meshfusion.dpu.pool import create_pool
from meshfusion.jbof.drives.domain import DomainMap
from meshfusion.jbof.drives.drive import DriveKind
from meshfusion.jbof.drives.system.files import FileDrives
from tests.jbof.loop_devices import loop_device_of

MIB = 1 << 20


def make(path: Path, size_bytes: int = 8 * MIB) -> Path:
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return path


def test_a_folder_of_files(tmp_path: Path) -> None:
    make(tmp_path / "b")
    make(tmp_path / "a", 4 * MIB + 5)
    (tmp_path / "folder").mkdir()
    found = FileDrives([tmp_path]).discover()
    assert found.passed == ()
    by_name = {drive.location.slot: drive for drive in found.drives}
    assert set(by_name) == {"a", "b"}
    drive = by_name["a"]
    assert drive.kind is DriveKind.FILE
    assert drive.capabilities.capacity_bytes == 4 * MIB  # whole blocks
    assert drive.health is None
    assert drive.health_note.startswith("unknown")
    assert drive.identity.unique == f"inode.{(tmp_path / 'a').stat().st_dev:x}-{(tmp_path / 'a').stat().st_ino:x}"


def test_an_identity_survives_a_renaming_and_not_a_copy(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    (before,) = FileDrives([first]).discover().drives
    moved = first.rename(tmp_path / "z")
    assert FileDrives([moved]).discover().drives[0].identity == before.identity
    copy = Path(shutil.copy(moved, tmp_path / "copy"))
    assert FileDrives([copy]).discover().drives[0].identity != before.identity


def test_a_pools_label_names_it(tmp_path: Path) -> None:
    label = create_pool(tmp_path / "pool", size_bytes=8 * MIB, segment_bytes=MIB)
    data = tmp_path / "pool" / "data"
    (drive,) = FileDrives([data]).discover().drives
    assert drive.identity.key == f"label.{label.drive_uuid.hex()}"
    # A copy has the same label, so neither is offered.
    copy = Path(shutil.copy(data, tmp_path / "copy"))
    found = FileDrives([data, copy]).discover()
    assert found.drives == ()
    assert "same identity" in found.passed[0].reason


def test_what_cannot_be_a_drive_is_named(tmp_path: Path) -> None:
    good = make(tmp_path / "good")
    found = FileDrives([tmp_path / "nothing", Path("/dev/null"), good]).discover()
    assert [drive.where for drive in found.drives] == [str(good)]
    reasons = {passed.where: passed.reason for passed in found.passed}
    assert "does not exist" in reasons[str(tmp_path / "nothing")]
    assert "neither a file nor a block device" in reasons["/dev/null"]


def test_one_file_of_a_folder_that_is_none_costs_the_others_nothing(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "head", MIB)
    make(tmp_path / "least", MIB + 4096)
    (tmp_path / "owner.lock").write_text("17\nunix:///run/s\n")
    (tmp_path / "zero").symlink_to("/dev/null")
    found = FileDrives([tmp_path]).discover()
    assert [drive.location.slot for drive in found.drives] == ["a", "least"]
    assert {Path(passed.where).name for passed in found.passed} == {"head", "owner.lock"}
    assert all("is not larger than the head of a drive, 1MiB" in passed.reason for passed in found.passed)
    (named,) = FileDrives([tmp_path / "owner.lock"]).discover().passed
    assert named.next_step == "Name a larger file or a block device."


def test_names_by_the_configuration(tmp_path: Path) -> None:
    make(tmp_path / "a")
    (drive,) = FileDrives([tmp_path], DomainMap(by_slot={"a": {"enclosure": "shelf-1"}})).discover().drives
    assert drive.domain.enclosure == "shelf-1"


def test_a_block_device(tmp_path: Path) -> None:
    with loop_device_of(make(tmp_path / "data", 16 * MIB)) as device:
        (drive,) = FileDrives([device]).discover().drives
    assert drive.capabilities.capacity_bytes == 16 * MIB
    assert drive.capabilities.lba_bytes == 512
    assert drive.identity.unique.startswith("inode.0-")
