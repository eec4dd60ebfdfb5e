"""Slots and their lights, as Linux shows them in sysfs.

Three places may know a drive's slot: SES enclosures (``class/enclosure/*/SLOT`` with a ``device`` link and the files
``locate`` and ``slot``: drivers/misc/enclosure.c), the lights of PCIe Native Enclosure Management
(``class/leds/ADDRESS:enclosure:locate/brightness``: drivers/pci/npem.c, Linux 6.13), and PCI hot-plug slots
(``bus/pci/slots/NAME/address``), which have a name and no light.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshfusion.jbof.drives.system.sysfs import text
from meshfusion.jbof.errors import MediaError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Slot:
    """``light``: the file that switches its light on with 1 and off with 0; None where there is none that we know."""

    name: str
    enclosure: str = ""
    light: Path | None = None


def slot_of(root: Path, pci_address: str) -> Slot:
    """Of the drive at ``pci_address``; without a name where nothing knows one. ``root``: ``/sys``."""
    for folder in _ses_slots(root, pci_address):
        number = text(folder / "slot")
        light = folder / "locate"
        return Slot(number or folder.name, folder.parent.name, light if light.exists() else None)
    npem = root / "class/leds" / f"{pci_address}:enclosure:locate" / "brightness"
    light_file = npem if npem.exists() else None
    return Slot(_hotplug_name(root, pci_address), light=light_file)


def blink(slot: Slot, drive: str, *, on: bool) -> None:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` where there is no light, and
    :class:`~meshfusion.jbof.errors.MediaError` when it cannot be switched.
    """
    if slot.light is None:
        raise UnsupportedError(
            f"the light of drive {drive} cannot be switched: this machine shows neither an SES enclosure nor PCIe "
            "enclosure management for its slot",
            next_step=f"Find it by its serial number; its slot is {slot.name or 'not known'}. With SES, load the "
            "kernel's module ses.",
        )
    try:
        slot.light.write_text("1" if on else "0")
    except OSError as error:
        raise MediaError(
            f"the light of drive {drive} cannot be switched: {slot.light}: {error.strerror}",
            next_step="Run this as root.",
        ) from error


def _ses_slots(root: Path, pci_address: str) -> Iterator[Path]:
    """The link is to the drive's own device, or to one below its place on the bus."""
    for link in sorted((root / "class/enclosure").glob("*/*/device")):
        if pci_address in link.resolve().parts:
            yield link.parent


def _hotplug_name(root: Path, pci_address: str) -> str:
    """Addresses of slots have no function: ``0000:04:00``."""
    place = pci_address.rpartition(".")[0]
    for slot in sorted((root / "bus/pci/slots").glob("*")):
        if place and text(slot / "address") == place:
            return slot.name
    return ""
