"""Where ``mfctl jbof`` looks for drives: this machine, an SPDK process, or files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from meshfusion.jbof.drives.domain import DomainMap, domain_map
from meshfusion.jbof.drives.drive import Drive, Found
from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step

SYSFS = Path("/sys")
DEVICES = Path("/dev")
_CONNECT_S = 5.0


def drive_options(command: F) -> F:
    """Adds ``--file``, ``--spdk`` and ``--domains``; the command gets ``files``, ``spdk`` and ``domains``."""
    command = click.option(
        "--domains", type=PATH, metavar="FILE",
        help="YAML: names of port, dpu, enclosure and rack for `all`, by `slots` and by `serials`.",
    )(command)  # fmt: skip
    command = click.option(
        "--spdk", type=PATH, metavar="SOCKET", help="Ask the SPDK process at this socket for its drives."
    )(command)
    return click.option(
        "--file", "files", type=PATH, multiple=True, metavar="PATH",
        help="Take files, block devices, or the files of a folder as drives, instead of this machine's; repeatable.",
    )(command)  # fmt: skip


def discovered(files: tuple[Path, ...], spdk: Path | None, domains: Path | None) -> Found:
    if files and spdk is not None:
        raise click.UsageError("Give --file or --spdk, not both.")
    names = _domains(domains)
    for file in files:
        if not os.path.lexists(file):
            raise MediaError(f"{file} does not exist", next_step="Name a file, a block device or a folder of files.")
    if files:
        from meshfusion.jbof.drives.system.files import FileDrives

        return FileDrives(files, names).discover()
    if spdk is not None:
        return _spdk_drives(spdk, names)
    from meshfusion.jbof.drives.system.server import ServerDrives

    return ServerDrives(names, root=SYSFS, devices=DEVICES).discover()


def find_drive(found: Found, name: str) -> Drive:
    """By key, serial number, slot, or the device it is now. Raises MeshFusionError unless it is exactly one."""
    named = [
        drive
        for drive in found.drives
        if name in (drive.identity.key, drive.identity.serial, drive.identity.unique, drive.location.slot, drive.where)
    ]
    if len(named) == 1:
        return named[0]
    if named:
        keys = ", ".join(drive.identity.key for drive in named)
        raise MeshFusionError(f"{name} names {len(named)} drives: {keys}", next_step="Name one by its key.")
    passed = next((entry for entry in found.passed if name in entry.where), None)
    if passed is not None:
        raise MeshFusionError(f"{name} is no drive for us: {passed.reason}", next_step=passed.next_step)
    raise MeshFusionError(f"there is no drive {name}", next_step="See `mfctl jbof list` for those that there are.")


def _domains(path: Path | None) -> DomainMap:
    if path is None:
        return DomainMap()
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: no such file", next_step="Correct the path; docs/drives.md shows such a file.")
    from meshfusion.dpu.yaml_document import read_yaml

    try:
        return domain_map(read_yaml(path).data)
    except ConfigError as error:
        if str(path) in error.message:
            raise
        raise ConfigError(f"{path}: {error.message}", next_step=error.next_step) from error


def _spdk_drives(path: Path, names: DomainMap) -> Found:
    try:
        from meshfusion.dpu.export.spdk.client import SpdkClient
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"SPDK's Python package is missing: {error.name}", next_step="Install it: pip install 'meshfusion[dpu]'."
        ) from error
    from meshfusion.dpu.export.spdk.drives import SpdkDrives

    client = SpdkClient(path)
    try:
        client.connect(_CONNECT_S)
        return SpdkDrives(client, socket.gethostname(), names).discover()
    finally:
        client.close()
