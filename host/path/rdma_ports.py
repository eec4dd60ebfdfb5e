"""This machine's RDMA ports, and which of them lead to which portal."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from meshfusion.dpu.api.types import Portal
from meshfusion.host.path.flexpath.addresses import ROUTED, PathAddress
from meshfusion.jbof.errors import UnsupportedError

SYSFS: Final = Path("/sys")


class LocalPort(NamedTuple):
    """An address of a network interface that RDMA goes over. ``address``: with its prefix length, 10.0.0.7/24."""

    net_device: str
    address: str


def local_ports(sysfs: Path = SYSFS) -> tuple[LocalPort, ...]:
    """Addresses of the interfaces that an RDMA device belongs to, sorted.

    Sources: Linux, Documentation/ABI/stable/sysfs-class-infiniband (``ports/N/gid_attrs/ndevs``).
    """
    devices = set()
    for entry in sysfs.glob("class/infiniband/*/ports/*/gid_attrs/ndevs/*"):
        try:
            devices.add(entry.read_text().strip())
        except OSError:
            continue  # an entry of the table that is not in use
    ports = set()
    for device, addresses in psutil.net_if_addrs().items():
        if device in devices:
            for found in addresses:
                if text := _with_prefix(found.address, found.netmask):
                    ports.add(LocalPort(device, text))
    return tuple(sorted(ports))


def _with_prefix(address: str, netmask: str | None) -> str:
    """Empty for what is no IP address, and for link-local ones, which name no interface when told to others."""
    try:
        plain = ipaddress.ip_address(address.split("%")[0])
        prefix = bin(int(ipaddress.ip_address(netmask))).count("1") if netmask else plain.max_prefixlen
    except ValueError:
        return ""
    return "" if plain.is_link_local else f"{plain}/{prefix}"


def paths_to(portals: Iterable[Portal], ports: Iterable[LocalPort]) -> tuple[PathAddress, ...]:
    """A path for each portal and each port in its subnet; where there is none, one over whatever the kernel routes by.

    A port's own address is no way to itself, unless it is the only one. Raises
    :class:`~meshfusion.jbof.errors.UnsupportedError` when no portal speaks RDMA.
    """
    ports, wanted = tuple(ports), [portal for portal in portals if portal.transport == "rdma"]
    if not wanted:
        raise UnsupportedError(
            "the service exports its data, but not over RDMA", next_step="add an rdma:// portal to its exports"
        )
    paths = []
    for portal in wanted:
        near = [port for port in ports if _is_near(portal.address, port)]
        others = [port for port in near if port.address.split("/")[0] != portal.address]
        for port in others:
            source = port.address.split("/")[0]
            paths.append(PathAddress(portal.address, portal.service, port.net_device, source))
        if not others:
            device = near[0].net_device if near else ROUTED
            paths.append(PathAddress(portal.address, portal.service, device))
    return tuple(paths)


def _is_near(address: str, port: LocalPort) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(port.address, strict=False)
