"""The kernel's NVMe-oF target, over its configfs tree (Linux: drivers/nvme/target/configfs.c)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.guest_setup.steps import (
    Link,
    MakeDirectory,
    Remove,
    Step,
    Write,
    carry_out,
    load_modules,
    try_all,
)

NVMET: Final = Path("/sys/kernel/config/nvmet")
SERVICE: Final = 4420
"""The port that IANA gave to NVMe over Fabrics."""


@dataclass(frozen=True, slots=True)
class Subsystem:
    """``devices`` become namespaces 1, 2, ... ``hosts``: who may connect; None for everybody."""

    nqn: str
    devices: tuple[Path, ...]
    hosts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """An address where subsystems are reached. ``number``: its name in configfs, and its port ID in discovery."""

    number: int
    address: str
    nqns: tuple[str, ...]
    transport: str = "rdma"
    service: int = SERVICE


def subsystem_steps(subsystem: Subsystem, root: Path = NVMET) -> list[Step]:
    folder = root / "subsystems" / subsystem.nqn
    steps: list[Step] = [
        MakeDirectory(folder),
        Write(folder / "attr_allow_any_host", "1" if subsystem.hosts is None else "0"),
    ]
    for host in subsystem.hosts or ():
        steps += allow_host_steps(subsystem.nqn, host, root)
    for number, device in enumerate(subsystem.devices, start=1):
        namespace = folder / "namespaces" / str(number)
        steps += [
            MakeDirectory(namespace),
            Write(namespace / "device_path", str(device)),
            Write(namespace / "enable", "1"),
        ]
    return steps


def allow_host_steps(nqn: str, host: str, root: Path = NVMET) -> list[Step]:
    """A host's folder is shared by the subsystems that allow it."""
    folder = root / "hosts" / host
    make: list[Step] = [] if folder.exists() else [MakeDirectory(folder)]
    return [*make, Link(root / "subsystems" / nqn / "allowed_hosts" / host, folder)]


def port_steps(port: Port, root: Path = NVMET) -> list[Step]:
    """The port starts to listen with its first subsystem."""
    folder = root / "ports" / str(port.number)
    return [
        MakeDirectory(folder),
        Write(folder / "addr_adrfam", "ipv4"),
        Write(folder / "addr_trtype", port.transport),
        Write(folder / "addr_traddr", port.address),
        Write(folder / "addr_trsvcid", str(port.service)),
        *offer_steps(port, root),
    ]


def offer_steps(port: Port, root: Path = NVMET) -> list[Step]:
    """Its subsystems are reached there from now on."""
    listed = root / "ports" / str(port.number) / "subsystems"
    return [Link(listed / nqn, root / "subsystems" / nqn) for nqn in port.nqns]


def withdraw_steps(port: Port, root: Path = NVMET) -> list[Step]:
    """Undoes :func:`offer_steps`: connected hosts lose their connections, and it stops to listen."""
    return [Remove(root / "ports" / str(port.number) / "subsystems" / nqn) for nqn in port.nqns]


def export(subsystems: Iterable[Subsystem], ports: Iterable[Port]) -> None:
    """Raises LabError, also when something of these names exists."""
    ports = tuple(ports)
    load_modules("nvmet", *(f"nvmet-{transport}" for transport in {port.transport for port in ports}))
    for subsystem in subsystems:
        carry_out(subsystem_steps(subsystem))
    for port in ports:
        carry_out(port_steps(port))


def remove_exports(root: Path = NVMET) -> list[str]:
    """Everything that is exported; returns what could not be removed. Connected hosts lose their connections."""
    return try_all(removal_steps(root))


def removal_steps(root: Path = NVMET) -> list[Step]:
    """For all that is there, from the outside in: links before what they point to, namespaces before subsystems."""
    steps: list[Step] = []
    for port in _entries(root / "ports"):
        steps += [Remove(link) for link in _entries(port / "subsystems")]
        steps.append(Remove(port))
    for subsystem in _entries(root / "subsystems"):
        steps += [Remove(link) for link in _entries(subsystem / "allowed_hosts")]
        for namespace in _entries(subsystem / "namespaces"):
            steps += [Write(namespace / "enable", "0"), Remove(namespace)]
        steps.append(Remove(subsystem))
    return [*steps, *(Remove(host) for host in _entries(root / "hosts"))]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
