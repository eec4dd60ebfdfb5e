"""Files in the place of encrypted block devices: headers are real, made and opened by cryptsetup(8), which needs no
device mapper for that; a mapping is a link to the file, and nothing is encrypted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from meshfusion.dpu.encryption.note import KeyPlace
from meshfusion.jbof.drives.system.dm_mappings import Mapping
from meshfusion.jbof.drives.system.luks import Cryptsetup, Key
from meshfusion.jbof.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FileLuks(Cryptsetup):
    """``busy``: names of mappings that somebody has open. ``uuids``: of those that are open, by their names."""

    busy: set[str] = field(default_factory=set)
    uuids: dict[str, str] = field(default_factory=dict)

    def open(self, device: Path, header: Path, key: Key, name: str) -> None:
        if not self.fits(header, key):
            raise ConfigError("the key does not fit", next_step="name another")
        (self.mapper / name).symlink_to(device)
        self.uuids[name] = f"CRYPT-LUKS2-{self.header_of(header).uuid.hex}-{name}"

    def mapping(self, name: str) -> Mapping | None:
        """What lies below has no device number, as files have none."""
        if not (self.mapper / name).is_symlink():
            return None
        return Mapping(name, self.uuids.get(name, ""), frozenset({""}))

    def close(self, name: str) -> bool:
        if name in self.busy:
            return False
        (self.mapper / name).unlink(missing_ok=True)
        return True

    def device_problem(self, device: Path) -> str:
        return ""

    @property
    def open_names(self) -> list[str]:
        return sorted(os.listdir(self.mapper))


def file_luks(folder: Path) -> FileLuks:
    mapper = folder / "mapper"
    mapper.mkdir()
    return FileLuks(mapper=mapper)


def key_file(folder: Path, name: str = "key") -> Path:
    path = folder / name
    path.write_bytes(os.urandom(64))
    path.chmod(0o600)
    return path


def key_place(folder: Path) -> KeyPlace:
    headers = folder / "headers"
    headers.mkdir(mode=0o700)
    return KeyPlace(headers, key_file(folder))


def slice_file(folder: Path, name: str = "slice", size_bytes: int = 8 << 20) -> Path:
    path = folder / name
    path.write_bytes(bytes(size_bytes))
    return path
