"""Whether a caller is on this machine, by the address that its call came from."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import unquote

_DISCARD_PORT: Final = 9


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
    return address.is_loopback or _is_ours(socket.AF_INET6 if family == "ipv6" else socket.AF_INET, address)


def _is_ours(family: socket.AddressFamily, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """From an address of this machine the kernel sends to itself; to another one it sends from one of its own. That it
    lets a socket have an address tells nothing: on some machines (ip_nonlocal_bind) any will do."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            (*_, there), *_ = socket.getaddrinfo(str(address), _DISCARD_PORT, family, probe.type, probe.proto)
            probe.connect(there)  # nothing is sent
            return ipaddress.ip_address(probe.getsockname()[0]).packed == address.packed
    except (OSError, ValueError):
        return False
