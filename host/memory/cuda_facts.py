"""What must be known of CUDA memory and its device before it is used, and more of it before RDMA devices may reach it
(rule 6: unknown means no)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from meshfusion.host.memory.cuda_driver import (
    Allocation,
    CudaDriver,
    CudaError,
    DeviceAttribute,
    FlushOption,
    MemoryType,
    PointerAttribute,
    RdmaOrder,
    in_context,
)
from meshfusion.jbof.errors import UnsupportedError

SYS_MODULE: Final = Path("/sys/module")

_STAGED: Final = "Use the staged path, or start the engine without this connector."
_WITHOUT: Final = "Start the engine without this connector, and report its version and how it allocates memory."


@dataclass(frozen=True, slots=True)
class CudaPlace:
    """``length_bytes`` at ``address``, in one allocation of ``context``. ``device``: the driver's number of it."""

    address: int
    length_bytes: int
    context: int
    allocation: Allocation
    device: int
    pci_address: str


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """``needs_flush``: the device does not see RDMA writes in order by itself.

    ``takes_dma_buf``, ``takes_peermem``: ways to give memory to RDMA devices that the device knows, and, for the
    second, whose kernel module is loaded.
    """

    needs_flush: bool
    takes_dma_buf: bool
    takes_peermem: bool


class WholePages(NamedTuple):
    """``offset_bytes``: of the memory in them."""

    address: int
    length_bytes: int
    offset_bytes: int


def locate(driver: CudaDriver, address: int, length_bytes: int) -> CudaPlace:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when it is not known to be one device's for good."""
    try:
        return _place(driver, address, length_bytes)
    except CudaError as error:
        raise _unusable(f"the driver does not know what it needs to know: {error.message}") from error


def learn(driver: CudaDriver, place: CudaPlace, *, sys_module: Path = SYS_MODULE) -> CudaFacts:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when something is not known to be right for RDMA."""

    def ask(attribute: DeviceAttribute) -> int:
        return driver.device_attribute(place.device, attribute)

    try:
        if not driver.pointer_attribute(place.address, PointerAttribute.IS_GPU_DIRECT_RDMA_CAPABLE):
            raise _refused("it was not allocated for GPUDirect RDMA")
        return CudaFacts(
            needs_flush=_needs_flush(
                ask(DeviceAttribute.GPU_DIRECT_RDMA_WRITES_ORDERING),
                ask(DeviceAttribute.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
            ),
            takes_dma_buf=ask(DeviceAttribute.DMA_BUF_SUPPORTED) == 1,
            takes_peermem=ask(DeviceAttribute.GPU_DIRECT_RDMA_SUPPORTED) == 1 and has_peermem(sys_module),
        )
    except CudaError as error:
        raise _refused(f"the driver does not know what it needs to know: {error.message}") from error


def has_peermem(sys_module: Path = SYS_MODULE) -> bool:
    """Is the kernel module nvidia-peermem loaded? The kernel spells it with an underscore."""
    return (sys_module / "nvidia_peermem").is_dir()


def whole_pages(address: int, length_bytes: int, allocation: Allocation, *, page_bytes: int = 0) -> WholePages:
    """The host's pages that the memory lies in: what cuMemGetHandleForAddressRange takes.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when they reach out of the memory's allocation.
    """
    page_bytes = page_bytes or mmap.PAGESIZE
    start = address // page_bytes * page_bytes
    end = -(-(address + length_bytes) // page_bytes) * page_bytes
    if start < allocation.address or end > allocation.end:
        raise _refused(
            f"its pages, {start:#x} to {end:#x}, reach out of its allocation, {allocation.address:#x} to "
            f"{allocation.end:#x}"
        )
    return WholePages(start, end - start, address - start)


def _place(driver: CudaDriver, address: int, length_bytes: int) -> CudaPlace:
    if driver.pointer_attribute(address, PointerAttribute.MEMORY_TYPE) != MemoryType.DEVICE:
        raise _unusable("it is not memory of a device")
    if driver.pointer_attribute(address, PointerAttribute.IS_MANAGED):
        raise _unusable("it is managed memory, which moves")
    context = driver.pointer_attribute(address, PointerAttribute.CONTEXT)
    if context == 0:
        raise _unusable("it belongs to no context (memory of a pool?)")
    with in_context(driver, context):
        allocation = driver.allocation(address)
    if address < allocation.address or address + length_bytes > allocation.end:
        raise _unusable(
            f"its {length_bytes} bytes at {address:#x} are not in one allocation (PyTorch: no expandable_segments)"
        )
    device = driver.pointer_attribute(address, PointerAttribute.DEVICE_ORDINAL)
    return CudaPlace(address, length_bytes, context, allocation, device, driver.pci_address(device))


def _needs_flush(order: int, flush_options: int) -> bool:
    """By cuda.h at cuFlushGPUDirectRDMAWrites: an order that covers the owner makes the flush a no-op.

    That holds for one way into the device at a time, which is why a memory keeps to one way of registration.
    """
    if order >= RdmaOrder.OWNER:
        return False
    if not flush_options & FlushOption.HOST:
        raise _refused("its device neither orders RDMA writes (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_*) nor flushes them")
    return True


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(f"CUDA memory for KV cannot be given to RDMA devices: {reason}", next_step=_STAGED)


def _unusable(reason: str) -> UnsupportedError:
    return UnsupportedError(f"CUDA memory for KV cannot be used: {reason}", next_step=_WITHOUT)
