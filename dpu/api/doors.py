"""At which addresses a service asks who calls, and where the file system has answered that already.

A unix socket has mode 0600: who connects is the user of the service, or root, who can read its files, its keys and its
memory anyway. So beside addresses where callers say who they are, nobody is asked on the socket; a service that listens
there alone, and has tokens, means these for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfusion.dpu.api.address import TcpAddress, UnixAddress
from meshfusion.dpu.api.security.guard import Guard

Address = UnixAddress | TcpAddress


@dataclass(frozen=True, slots=True)
class Door:
    """Addresses whose callers are one guard's."""

    guard: Guard
    addresses: tuple[Address, ...]


def doors_of(addresses: Sequence[Address], guard: Guard) -> tuple[Door, ...]:
    """``guard``: of those that are asked."""
    sockets = tuple(address for address in addresses if isinstance(address, UnixAddress))
    others = tuple(address for address in addresses if not isinstance(address, UnixAddress))
    if not sockets or not others or not guard.asks_who_calls:
        return (Door(guard, tuple(addresses)),)
    return Door(guard, others), Door(guard.of_the_socket(), sockets)


def nearest(addresses: Sequence[Address]) -> Address:
    """By which callers on the service's machine best reach it: they need nothing to show on a socket."""
    return next((address for address in addresses if isinstance(address, UnixAddress)), addresses[0])
