"""What the host of a card knows: its network, the card's ports and firmware. One script tells, here or over ssh."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.image.host_network import NetworkPort

SCRIPT: Final = """
for net in /sys/class/net/*; do
    name=${net##*/}
    [ -e "$net" ] || continue
    device=$(readlink -f "$net/device/physfn" 2>/dev/null)
    [ -d "$device" ] || device=$(readlink -f "$net/device" 2>/dev/null)
    [ -d "$device" ] || device=
    echo "net $name $device"
    for lower in "$net"/lower_*; do [ -e "$lower" ] && echo "lower $name ${lower##*/lower_}"; done
    [ "$(cat "$net/carrier" 2>/dev/null)" = 1 ] && echo "carrier $name"
done
for rdma in /sys/class/infiniband/*; do
    [ -e "$rdma" ] || continue
    echo "psid $(readlink -f "$rdma/device") $(cat "$rdma/board_id" 2>/dev/null)"
    echo "firmware $(readlink -f "$rdma/device") $(cat "$rdma/fw_ver" 2>/dev/null)"
done
for pci in /sys/bus/pci/devices/*; do
    case "$(cat "$pci/class" 2>/dev/null)" in
        0x02*) driver=$(readlink -f "$pci/driver" 2>/dev/null); echo "port ${pci##*/} ${driver##*/}" ;;
    esac
done
ip -o addr show 2>/dev/null | sed 's/^/addr /'
{ ip -o -4 route show table all default; ip -o -6 route show table all default; } 2>/dev/null | sed 's/^/route /'
echo "session $SSH_CONNECTION"
"""

_PCI: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ADDRESS: Final = re.compile(r"^\d+:\s+(\S+?)\s+inet6?\s+([0-9a-fA-F.:]+)/")
_DEVICE: Final = re.compile(r"\bdev (\S+)")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """``psids``, ``firmware``: by PCI address of the port. ``drivers``: of network ports by PCI address, "" for none.

    ``carriers``: interfaces whose link is up. ``addresses``: of the host.
    """

    ports: tuple[NetworkPort, ...]
    carriers: frozenset[str]
    addresses: frozenset[str]
    psids: dict[str, str]
    firmware: dict[str, str]
    drivers: dict[str, str]

    def psid_of(self, pci_device: str) -> str:
        return _of_card(self.psids, pci_device)

    def firmware_of(self, pci_device: str) -> str:
        return _of_card(self.firmware, pci_device)

    def unbound_ports(self, pci_device: str) -> tuple[str, ...] | None:
        """The card's network ports without a driver, or all of it where the host sees none. None: not on PCI."""
        if not pci_device:
            return None
        ports = {address: driver for address, driver in self.drivers.items() if address.startswith(f"{pci_device}.")}
        if not ports:
            return (pci_device,)
        return tuple(sorted(address for address, driver in ports.items() if driver != "mlx5_core"))


def parse_facts(text: str, session: str = "") -> HostFacts:
    """What :data:`SCRIPT` printed. ``session``: SSH_CONNECTION of whoever asks, where the script cannot know it."""
    devices: dict[str, str] = {}
    lower: dict[str, list[str]] = defaultdict(list)
    by_address: dict[str, str] = {}
    psids: dict[str, str] = {}
    firmware: dict[str, str] = {}
    drivers: dict[str, str] = {}
    carriers, routed = set(), set()
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        words = rest.split()
        match kind, words:
            case "net", [name, *path]:
                devices[name] = path[0] if path else ""
            case "lower", [name, below]:
                lower[name].append(below)
            case "carrier", [name]:
                carriers.add(name)
            case "psid", [path_, psid]:
                psids[_pci(path_)] = psid
            case "firmware", [path_, version]:
                firmware[_pci(path_)] = version
            case "port", [address, *driver]:
                drivers[address.lower()] = driver[0] if driver else ""
            case "addr", _:
                if found := _ADDRESS.match(rest):
                    by_address[found.group(2)] = found.group(1).partition("@")[0]
            case "route", ["default", *_]:
                routed |= set(_DEVICE.findall(rest))
            case "session", [_, _, own, *_]:
                session = session or rest
    own = session.split()[2] if len(session.split()) == 4 else ""
    ports = tuple(
        NetworkPort(
            name=name,
            pci_address=_pci(path),
            is_virtual=not path,
            lower=tuple(lower[name]),
            has_default_route=name in routed,
            carries_operator=bool(own) and by_address.get(own) == name,
        )
        for name, path in devices.items()
    )
    return HostFacts(ports, frozenset(carriers), frozenset(by_address), psids, firmware, drivers)


def _pci(path: str) -> str:
    """The last PCI address in the path of a device: of a USB device, that of its controller."""
    found = _PCI.findall(path.lower())
    return found[-1] if found else ""


def _of_card(values: dict[str, str], pci_device: str) -> str:
    if not pci_device:
        return ""
    return next((value for address, value in sorted(values.items()) if address.startswith(f"{pci_device}.")), "")
