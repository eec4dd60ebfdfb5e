"""What a block device lies on, as Linux tells it: a partition on its disk, a logical volume on its physical ones.

Devices are named by their numbers, "259:3", as sysfs does (Documentation/ABI/stable/sysfs-block: ``dev``, ``slaves``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")


def block_devices_under(path: Path, sysfs: Path = SYSFS) -> frozenset[str]:
    """All that the device at ``path`` lies on, not itself. Nothing of a file, and of what sysfs does not know."""
    return _all_under(device_number(path), sysfs)


def devices_of_filesystem(path: Path, sysfs: Path = SYSFS) -> frozenset[str]:
    """Those that the filesystem of the file at ``path`` lies on; of one in memory or over a network, none that sysfs
    knows. Raises OSError."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return _all_under(number, sysfs) | {number}


def _all_under(device: str, sysfs: Path) -> frozenset[str]:
    found: set[str] = set()
    waiting = _directly_under(device, sysfs) if device else set()
    while waiting:
        next_one = waiting.pop()
        if next_one not in found:
            found.add(next_one)
            waiting |= _directly_under(next_one, sysfs)
    return frozenset(found)


def physical_device(path: Path, sysfs: Path = SYSFS) -> str:
    """The one drive that the device at ``path`` is, or lies on; "" when it lies on several, or is no device."""
    device = device_number(path)
    if not device:
        return ""
    lowest = {each for each in (device, *block_devices_under(path, sysfs)) if not _directly_under(each, sysfs)}
    return lowest.pop() if len(lowest) == 1 else ""


def device_number(path: Path) -> str:
    """Empty for what is no block device."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" if path.is_block_device() else ""


def _directly_under(device: str, sysfs: Path) -> set[str]:
    folder = (sysfs / "dev" / "block" / device).resolve()
    if (folder / "partition").exists():
        return _number(folder.parent)
    try:
        slaves = sorted((folder / "slaves").iterdir())
    except OSError:
        return set()
    return set().union(*map(_number, slaves))


def _number(folder: Path) -> set[str]:
    try:
        return {(folder / "dev").read_text().strip()}
    except OSError:
        return set()
