"""Block devices to export: in the guest's memory, or over a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.guest_setup.steps import (
    MakeDirectory,
    Remove,
    Step,
    Write,
    carry_out,
    load_modules,
    output_of,
    try_all,
)

NULL_BLK: Final = Path("/sys/kernel/config/nullb")
BLOCK_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """A null_blk device that keeps what is written. ``zone_mib``: 0 for an ordinary one, else it is zoned."""

    name: str
    size_mib: int
    block_bytes: int = BLOCK_BYTES
    zone_mib: int = 0
    zone_max_open: int = 8

    @property
    def path(self) -> Path:
        return Path("/dev") / self.name


def memory_device_steps(device: MemoryDevice, root: Path = NULL_BLK) -> list[Step]:
    """By Documentation/block/null_blk.rst of Linux; ``power`` comes last, for the rest cannot change under it."""
    folder = root / device.name
    attributes: dict[str, int] = {
        "size": device.size_mib,
        "blocksize": device.block_bytes,
        "memory_backed": 1,
    }
    if device.zone_mib:
        attributes |= {
            "zoned": 1,
            "zone_size": device.zone_mib,
            "zone_max_open": device.zone_max_open,
            "zone_max_active": device.zone_max_open,
        }
    else:
        attributes["discard"] = 1  # zoned null_blk has none
    attributes["power"] = 1
    return [MakeDirectory(folder), *(Write(folder / name, str(value)) for name, value in attributes.items())]


def make_memory_device(device: MemoryDevice) -> Path:
    """Its path. Raises LabError."""
    if not NULL_BLK.exists():
        load_modules("null_blk")
    carry_out(memory_device_steps(device))
    return device.path


def make_file_device(file: Path, size_mib: int, block_bytes: int = BLOCK_BYTES) -> Path:
    """A loop device over ``file``, which is made, or grown to this size. Its path. Raises LabError.

    Discards punch holes into the file where its file system can do that (tmpfs, ext4).
    """
    load_modules("loop")
    with file.open("ab") as content:
        content.truncate(max(size_mib << 20, content.tell()))
    return Path(output_of("losetup", "--find", "--show", "--sector-size", str(block_bytes), str(file)).strip())


def remove_devices(root: Path = NULL_BLK) -> list[str]:
    """Every null_blk device made over configfs, every loop device; returns what could not be removed."""
    devices = [folder for folder in sorted(root.glob("*")) if folder.is_dir()]
    failures = try_all(step for d in devices for step in (Write(d / "power", "0"), Remove(d)))
    output_of("losetup", "--detach-all")
    return failures
