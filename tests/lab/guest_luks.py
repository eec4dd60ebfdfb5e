"""Runs in the emulated machine, as ``python guest_luks.py``: cryptsetup and dm-crypt over an NVMe drive, as the service
calls them, and what sysfs tells of the drive below. Prints what it saw as one JSON object."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.encryption.key_file import open_key
from meshfusion.dpu.encryption.note import Slice
from meshfusion.dpu.slices import device_number, physical_device
from meshfusion.jbof.drives.system.dm_mappings import below_encryption
from meshfusion.jbof.drives.system.luks import Cryptsetup
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.media.deallocation import discard_device_range, zero_device_range
from meshfusion.jbof.media.drive_facts import alignment_bytes, drive_name
from meshfusion.tools.lab.guest_setup.steps import load_modules

KNOWN = bytes(range(256)) * 16
BLOCKS = 64
DEVICE = Path("/dev/nvme0n1")


def main() -> dict[str, object]:
    load_modules("nvme", "dm-crypt")
    luks, folder = Cryptsetup(), Path(tempfile.mkdtemp())
    one, header = Slice(uuid.uuid4(), DEVICE), folder / "header"
    for name in ("key", "wrong"):
        (folder / name).write_bytes(os.urandom(64))
        (folder / name).chmod(0o600)
    report: dict[str, object] = {"problem": luks.device_problem(DEVICE)}
    with open_key(folder / "key") as key, open_key(folder / "wrong") as wrong:
        luks.format(DEVICE, header, key, one.uuid)
        report["raw_after_format"] = any(_read(DEVICE))
        report["wrong_key"] = _error(lambda: luks.open(DEVICE, header, wrong, one.name))
        luks.open(DEVICE, header, key, one.name)
        mapping, path = luks.mapping(one.name), luks.path_of(one.name)
        assert mapping is not None
        report["is_proven"] = (mapping.uuid, mapping.devices) == (one.mapping_uuid, frozenset({device_number(DEVICE)}))
        report["opened_twice"] = _error(lambda: luks.open(DEVICE, header, key, one.name + "-2"))
        report["in_use"] = _error(lambda: os.close(os.open(DEVICE, os.O_RDONLY | os.O_EXCL)))
        report["below"] = str(below_encryption(path))
        report["is_same_drive"] = physical_device(path) == device_number(DEVICE)
        report["names"] = [drive_name(DEVICE), drive_name(path)]
        report["alignments"] = [alignment_bytes(DEVICE, 4096), alignment_bytes(path, 4096)]
        report["sizes"] = [_size(DEVICE), _size(path)]
        _write(path, KNOWN * BLOCKS)
        report["read_back"] = _read(path) == KNOWN * BLOCKS
        report["raw_has_known"] = KNOWN[:64] in _read(DEVICE)
        with path.open("r+b") as opened:
            length = len(KNOWN) * BLOCKS // 2
            report["discarded"] = discard_device_range(opened.fileno(), 0, length)
            report["reads_zeros_when_discarded"] = not any(_read(path)[:length])
            report["raw_reads_zeros_when_discarded"] = not any(_read(DEVICE)[:length])
            report["zeroed"] = zero_device_range(opened.fileno(), 0, length)
            os.fsync(opened.fileno())
            report["reads_zeros_when_zeroed"] = not any(_read(path)[:length])
            report["raw_reads_zeros_when_zeroed"] = not any(_read(DEVICE)[:length])
            report["closed_while_open"] = luks.close(one.name)
        report["closed"] = luks.close(one.name)
        report["closed_again"] = luks.close(one.name)
        report["is_gone"] = luks.mapping(one.name) is None and not path.exists()
        luks.erase(header)
        report["after_erase"] = _error(lambda: luks.open(DEVICE, header, key, one.name))
    return report | {"left": []}


def _error(call: object) -> str:
    assert callable(call)
    try:
        call()
    except (MeshFusionError, OSError) as error:
        return str(error)
    return ""


def _size(path: Path) -> int:
    with path.open("rb") as opened:
        return opened.seek(0, os.SEEK_END)


def _write(path: Path, content: bytes) -> None:
    with path.open("r+b") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> bytes:
    """Its first blocks, from the drive."""
    with path.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return opened.read(len(KNOWN) * BLOCKS)


if __name__ == "__main__":
    print(json.dumps(main()))
