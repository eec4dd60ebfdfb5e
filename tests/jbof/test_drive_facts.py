"""What sysfs tells of a drive: its name, and what it likes to be written and freed in. From made-up trees."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from meshfusion.jbof.media.drive_facts import alignment_bytes, drive_name

NUMBER = os.makedev(259, 1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path that is a block device, though there is none."""
    path, real = Path("/dev/made-up"), Path.stat

    def status(self: Path, **options: bool) -> os.stat_result:
        if self != path:
            return real(self, **options)
        fields = [stat.S_IFBLK | 0o600, 0, 0, 1, 0, 0, 0, 0, 0, 0]
        return os.stat_result(fields, {"st_rdev": NUMBER})

    monkeypatch.setattr(Path, "stat", status)
    return path


def tree(root: Path, *, partition: bool = False, **files: str) -> Path:
    disk = root / "devices" / "nvme0n1"
    disk.mkdir(parents=True)
    for name, text in files.items():
        file = disk / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shown = disk
    if partition:
        shown = disk / "nvme0n1p1"
        shown.mkdir()
        (shown / "partition").write_text("1\n")
    (root / "dev" / "block").mkdir(parents=True)
    (root / "dev" / "block" / "259:1").symlink_to(shown)
    return root


def test_a_drives_name(tmp_path: Path, device: Path) -> None:
    sysfs = tree(tmp_path, device__serial="S4EWNX0R500123      \n", wwid="eui.002538\n")
    assert drive_name(device, sysfs) == "S4EWNX0R500123"


def test_a_partition_has_its_drives_name(tmp_path: Path, device: Path) -> None:
    assert drive_name(device, tree(tmp_path, partition=True, wwid="eui.002538\n")) == "eui.002538"


def test_a_long_name_is_cut_between_characters(tmp_path: Path, device: Path) -> None:
    assert drive_name(device, tree(tmp_path, serial="a" + "ä" * 40)) == "a" + "ä" * 31


def test_a_drive_without_a_name_and_a_file(tmp_path: Path, device: Path) -> None:
    assert drive_name(device, tree(tmp_path / "sys")) == ""
    (tmp_path / "file").touch()
    assert drive_name(tmp_path / "file", tmp_path / "sys") == ""
    assert drive_name(tmp_path / "missing", tmp_path / "sys") == ""


@pytest.mark.parametrize(
    ("minimum", "discard", "expected"),
    [("4096", "4096", 4096), ("16384", "65536", 65536), ("512", "0", 4096), ("12288", "8192", 24576), ("x", "", 4096)],
)
def test_alignment(tmp_path: Path, device: Path, minimum: str, discard: str, expected: int) -> None:
    sysfs = tree(tmp_path, queue__minimum_io_size=minimum, queue__discard_granularity=discard)
    assert alignment_bytes(device, 4096, sysfs) == expected


def test_what_no_drive_frees_in_is_not_heeded(tmp_path: Path, device: Path) -> None:
    sysfs = tree(tmp_path, queue__minimum_io_size="16384", queue__discard_granularity=str(1 << 30))
    assert alignment_bytes(device, 4096, sysfs) == 16384


def test_a_file_is_aligned_to_blocks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert alignment_bytes(tmp_path / "file", 4096, tmp_path) == 4096


def test_an_encrypted_drive_is_what_lies_below(tmp_path: Path, device: Path) -> None:
    """A mapping has neither a serial nor wishes of its own. A volume may be moved to another drive: it has no name."""
    sysfs = tree(tmp_path, serial="S1\n", queue__minimum_io_size="16384\n")
    mapping = sysfs / "devices" / "dm-0"
    (mapping / "slaves").mkdir(parents=True)
    (mapping / "slaves" / "nvme0n1").symlink_to(sysfs / "devices" / "nvme0n1")
    (mapping / "dm").mkdir()
    (sysfs / "dev" / "block" / "259:1").unlink()
    (sysfs / "dev" / "block" / "259:1").symlink_to(mapping)
    for uuid, name, alignment in (("CRYPT-LUKS2-1-x", "S1", 16384), ("LVM-1", "", 4096)):
        (mapping / "dm" / "uuid").write_text(f"{uuid}\n")
        assert (drive_name(device, sysfs), alignment_bytes(device, 4096, sysfs)) == (name, alignment)
