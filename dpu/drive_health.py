"""The health of a pool's drives, where they have one: NVMe drives on this machine's bus. Files have none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from meshfusion.jbof.drives.drive import Drive
from meshfusion.jbof.drives.system.dm_mappings import below_encryption
from meshfusion.jbof.drives.system.server import ServerDrives
from meshfusion.jbof.errors import MeshFusionError

# Where each drive of the pool lies, by its number -> those that were found, with what they say.
ReadHealth = Callable[[Mapping[int, Path]], Mapping[int, Drive]]


def read_health(paths: Mapping[int, Path]) -> Mapping[int, Drive]:
    """Those that cannot be asked (without root none can) are left out."""
    devices = {number: below_encryption(path) for number, path in paths.items() if path.is_block_device()}
    if not devices:
        return {}
    try:
        drives = ServerDrives().discover().drives
    except MeshFusionError:
        return {}
    found: dict[int, Drive] = {}
    for number, path in devices.items():
        for drive in drives:
            with contextlib.suppress(OSError):
                if path.samefile(drive.where):
                    found[number] = drive
    return found


def domain_of(drive: Drive) -> tuple[str, ...]:
    """The widest first, without the drive itself; levels whose name is unknown are left out."""
    domain = drive.domain
    return tuple(name for name in (domain.rack, domain.enclosure, domain.dpu, domain.port) if name)
