"""A sysfs of the tests, laid out as Linux 6.1 showed it for QEMU's drives (with multipath), and SES by its driver."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def add_drive(
    root: Path,
    number: int,
    pci: str = "0000:00:03.0/0000:04:00.0",
    *,
    transport: str = "pcie",
    state: str = "live",
    multipath: bool = True,
    nsid: int = 1,
) -> Path:
    """Its device's folder. ``pci``: the bridges above it, and its address."""
    device = root / "devices/pci0000:00" / pci
    controller = device / f"nvme/nvme{number}"
    address = Path(pci).name
    for name, text in {"transport": transport, "state": state, "address": address, "cntlid": "0"}.items():
        write(controller / name, f"{text}\n")
    link(root / f"class/nvme/nvme{number}", controller)
    if multipath:
        subsystem = root / f"devices/virtual/nvme-subsystem/nvme-subsys{number}"
        link(subsystem / f"nvme{number}", controller)
        block = subsystem / f"nvme{number}n1"
        write(controller / f"nvme{number}c0n1/hidden", "1\n")
        link(root / f"block/nvme{number}c0n1", controller / f"nvme{number}c0n1")
        link(block / "device", subsystem)
    else:
        block = controller / f"nvme{number}n1"
        link(block / "device", controller)
    write(block / "hidden", "0\n")
    write(block / "nsid", f"{nsid}\n")
    (block / "holders").mkdir()
    link(root / f"block/nvme{number}n1", block)
    return device


def add_ses_slot(root: Path, device: Path, enclosure: str = "7:0:0:0", slot: str = "12") -> Path:
    """The file of its light."""
    folder = root / "devices/pci0000:80/enclosure" / enclosure / f"Slot {slot}"
    write(folder / "slot", f"{slot}\n")
    write(folder / "locate", "0\n")
    link(folder / "device", device)
    if not (root / "class/enclosure" / enclosure).exists():
        link(root / "class/enclosure" / enclosure, folder.parent)
    return folder / "locate"
