"""The device mapper's devices, as sysfs tells of them (Documentation/ABI/testing/sysfs-block-dm). Only reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
_ENCRYPTED: Final = "CRYPT-"  # what libcryptsetup's mappings have their UUIDs begin with


@dataclass(frozen=True, slots=True)
class Mapping:
    """``uuid``: as who made it has named it, for LUKS2 ``CRYPT-LUKS2-<hex>-<name>``. ``devices``: the numbers of those
    directly below, as "259:3"."""

    name: str
    uuid: str
    devices: frozenset[str]


def find_mapping(name: str, sysfs: Path = SYSFS) -> Mapping | None:
    for folder in sorted((sysfs / "block").glob("dm-*")):
        if _text(folder / "dm" / "name") == name:
            below = frozenset(_text(slave / "dev") for slave in _slaves(folder))
            return Mapping(name, _text(folder / "dm" / "uuid"), below)
    return None


def below_encryption(path: Path, sysfs: Path = SYSFS) -> Path:
    """The device whose encrypted form the one at ``path`` is; ``path`` itself, where it is none."""
    try:
        status = path.stat()
    except OSError:
        return path
    if not path.is_block_device():
        return path
    folder = (sysfs / "dev" / "block" / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}").resolve()
    slaves = _slaves(folder)
    if not _text(folder / "dm" / "uuid").startswith(_ENCRYPTED) or len(slaves) != 1:
        return path
    return Path("/dev") / slaves[0].name.replace("!", "/")  # as sysfs writes a slash (Documentation/filesystems/sysfs)


def _slaves(folder: Path) -> list[Path]:
    slaves = folder / "slaves"
    return sorted(slaves.iterdir()) if slaves.is_dir() else []


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
