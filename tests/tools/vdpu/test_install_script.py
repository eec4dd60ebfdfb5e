"""The installer of a virtual card, run here as far as it touches no machine: its choices are those of real ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshfusion.tools.vdpu.system_files import system_script

NAMES = ("install.sh", "bfrshlog", "boot_init.sh")


def in_installer(script: str, place: Path, names: tuple[str, ...] = ()) -> str:
    """What ``script`` prints with the installer's functions, on a machine with the drives ``names``."""
    functions = system_script("install.sh").partition("\nstart_devices\nif ")[0]
    drives = " ".join(names)
    around = f"""
ls() {{ printf '%s\\n' {drives}; }}
cd() {{ :; }}
nvme() {{ echo "nvme $*"; }}
bfrshlog() {{ :; }}
"""
    fake = functions.replace("[ -b /dev/nvme0n1 ]", f"[ -n '{drives}' ]").replace('[ -b "$device" ]', "true")
    done = subprocess.run(
        ("bash", "-c", f"{fake}\n{around}\n{script}"), cwd=place, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_scripts_are_read_by_their_shells(name: str) -> None:
    script = system_script(name)
    shell = {"#!/bin/bash": ("bash",), "#!/bin/sh": ("dash",), "#!/bin/busybox sh": ("/bin/busybox", "sh")}
    argv = (*shell[script.splitlines()[0]], "-n")
    subprocess.run(argv, input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("device", "drives", "expected"),
    [
        ("", (), "/dev/mmcblk0"),
        ("", ("nvme0n1", "nvme2n1", "nvme10n1"), "/dev/nvme10n1"),
        ("/dev/null", ("nvme0n1", "nvme1n1"), "/dev/null"),
    ],
)
def test_without_device_it_takes_the_last_nvme_drive_as_real_installers_do(
    tmp_path: Path, device: str, drives: tuple[str, ...], expected: str
) -> None:
    said = in_installer(f"device={device}\nchoose_device >/dev/null; echo $device", tmp_path, drives)
    assert said.splitlines()[-1] == expected


@pytest.mark.parametrize(("setting", "is_erased"), [("", True), ("ERASE_SSD=yes", True), ("ERASE_SSD=no", False)])
def test_it_erases_the_last_nvme_drive_unless_told_not_to(tmp_path: Path, setting: str, is_erased: bool) -> None:
    said = in_installer(f"{setting}\nerase_drive", tmp_path, ("nvme0n1", "nvme1n1"))
    assert ("nvme format /dev/nvme1n1" in said) is is_erased


def test_partitions_of_drives_are_named_as_the_kernel_does(tmp_path: Path) -> None:
    said = in_installer("partition /dev/nvme0n1 2; partition /dev/mmcblk0 1; partition /dev/vda 2", tmp_path)
    assert said.split() == ["/dev/nvme0n1p2", "/dev/mmcblk0p1", "/dev/vda2"]


def test_lines_for_the_log_have_severity_and_module(tmp_path: Path) -> None:
    script = system_script("bfrshlog").replace("/dev/virtio-ports/rshim.log", str(tmp_path / "log"))
    for text in ("INFO: Linux up", "ERR: Installation failed", "Installing OS image"):
        subprocess.run(("dash", "-c", script, "bfrshlog", text), check=True)
        said = (tmp_path / "log").read_text()
        assert said in (
            " INFO[MISC]: Linux up\n", " ERR[MISC]: Installation failed\n", " INFO[MISC]: Installing OS image\n"
        )  # fmt: skip
