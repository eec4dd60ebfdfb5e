"""What the doctor says of GPUs, from a driver and a sysfs tree that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from meshfusion.host.memory.cuda_driver import CudaError, DeviceAttribute
from meshfusion.host.memory.libcuda import LibCuda
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.tools.mfctl.doctor_gpu import check_gpus
from meshfusion.tools.mfctl.findings import State

ADDRESS = "0000:3b:00.0"


class Driver:
    """Of one device. ``attributes``: what it has."""

    def __init__(self, *attributes: DeviceAttribute, error: CudaError | None = None) -> None:
        self._attributes = attributes
        self._error = error

    def device_count(self) -> int:
        return 1

    def device_attribute(self, device: int, attribute: DeviceAttribute) -> int:
        return int(attribute in self._attributes)

    def pci_address(self, device: int) -> str:
        if self._error is not None:
            raise self._error
        return ADDRESS


def findings(sysfs: Path, driver: Any) -> list[Any]:
    return list(check_gpus(lambda: cast(LibCuda, driver), sysfs=sysfs))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    gpu = tmp_path / f"devices/pci0000:3a/0000:3a:00.0/{ADDRESS}"
    nic = tmp_path / "devices/pci0000:3a/0000:3a:02.0/0000:3d:00.0"
    for device in (gpu, nic):
        device.mkdir(parents=True)
        (device / "numa_node").write_text("0\n")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices" / ADDRESS).symlink_to(gpu)
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "class/infiniband/mlx5_0/device").symlink_to(nic)
    return tmp_path


def test_ways_and_distances_are_told_for_each_device(sysfs: Path) -> None:
    (sysfs / "module/nvidia_peermem").mkdir(parents=True)
    driver = Driver(DeviceAttribute.DMA_BUF_SUPPORTED, DeviceAttribute.GPU_DIRECT_RDMA_SUPPORTED)
    (finding,) = findings(sysfs, driver)
    assert (finding.check, finding.state, finding.remedy) == ("gpu cuda:0", State.INFO, "")
    assert ADDRESS in finding.cause
    assert "rdma: dma-buf, nvidia-peermem" in finding.cause
    assert "mlx5_0 (HOST_BRIDGE)" in finding.cause
    assert "not tried on any GPU" in finding.cause


def test_a_device_that_rdma_cannot_reach_comes_with_what_to_do(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, Driver(DeviceAttribute.GPU_DIRECT_RDMA_SUPPORTED))
    assert "rdma: no way to its memory" in finding.cause
    assert "nvidia-peermem" in finding.remedy
    assert "RDMA devices" not in finding.cause, "sysfs does not show where the GPU is"


def test_a_machine_without_a_driver_and_one_that_fails(tmp_path: Path) -> None:
    def missing() -> LibCuda:
        raise UnsupportedError("the CUDA driver cannot be loaded: none", next_step="Install it.")

    (finding,) = check_gpus(missing, sysfs=tmp_path)
    assert (finding.check, finding.state, finding.remedy) == ("gpu", State.INFO, "")
    (finding,) = findings(tmp_path, Driver(error=CudaError("cuDeviceGetPCIBusId", "CUDA_ERROR_UNKNOWN")))
    assert (finding.check, finding.state) == ("gpu cuda:0", State.WARN)
    assert finding.remedy
