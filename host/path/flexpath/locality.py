"""How far a network device is from a GPU, from sysfs, and what that is worth as a weight.

The kinds of distance are those of ``nvidia-smi topo -m``: PIX and PXB (bridges only), PHB (through the host bridge),
NODE (between host bridges of one NUMA node), SYS (between NUMA nodes). sysfs shows a PCI device as a path of bridges
below its host bridge (Documentation/PCI/sysfs-pci.rst), and ``numa_node`` beside it
(Documentation/ABI/testing/sysfs-bus-pci).
"""

from __future__ import annotations

import enum
import logging
import re
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import ConfigError

logger = logging.getLogger("meshfusion.path")

SYSFS: Final = Path("/sys")
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NODE_UNKNOWN: Final = -1


class Distance(enum.Enum):
    """Values are weights: the time that bytes take on this way, measured in that on the best one.

    Across sockets 50 to 75 % of the bandwidth is lost, so that bytes take 2 to 4 times as long: 3 lies between. The
    others are an order of preference, not measurements: FlexPath measures what a path does and multiplies by this, so
    that a farther path is taken when the nearer ones are busier than that. UNKNOWN: virtual devices, or no NUMA nodes.
    """

    SWITCH = 1.0
    HOST_BRIDGE = 1.1
    NODE = 1.25
    UNKNOWN = 1.5
    SYSTEM = 3.0

    @property
    def weight(self) -> float:
        return self.value


def shown_gpu(pci_address: str, *, sysfs: Path = SYSFS) -> str | None:
    """``pci_address`` if this machine shows such a device; None: there is no GPU, or nothing is known of its place,
    which costs a preference (containers may see only a part of sysfs)."""
    if not pci_address:
        return None
    if not (sysfs / "bus/pci/devices" / pci_address.lower()).exists():
        logger.warning("sysfs does not show the GPU at %s: all paths count as equally near to it", pci_address)
        return None
    return pci_address


def gpu_distance(gpu_pci_address: str, net_device: str, *, sysfs: Path = SYSFS) -> Distance:
    """Between the GPU at ``0000:3b:00.0`` and a network interface (``ens1f0np0``) or RDMA device (``mlx5_0``).

    Raises :class:`~meshfusion.jbof.errors.ConfigError` if there is no such GPU or device.
    """
    gpu = sysfs / "bus/pci/devices" / gpu_pci_address.lower()
    if not gpu.exists():
        raise ConfigError(
            f"there is no PCI device {gpu_pci_address}", next_step="Take the address from lspci -D or nvidia-smi."
        )
    nics = [sysfs / "class" / kind / net_device for kind in ("net", "infiniband")]
    nic = next((path for path in nics if path.exists()), None)
    if nic is None:
        raise ConfigError(
            f"there is no network interface or RDMA device {net_device}",
            next_step="Take the name from ip link or from rdma link.",
        )
    if not (nic / "device").exists():  # virtual: a bridge, a soft RDMA device
        return Distance.UNKNOWN
    return _distance(gpu.resolve(), (nic / "device").resolve())


def _distance(one: Path, other: Path) -> Distance:
    ways = _way(one), _way(other)
    if not all(ways):
        return Distance.UNKNOWN
    shared = 0
    for a, b in zip(*ways, strict=False):
        if a != b:
            break
        shared += 1
    if shared > 1:  # a root port, or a switch below it
        return Distance.SWITCH
    if shared == 1:
        return Distance.HOST_BRIDGE
    nodes = _numa_node(one), _numa_node(other)
    if _NODE_UNKNOWN in nodes:
        return Distance.UNKNOWN
    return Distance.NODE if nodes[0] == nodes[1] else Distance.SYSTEM


def _way(device: Path) -> tuple[str, ...]:
    """The host bridge and what lies below it; empty for what is not on PCI."""
    for index, name in enumerate(device.parts):
        if _HOST_BRIDGE.fullmatch(name):
            return device.parts[index:]
    return ()


def _numa_node(device: Path) -> int:
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return _NODE_UNKNOWN
