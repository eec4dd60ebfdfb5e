"""What a virtual card takes out of its stream, cut off at every kind of place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshfusion.dpu.image.bfb import BL2_IMAGE_ID, BfbImage, make_bfb
from meshfusion.dpu.image.errors import BfbError
from meshfusion.tools.lab.tcg_image import ArchiveEntry, cpio_archive
from meshfusion.tools.vdpu.stream_parts import INITRAMFS_ID, KERNEL_ID, taken_apart, write_boot_files

BF_CFG = b"device=/dev/x\n"
INITRAMFS = cpio_archive([ArchiveEntry("init", 0o100755, b"#!/bin/sh\n")])
BFB = make_bfb((
    BfbImage(BL2_IMAGE_ID, 2, b"bl2"),
    BfbImage(KERNEL_ID, 0, b"kernel image"),
    BfbImage(INITRAMFS_ID, 0, INITRAMFS),
))  # fmt: skip


def pushed(place: Path, data: bytes) -> Path:
    path = place / "pushed"
    path.write_bytes(data)
    return path


def test_kernel_initramfs_and_bf_cfg_are_handed_over(tmp_path: Path) -> None:
    path = pushed(tmp_path, BFB + BF_CFG)
    stream = taken_apart(path)
    assert stream is not None
    assert (stream.bfb_bytes, stream.bf_cfg) == (len(BFB), BF_CFG)
    write_boot_files(path, stream, tmp_path / "kernel", tmp_path / "initrd")
    assert (tmp_path / "kernel").read_bytes() == b"kernel image"
    unpacked = tmp_path / "root"
    unpacked.mkdir()
    handed_over = (tmp_path / "initrd").read_bytes()
    assert handed_over.startswith(INITRAMFS)
    # The kernel unpacks one archive behind the other; busybox stops at the first one's end.
    for archive in (INITRAMFS, handed_over[len(INITRAMFS) :]):
        subprocess.run(("/bin/busybox", "cpio", "-id"), input=archive, cwd=unpacked, check=True, capture_output=True)
    assert (unpacked / "init").read_bytes() == b"#!/bin/sh\n"
    assert (unpacked / "etc" / "bf.cfg").read_bytes() == BF_CFG


def test_without_bf_cfg_the_installer_finds_none(tmp_path: Path) -> None:
    path = pushed(tmp_path, BFB)
    stream = taken_apart(path)
    assert stream is not None
    write_boot_files(path, stream, tmp_path / "kernel", tmp_path / "initrd")
    assert b"bf.cfg" not in (tmp_path / "initrd").read_bytes()


@pytest.mark.parametrize("length", [0, 10, 24, 60, len(BFB) - 1])
def test_a_stream_that_is_not_whole_boots_nothing(tmp_path: Path, length: int) -> None:
    assert taken_apart(pushed(tmp_path, BFB[:length])) is None


def test_a_damaged_stream_is_told(tmp_path: Path) -> None:
    damaged = bytearray(BFB)
    damaged[-9] ^= 1
    with pytest.raises(BfbError, match="checksum"):
        taken_apart(pushed(tmp_path, bytes(damaged) + BF_CFG))


def test_a_stream_for_another_machine_is_told(tmp_path: Path) -> None:
    with pytest.raises(BfbError, match="no kernel"):
        taken_apart(pushed(tmp_path, make_bfb((BfbImage(BL2_IMAGE_ID, 2, b"bl2"),)) + BF_CFG))
