"""What QEMU is started with, and how apt's answers are read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from meshfusion.tools.vdpu import packages
from meshfusion.tools.vdpu.hardware import DriveBoot, Hardware, RshimBoot, drive_id, jbof_serial


def devices(argv: tuple[str, ...]) -> list[str]:
    return [word for flag, word in pairwise(argv) if flag == "-device"]


@pytest.mark.parametrize("boot", [DriveBoot(), RshimBoot(Path("/c/kernel"), Path("/c/initrd"))])
def test_the_boot_drive_is_the_first_and_each_drive_has_its_serial(boot: DriveBoot | RshimBoot) -> None:
    argv = Hardware(Path("/c"), drives=3, tmfifo="tmfifo_net0").argv(boot)
    nvme = [device for device in devices(argv) if device.startswith("nvme")]
    serials = [device.partition("serial=")[2].partition(",")[0] for device in nvme]
    assert serials == ["BOOT0", "JBOF0", "JBOF1", "JBOF2"]
    assert drive_id(jbof_serial(2)) == "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_JBOF2"


def test_a_restart_ends_the_machine_since_it_may_boot_something_else_then() -> None:
    assert "-no-reboot" in Hardware(Path("/c")).argv(DriveBoot())


def test_what_was_pushed_is_booted_without_the_drives_firmware() -> None:
    pushed = Hardware(Path("/c")).argv(RshimBoot(Path("/c/kernel"), Path("/c/initrd")))
    assert pushed[pushed.index("-kernel") + 1] == "/c/kernel"
    assert not any("pflash" in word for word in pushed)
    assert any("pflash" in word for word in Hardware(Path("/c")).argv(DriveBoot()))


def test_a_comma_in_the_folder_stays_one_path() -> None:
    argv = Hardware(Path("/c,d")).argv(DriveBoot())
    assert any("file=/c,,d/boot.img" in word for word in argv)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Inst bash (5.2.15-2+b13 Debian:12.11/stable [arm64])", "bash_5.2.15-2+b13_arm64.deb"),
        ("Inst login (1:4.13+dfsg1-1+deb12u2 Debian:12.11/stable [arm64])", "login_1%3a4.13+dfsg1-1+deb12u2_arm64.deb"),
        ("Inst netbase (6.4 Debian:12.11/stable [all])", "netbase_6.4_all.deb"),
        ("Conf bash (5.2.15-2+b13 Debian:12.11/stable [arm64])", None),
    ],
)
def test_files_are_named_as_apt_names_them(line: str, expected: str | None) -> None:
    found = packages.INSTALLED.match(line)
    assert (packages.file_name(*found.groups()) if found else None) == expected
