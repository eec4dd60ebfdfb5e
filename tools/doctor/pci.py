"""Devices on PCI Express, as sysfs shows them: which there are, how they are attached, how near they are to each other.

Classes are those of the PCI Code and ID Assignment Specification; ``current_link_width`` and its like are in the
kernel's Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshfusion.host.path.flexpath.locality import Distance, gpu_distance
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.doctor.machine import Machine
from meshfusion.tools.mfctl.findings import Finding, State

_DEVICES: Final = "sys/bus/pci/devices"
_GPU_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# VGA-compatible, 3D controller, processing accelerator. Of Intel and AMD only what is made for computing: others are
# the graphics of a processor or of a server's console.
_DISPLAY: Final = ("0x0300", "0x0302")
_COMPUTE: Final = ("0x0302", "0x0380", "0x1200")
_NODE_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class PciDevice:
    """``address``: such as 0000:3b:00.0."""

    address: str
    vendor: str
    name: str

    @property
    def folder(self) -> str:
        return f"{_DEVICES}/{self.address}"


def gpus(machine: Machine) -> tuple[PciDevice, ...]:
    """Raises UnseenError where PCI devices are not shown."""
    machine.need("sys", "PCI devices")
    return tuple(_gpus(machine))


def _gpus(machine: Machine) -> Iterator[PciDevice]:
    for address in machine.names(_DEVICES):
        vendor = machine.text(f"{_DEVICES}/{address}/vendor") or ""
        kind = (machine.text(f"{_DEVICES}/{address}/class") or "")[:6]
        maker = _GPU_VENDORS.get(vendor)
        if maker is not None and kind in (_DISPLAY if maker == "NVIDIA" else _COMPUTE):
            yield PciDevice(address, maker, f"{maker} GPU {address}")


def rdma_devices(machine: Machine) -> tuple[PciDevice, ...]:
    """Those that are on PCI; a soft one is not."""
    return tuple(_of_class(machine, "infiniband"))


def nvme_controllers(machine: Machine) -> tuple[PciDevice, ...]:
    return tuple(_of_class(machine, "nvme"))


def _of_class(machine: Machine, kind: str) -> Iterator[PciDevice]:
    for name in machine.names(f"sys/class/{kind}"):
        device = machine.target(f"sys/class/{kind}/{name}/device")
        if device is not None and machine.has(f"{_DEVICES}/{device.name}"):
            vendor = machine.text(f"{_DEVICES}/{device.name}/vendor") or ""
            yield PciDevice(device.name, vendor, name)


def check_links(machine: Machine) -> Iterator[Finding]:
    """Is each drive and RDMA device attached with all the lanes and the speed that it has?"""
    for device in (*rdma_devices(machine), *nvme_controllers(machine)):
        width, most = (machine.number(f"{device.folder}/{which}_link_width") for which in ("current", "max"))
        speed, fastest = (machine.text(f"{device.folder}/{which}_link_speed") for which in ("current", "max"))
        if not width or not most or not speed or "Unknown" in speed:
            continue
        check, found = f"pcie {device.name}", f"{device.address}: x{width} at {speed}"
        if width < most or speed != fastest:
            yield Finding(
                check,
                State.WARN,
                f"{found}; it could have x{most} at {fastest}",
                "Put it into a slot with as many lanes, and look whether it is seated, and what the firmware limits.",
            )
        else:
            yield Finding(check, State.OK, found)


def check_locality(machine: Machine) -> Iterator[Finding]:
    """Of each GPU, or where there is none of each drive, to the RDMA devices."""
    nics = rdma_devices(machine)
    found_gpus = gpus(machine)
    if not nics:
        return
    for gpu in found_gpus:
        yield _gpu_finding(machine, gpu, nics)
    if not found_gpus:
        yield from _drive_findings(machine, nics)


def _gpu_finding(machine: Machine, gpu: PciDevice, nics: tuple[PciDevice, ...]) -> Finding:
    check = f"pcie {gpu.address}"
    try:
        ways = {nic.name: gpu_distance(gpu.address, nic.name, sysfs=machine.sysfs) for nic in nics}
    except MeshFusionError as error:
        return Finding(check, State.UNSEEN, error.message, error.next_step)
    told = f"{gpu.name}: " + ", ".join(f"{name} ({_WORDS[way]})" for name, way in ways.items())
    best = min(ways.values(), key=lambda way: way.weight)
    if best is Distance.SYSTEM:
        remedy = "Move the card to a slot of the GPU's socket: between sockets half of the bandwidth or more is lost."
        return Finding(check, State.WARN, told, remedy)
    if best is Distance.UNKNOWN:
        remedy = "Look at nvidia-smi topo -m: this machine does not show its NUMA nodes."
        return Finding(check, State.UNSEEN, told, remedy)
    return Finding(check, State.OK if best is Distance.SWITCH else State.INFO, told)


_WORDS: Final = {
    Distance.SWITCH: "same root port or switch",
    Distance.HOST_BRIDGE: "same host bridge",
    Distance.NODE: "same NUMA node",
    Distance.SYSTEM: "another socket",
    Distance.UNKNOWN: "how near is not shown",
}


def _drive_findings(machine: Machine, nics: tuple[PciDevice, ...]) -> Iterator[Finding]:
    """Drives are many: one finding for all that are on the socket of no RDMA device."""
    nodes = {nic.name: _node(machine, nic) for nic in nics}
    drives = {drive.name: _node(machine, drive) for drive in nvme_controllers(machine)}
    if not drives:
        return
    if _NODE_UNKNOWN in (*nodes.values(), *drives.values()):
        if len(machine.names("sys/devices/system/node")) > 1 and machine.has("sys/devices/system/node/node1"):
            yield Finding("pcie drives", State.UNSEEN, "the NUMA nodes of drives or ports are not shown", "lstopo")
        return
    far = [name for name, node in drives.items() if node not in nodes.values()]
    if far:
        ports = ", ".join(f"{name} on {node}" for name, node in nodes.items())
        cause = f"on a NUMA node without an RDMA device: {', '.join(far)}; {ports}"
        yield Finding("pcie drives", State.WARN, cause, "Spread drives and network cards over the sockets alike.")
    else:
        yield Finding("pcie drives", State.OK, f"{len(drives)} drives, each on a NUMA node with an RDMA device")


def _node(machine: Machine, device: PciDevice) -> int:
    found = machine.number(f"{device.folder}/numa_node")
    return _NODE_UNKNOWN if found is None else found
