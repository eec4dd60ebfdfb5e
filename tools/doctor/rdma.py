"""RDMA devices: their links, addresses, MTU, what the fabric lost, and how GPUs give their memory to them.

Attributes are those of the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshfusion.tools.doctor.kernel import DMA_BUF_SINCE, kernel_version
from meshfusion.tools.doctor.machine import Machine
from meshfusion.tools.doctor.pci import gpus
from meshfusion.tools.doctor.role import Role
from meshfusion.tools.mfctl.findings import Finding, State

_CLASS: Final = "sys/class/infiniband"
ROCE_HEADERS_BYTES: Final = 40 + 8 + 12 + 4 + 28 + 4
"""What the kernel takes from an interface's MTU before it rounds down (iboe_get_mtu in include/rdma/ib_addr.h): GRH,
UDP, BTH, XRC, atomic and ICRC."""
RDMA_MTUS: Final = (4096, 2048, 1024, 512, 256)
_LOSSES: Final = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err")
"""Of mlx5; other drivers have others, and say nothing here."""


@dataclass(frozen=True, slots=True)
class Port:
    device: str
    number: str

    @property
    def folder(self) -> str:
        return f"{_CLASS}/{self.device}/ports/{self.number}"

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"


def ports(machine: Machine) -> tuple[Port, ...]:
    """Raises UnseenError where sysfs is not shown."""
    machine.need("sys/class", "RDMA devices")
    return tuple(
        Port(device, number) for device in machine.names(_CLASS) for number in machine.names(f"{_CLASS}/{device}/ports")
    )


def check_rdma(machine: Machine, role: Role) -> Iterator[Finding]:
    found = ports(machine)
    if not found:
        machine.refuse_absence("RDMA devices")
        remedy = "modprobe mlx5_ib, or the driver of the card; ibv_devices shows them then."
        state = State.WARN if role is Role.DPU else State.INFO
        yield Finding("rdma", state, "this machine shows no RDMA device", remedy)
    for port in found:
        yield _link(machine, port)
        if machine.text(f"{port.folder}/link_layer") == "Ethernet":
            yield from _roce(machine, port)
        yield from _losses(machine, port)


def _link(machine: Machine, port: Port) -> Finding:
    state = _word(machine.text(f"{port.folder}/state"))
    physical = _word(machine.text(f"{port.folder}/phys_state"))
    parts = [state or "state not told", physical, machine.text(f"{port.folder}/rate") or ""]
    parts += [machine.text(f"{port.folder}/link_layer") or "", ", ".join(_interfaces(machine, port))]
    firmware = machine.text(f"{_CLASS}/{port.device}/fw_ver")
    told = ", ".join(filter(None, [*parts, f"firmware {firmware}" if firmware else ""]))
    check = f"rdma {port.name}"
    if state == "ACTIVE":
        return Finding(check, State.OK, told)
    if not state:
        return Finding(check, State.UNSEEN, told, "ibv_devinfo")
    return Finding(check, State.WARN, told, _remedy(state, physical, _interfaces(machine, port)))


def _remedy(state: str, physical: str, interfaces: list[str]) -> str:
    interface = interfaces[0] if interfaces else "INTERFACE"
    if physical == "Disabled":
        return f"ip link set {interface} up"
    if state == "INIT" and physical == "LinkUp":
        return "The link is there and nobody set it up: on InfiniBand start a subnet manager."
    return (
        f"Look at cable, transceiver and the switch's port: ethtool {interface}. If it is not meant to be used: none."
    )


def _word(text: str | None) -> str:
    """``4: ACTIVE`` -> ``ACTIVE``."""
    return (text or "").rpartition(":")[2].strip()


def _interfaces(machine: Machine, port: Port) -> list[str]:
    """Of the port, where a card has several: those whose dev_port is its number less one."""
    folder = f"{_CLASS}/{port.device}/device/net"
    names = machine.names(folder)
    of_port = [name for name in names if machine.number(f"{folder}/{name}/dev_port") == int(port.number) - 1]
    return of_port or names


def _roce(machine: Machine, port: Port) -> Iterator[Finding]:
    kinds = [machine.text(f"{port.folder}/gid_attrs/types/{index}") for index in _gid_indexes(machine, port)]
    if kinds and "RoCE v2" not in kinds:
        cause = "no RoCE v2 address: its interface has no IP address, or is down"
        yield Finding(f"rdma {port.name} address", State.WARN, cause, "ip addr add ADDRESS/BITS dev INTERFACE")
    for interface in _interfaces(machine, port):
        yield from _mtu(machine, port, interface)
        yield Finding(
            f"pfc {interface}",
            State.UNSEEN,
            "priority flow control is not shown in sysfs; without it, or ECN, RoCE loses packets when it is busy",
            f"dcb pfc show dev {interface} (or mlnx_qos -i {interface}); and the same on the switch",
        )


def _gid_indexes(machine: Machine, port: Port) -> list[str]:
    return machine.names(f"{port.folder}/gid_attrs/types")


def _mtu(machine: Machine, port: Port, interface: str) -> Iterator[Finding]:
    found = machine.number(f"{_CLASS}/{port.device}/device/net/{interface}/mtu")
    if found is None:
        return
    of_rdma = rdma_mtu(found)
    check, cause = f"mtu {interface}", f"{found}, so RDMA sends {of_rdma} bytes in a packet"
    if of_rdma < RDMA_MTUS[0]:
        remedy = f"ip link set {interface} mtu 9000; the switches and all that it talks to must take that, too."
        yield Finding(check, State.WARN, f"{cause}; {RDMA_MTUS[0]} is the most", remedy)
    else:
        yield Finding(check, State.OK, cause)


def rdma_mtu(interface_mtu: int) -> int:
    """0 where not even the least fits."""
    return next((mtu for mtu in RDMA_MTUS if mtu <= interface_mtu - ROCE_HEADERS_BYTES), 0)


def _losses(machine: Machine, port: Port) -> Iterator[Finding]:
    counts = {name: machine.number(f"{port.folder}/hw_counters/{name}") for name in _LOSSES}
    lost = {name: count for name, count in counts.items() if count}
    if lost:
        told = ", ".join(f"{name} {count}" for name, count in lost.items())
        remedy = "When they go on rising under load: PFC or ECN on all ports of the way; see mfctl path test."
        yield Finding(f"rdma {port.name} losses", State.INFO, f"since the driver was loaded: {told}", remedy)
    elif any(count is not None for count in counts.values()):
        yield Finding(f"rdma {port.name} losses", State.OK, "nothing lost since the driver was loaded")


def check_gpu_direct(machine: Machine) -> Iterator[Finding]:
    """By which way RDMA devices can reach the memory of NVIDIA's GPUs: as a dma-buf, or by the module nvidia_peermem.

    A dma-buf takes the open kernel modules (NVIDIA's GPUDirect RDMA documentation).
    """
    nvidia = [gpu for gpu in gpus(machine) if gpu.vendor == "NVIDIA"]
    if not nvidia:
        return
    driver = machine.text("proc/driver/nvidia/version")
    if driver is None:
        machine.refuse_absence("NVIDIA's driver")
        remedy = "Install NVIDIA's driver, with its open kernel modules."
        yield Finding("gpudirect", State.WARN, f"{len(nvidia)} NVIDIA GPUs, and their driver is not loaded", remedy)
        return
    version = kernel_version(machine.text("proc/sys/kernel/osrelease") or "")
    ways = []
    if "Open Kernel Module" in driver and version is not None and version >= DMA_BUF_SINCE:
        ways.append("dma-buf (open kernel modules)")
    if machine.has("sys/module/nvidia_peermem"):
        ways.append("nvidia-peermem")
    told = re.sub(r"\s+", " ", driver.splitlines()[0].removeprefix("NVRM version:").strip())
    if ways:
        yield Finding("gpudirect", State.OK, f"{' and '.join(ways)}; {told}")
    else:
        remedy = "modprobe nvidia-peermem, or the driver's open kernel modules with Linux 5.12 or newer."
        yield Finding("gpudirect", State.WARN, f"no way for RDMA to the GPUs' memory; {told}", remedy)
