"""Whether a caller is on this machine, by the address that its call came from."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import unquote


def is_on_this_machine(peer: str) -> bool:
    """``peer``: as gRPC names it, such as ``ipv4:10.0.0.1:4711`` or ``unix:``. False when that cannot be told, and for
    a container with a network of its own, which is another machine to us."""
    if peer.startswith("unix"):
        return True
    family, _, rest = unquote(peer).partition(":")
    text = rest.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        family, address = "ipv4", address.ipv4_mapped
    return address.is_loopback or _is_ours(socket.AF_INET6 if family == "ipv6" else socket.AF_INET, str(address))


def _is_ours(family: socket.AddressFamily, address: str) -> bool:
    """The kernel lets a socket have an address of this machine only."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
