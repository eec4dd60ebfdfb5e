"""What Linux says of its NVMe drives in sysfs. Only reads; ``root`` is ``/sys``, or a tree of the tests.

With multipath (the default) ``/sys/block/nvme0n1/device`` is the subsystem, with its controllers inside; without, it is
the controller. ``nvme0c1n1`` is one path of ``nvme0n1``, and hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NAMESPACE = re.compile(r"nvme\d+n\d+")
_CONTROLLER = re.compile(r"nvme\d+")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Controller:
    """``address``: on the PCI bus, or of the transport. ``port``: the PCI bridge above it; "" if there is none."""

    name: str
    transport: str
    address: str
    state: str
    port: str


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """``controllers``: the ways to it. ``users``: partitions of it, and what is stacked on it (dm, md)."""

    name: str
    nsid: int
    controllers: tuple[Controller, ...]
    users: tuple[str, ...]

    @property
    def live(self) -> Controller | None:
        return next((controller for controller in self.controllers if controller.state == "live"), None)


def nvme_namespaces(root: Path) -> list[BlockNamespace]:
    """In order of their names."""
    return list(_namespaces(root / "block"))


def _namespaces(folder: Path) -> Iterator[BlockNamespace]:
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    for name in filter(_NAMESPACE.fullmatch, names):
        block = folder / name
        if text(block / "hidden") == "1":
            continue
        yield BlockNamespace(name, _number(block / "nsid", 1), tuple(_controllers(block / "device")), _users(block))


def _controllers(device: Path) -> Iterator[Controller]:
    try:
        resolved = device.resolve(strict=True)
    except OSError:  # it went away
        return
    folders = (
        [resolved]
        if (resolved / "cntlid").exists() or (resolved / "transport").exists()
        else [entry.resolve() for entry in sorted(resolved.iterdir()) if _CONTROLLER.fullmatch(entry.name)]
    )
    for folder in folders:
        yield Controller(
            name=folder.name,
            transport=text(folder / "transport"),
            address=text(folder / "address"),
            state=text(folder / "state"),
            port=_port_above(folder),
        )


def _port_above(controller: Path) -> str:
    """The bridge that the drive hangs on: ``.../0000:00:03.0/0000:04:00.0/nvme/nvme0`` -> ``0000:00:03.0``."""
    addresses = [part for part in controller.parts if _PCI_ADDRESS.fullmatch(part)]
    return addresses[-2] if len(addresses) > 1 else ""


def _users(block: Path) -> tuple[str, ...]:
    partitions = [entry.name for entry in block.iterdir() if (entry / "partition").exists()]
    holders = [entry.name for entry in (block / "holders").iterdir()] if (block / "holders").is_dir() else []
    return tuple(sorted({*partitions, *holders}))


def text(path: Path) -> str:
    """An attribute without its padding; "" if it is not there or cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, default: int) -> int:
    value = text(path)
    return int(value) if value.isdigit() else default
