"""A machine with two NUMA nodes, PCIe switches and one GPU: the paths over near NICs weigh less and are taken first."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from meshfusion.host.path.flexpath.addresses import ROUTED, PathAddress, path_specs
from meshfusion.host.path.flexpath.choice import Candidate, choose
from meshfusion.host.path.flexpath.link import PathSpec
from meshfusion.host.path.flexpath.locality import Distance, shown_gpu
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.speed import Speed
from tests.host.support.cuda_rig import cuda_memory, device_kv
from tests.host.support.fake_cuda import PCI_ADDRESS, FakeCuda
from tests.host.support.kv_memory import layer_outermost

SWITCH = "pci0000:3a/0000:3a:00.0/0000:39:00.0"
DEVICES = {  # where, and the NUMA node
    f"{SWITCH}/0000:39:01.0/{PCI_ADDRESS}": 0,
    f"{SWITCH}/0000:39:02.0/0000:3c:00.0": 0,
    "pci0000:3a/0000:3a:02.0/0000:3d:00.0": 0,
    "pci0000:5d/0000:5d:00.0/0000:5e:00.0": 0,
    "pci0000:ae/0000:ae:00.0/0000:ad:00.0/0000:ad:01.0/0000:af:00.0": 1,
}
NICS = {
    "same_switch": "0000:3c:00.0",
    "same_bridge": "0000:3d:00.0",
    "same_node": "0000:5e:00.0",
    "other_node": "0000:af:00.0",
}
WEIGHTS = {
    "same_switch": Distance.SWITCH,
    "same_bridge": Distance.HOST_BRIDGE,
    "same_node": Distance.NODE,
    "other_node": Distance.SYSTEM,
    "br0": Distance.UNKNOWN,
    ROUTED: Distance.UNKNOWN,
}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    pci = tmp_path / "bus/pci/devices"
    pci.mkdir(parents=True)
    for way, node in DEVICES.items():
        device = tmp_path / "devices" / way
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (pci / device.name).symlink_to(device)
    for name, address in NICS.items():
        nic = tmp_path / "class/net" / name
        nic.mkdir(parents=True)
        (nic / "device").symlink_to((pci / address).resolve())
    (tmp_path / "class/net/br0").mkdir()
    return tmp_path


def specs(sysfs: Path, gpu: str | None, nics: list[str]) -> list[PathSpec]:
    addresses = [PathAddress("10.0.0.1", 4420, nic) for nic in nics]
    return path_specs(addresses, "nqn.s", "nqn.h", uuid.UUID(int=1), gpu_pci_address=gpu, sysfs=sysfs)


def test_paths_weigh_by_how_far_their_nic_is_from_the_memory(sysfs: Path) -> None:
    gpu = FakeCuda()
    memory = cuda_memory(gpu, device_kv(gpu, layer_outermost()))
    shown = shown_gpu(memory.place.pci_address, sysfs=sysfs)
    assert shown == PCI_ADDRESS
    assert [spec.weight for spec in specs(sysfs, shown, list(WEIGHTS))] == [kind.weight for kind in WEIGHTS.values()]
    memory.close()


def test_memory_of_the_host_is_equally_near_to_all(sysfs: Path) -> None:
    assert shown_gpu("", sysfs=sysfs) is None
    assert {spec.weight for spec in specs(sysfs, None, list(WEIGHTS))} == {1.0}


def test_a_gpu_that_sysfs_does_not_show_costs_the_preference_and_not_the_path(
    sysfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="meshfusion.path"):
        assert shown_gpu("0000:99:00.0", sysfs=sysfs) is None
    assert "0000:99:00.0" in caplog.text


@pytest.mark.parametrize("order", [1, -1])
def test_of_equal_paths_the_nearest_is_taken(sysfs: Path, order: int) -> None:
    settings = SpreadSettings()
    weights = [spec.weight for spec in specs(sysfs, PCI_ADDRESS, list(NICS)[::order])]
    speed = Speed(settings.assumed_bandwidth_bytes_per_s, settings.assumed_latency_s)
    candidates = [
        Candidate(path, speed, weight, 1.0, 0, 0, is_optimized=True, was_tried=False, wants_probe=False)
        for path, weight in enumerate(weights)
    ]
    chosen = choose(
        candidates, 1 << 20, backlog_bytes=1 << 20, time_left_s=5.0, is_probe_allowed=False, settings=settings
    )
    assert chosen is not None
    assert list(NICS)[::order][chosen] == "same_switch"
