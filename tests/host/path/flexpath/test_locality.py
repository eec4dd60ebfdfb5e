"""Distances in sysfs trees as machines show them; the expected kinds are those of ``nvidia-smi topo -m``."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.host.path.flexpath.locality import Distance, gpu_distance
from meshfusion.jbof.errors import ConfigError

GPU = "0000:3b:00.0"
GPU_WAY = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
SWITCHED_GPU_WAY = "pci0000:3a/0000:3a:00.0/0000:39:00.0/0000:39:01.0/0000:3b:00.0"


def tree(root: Path, gpu_way: str, nic_way: str, gpu_node: int = 0, nic_node: int = 0, kind: str = "net") -> Path:
    """/sys with a GPU and a network device ``nic0``."""
    for way, node in ((gpu_way, gpu_node), (nic_way, nic_node)):
        device = root / "devices" / way
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        link = root / "bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    nic = root / "devices" / nic_way / kind / "nic0"
    nic.mkdir(parents=True)
    (nic / "device").symlink_to(root / "devices" / nic_way)
    (root / "class" / kind).mkdir(parents=True)
    (root / "class" / kind / "nic0").symlink_to(nic)
    return root


@pytest.mark.parametrize(
    ("gpu_way", "nic_way", "nodes", "expected"),
    [
        (SWITCHED_GPU_WAY, "pci0000:3a/0000:3a:00.0/0000:39:00.0/0000:39:02.0/0000:3c:00.0", (0, 0), Distance.SWITCH),
        (GPU_WAY, "pci0000:3a/0000:3a:02.0/0000:3d:00.0", (0, 0), Distance.HOST_BRIDGE),
        (GPU_WAY, "pci0000:5d/0000:5d:00.0/0000:5e:00.0", (0, 0), Distance.NODE),
        (GPU_WAY, "pci0000:ae/0000:ae:00.0/0000:af:00.0", (0, 1), Distance.SYSTEM),
        (GPU_WAY, "pci0000:ae/0000:ae:00.0/0000:af:00.0", (0, -1), Distance.UNKNOWN),
        (GPU_WAY, "platform/soc/eth", (0, 0), Distance.UNKNOWN),
    ],
)
@pytest.mark.parametrize("kind", ["net", "infiniband"])
def test_distances(
    tmp_path: Path, gpu_way: str, nic_way: str, nodes: tuple[int, int], expected: Distance, kind: str
) -> None:
    root = tree(tmp_path, gpu_way, nic_way, *nodes, kind)
    assert gpu_distance(GPU, "nic0", sysfs=root) is expected
    assert gpu_distance(GPU.upper(), "nic0", sysfs=root) is expected


def test_a_virtual_device_is_at_no_known_distance(tmp_path: Path) -> None:
    root = tree(tmp_path, GPU_WAY, "pci0000:3a/0000:3a:02.0/0000:3d:00.0")
    (root / "class/net/br0").mkdir()
    assert gpu_distance(GPU, "br0", sysfs=root) is Distance.UNKNOWN


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path, GPU_WAY, "pci0000:3a/0000:3a:02.0/0000:3d:00.0")
    with pytest.raises(ConfigError, match=r"0000:99:00\.0"):
        gpu_distance("0000:99:00.0", "nic0", sysfs=root)
    with pytest.raises(ConfigError, match="nic9"):
        gpu_distance(GPU, "nic9", sysfs=root)


def test_a_farther_way_weighs_more() -> None:
    """And one across sockets what is lost there: 50 to 75 % of the bandwidth."""
    order = [Distance.SWITCH, Distance.HOST_BRIDGE, Distance.NODE, Distance.UNKNOWN, Distance.SYSTEM]
    weights = [distance.weight for distance in order]
    assert weights == sorted(weights)
    assert weights[0] == 1
    assert 1 / (1 - 0.50) <= Distance.SYSTEM.weight <= 1 / (1 - 0.75)
