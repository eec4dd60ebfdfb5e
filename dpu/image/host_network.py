"""Would the host be cut off if a card's ports went away? Decided from what Linux tells. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NetworkPort:
    """An interface of the host. ``pci_address``: of its device, ``0000:83:00.0``, of a virtual function that of the
    physical one; "" where there is none. ``is_virtual``: no device belongs to it.

    ``lower``: interfaces it rests on: members of a bond or bridge, what a VLAN is on. ``has_default_route``: in any
    table. ``carries_operator``: the session that asks for the flash comes in over an address of it.
    """

    name: str
    pci_address: str = ""
    is_virtual: bool = False
    lower: tuple[str, ...] = ()
    has_default_route: bool = False
    carries_operator: bool = False


@dataclass(frozen=True, slots=True)
class Isolation:
    """What would be lost: names of interfaces. ``is_total``: no other way out of the host would be left."""

    default_routes: tuple[str, ...]
    operators: tuple[str, ...]
    is_total: bool

    @property
    def is_harmful(self) -> bool:
        return self.is_total or bool(self.operators)


def isolation(ports: Iterable[NetworkPort], pci_device: str) -> Isolation:
    """What the host loses with the card at ``pci_device`` (``0000:83:00``, without a function).

    An interface goes with the card when everything it rests on does. One with a default route that does not go is a
    way out that is left, unless nothing shows what it rests on: a tunnel may well end in the card.
    """
    by_name = {port.name: port for port in ports}
    lost = {name for name in by_name if _goes(name, by_name, pci_device, frozenset())}
    routed = [port for port in by_name.values() if port.has_default_route]
    lost_routes = tuple(sorted(port.name for port in routed if port.name in lost))
    left = [port for port in routed if port.name not in lost and (port.lower or not port.is_virtual)]
    operators = tuple(sorted(port.name for port in by_name.values() if port.carries_operator and port.name in lost))
    return Isolation(lost_routes, operators, bool(lost_routes) and not left)


def _goes(name: str, by_name: dict[str, NetworkPort], pci_device: str, above: frozenset[str]) -> bool:
    port = by_name.get(name)
    if port is None or name in above:
        return False
    if port.pci_address:
        return port.pci_address.lower().startswith(f"{pci_device}.")
    lower = [_goes(other, by_name, pci_device, above | {name}) for other in port.lower]
    return bool(lower) and all(lower)
