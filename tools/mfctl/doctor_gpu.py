"""What ``mfctl doctor`` sees of CUDA devices, and which ways there are to their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.findings import Finding, State

if TYPE_CHECKING:
    from meshfusion.host.memory.libcuda import LibCuda

SYSFS = Path("/sys")


def check_gpus(load: Callable[[], LibCuda] | None = None, *, sysfs: Path = SYSFS) -> Iterator[Finding]:
    """A finding for each device, by the driver alone: importing torch takes seconds, and may take a device's memory."""
    from meshfusion.host.memory.libcuda import load_cuda

    try:
        driver = (load or load_cuda)()
    except MeshFusionError as error:
        yield Finding("gpu", State.INFO, f"none for CUDA, KV memory is the host's: {error.message}")
        return
    for device in range(driver.device_count()):
        try:
            yield _device_finding(driver, device, sysfs)
        except MeshFusionError as error:
            yield Finding(f"gpu cuda:{device}", State.WARN, error.message, error.next_step)


def _device_finding(driver: LibCuda, device: int, sysfs: Path) -> Finding:
    from meshfusion.host.memory.cuda_driver import DeviceAttribute
    from meshfusion.host.memory.cuda_facts import has_peermem

    address = driver.pci_address(device)
    ways = []
    if driver.device_attribute(device, DeviceAttribute.DMA_BUF_SUPPORTED) == 1:
        ways.append("dma-buf")
    has_module = has_peermem(sysfs / "module")
    if has_module and driver.device_attribute(device, DeviceAttribute.GPU_DIRECT_RDMA_SUPPORTED) == 1:
        ways.append("nvidia-peermem")
    cause = f"{address}; staged: by copies of the device; rdma: {', '.join(ways) or 'no way to its memory'}"
    near = _near_ports(address, sysfs)
    if near:
        cause += f"; RDMA devices: {near}"
    remedy = "" if ways else "For rdma: modprobe nvidia-peermem, or a driver, kernel and NIC with dma-buf support."
    return Finding(f"gpu cuda:{device}", State.INFO, cause + "; not tried on any GPU by this version", remedy)


def _near_ports(address: str, sysfs: Path) -> str:
    """RDMA devices and how far each is, as ``nvidia-smi topo -m`` has it."""
    from meshfusion.host.path.flexpath.locality import gpu_distance, shown_gpu

    if shown_gpu(address, sysfs=sysfs) is None:
        return ""
    names = sorted(path.name for path in (sysfs / "class/infiniband").glob("*"))
    return ", ".join(f"{name} ({gpu_distance(address, name, sysfs=sysfs).name})" for name in names)
