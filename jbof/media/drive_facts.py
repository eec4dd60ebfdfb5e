"""What a pool's drive is called and how it likes to be written, from sysfs, where a block device is given. An encrypted
one (dm-crypt) is what it lies on: a mapping of its own has neither serial nor wishes.

(Linux: Documentation/ABI/stable/sysfs-block. For NVMe ``minimum_io_size`` is NPWG and ``discard_granularity`` NPDG,
drivers/nvme/host/core.c.)
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Final

_SYSFS: Final = Path("/sys")
_NAME_BYTES: Final = 64
_GRANULE_BYTES_MAX: Final = 64 << 20  # what a device claims beyond that is not worth its alignment


def drive_name(path: Path, sysfs: Path = _SYSFS) -> str:
    """The serial of the drive, else what the kernel tells it from others by, in at most 64 bytes; empty for a file and
    where there is none. Never raises."""
    device = _device(path, sysfs)
    if device is None:
        return ""
    for name in ("serial", "device/serial", "nguid", "wwid", "device/wwid"):
        text = _text(device / name)
        if text and text.isprintable():
            return text.encode()[:_NAME_BYTES].decode(errors="ignore")
    return ""


def alignment_bytes(path: Path, block_bytes: int, sysfs: Path = _SYSFS) -> int:
    """What segments should begin and end on, a multiple of ``block_bytes``; that itself where nothing is told."""
    device = _device(path, sysfs)
    granule = block_bytes
    for name in ("queue/minimum_io_size", "queue/discard_granularity"):
        text = _text(device / name) if device is not None else ""
        told = int(text) if text.isdecimal() else 0
        together = math.lcm(granule, told or 1)
        granule = together if together <= _GRANULE_BYTES_MAX else granule
    return granule


def _device(path: Path, sysfs: Path) -> Path | None:
    """The whole drive's folder."""
    try:
        status = path.stat()
        if not stat.S_ISBLK(status.st_mode):
            return None
        device = (sysfs / "dev" / "block" / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}").resolve()
        device = _below_encryption(device)
        return device.parent if (device / "partition").exists() else device
    except OSError:
        return None


def _below_encryption(device: Path) -> Path:
    """libcryptsetup has its mappings' UUIDs begin with CRYPT-; one lies on one device."""
    if not _text(device / "dm" / "uuid").startswith("CRYPT-"):
        return device
    slaves = [slave.resolve() for slave in (device / "slaves").iterdir()]
    return slaves[0] if len(slaves) == 1 else device


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
