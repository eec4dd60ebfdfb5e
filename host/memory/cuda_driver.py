"""What is used of the CUDA driver: few calls, so that a stand-in can enforce their rules where there is no GPU.

Numbers are those of cuda.h, by its names; the driver promises never to change them.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from meshfusion.jbof.errors import MediaError


class DeviceAttribute(enum.IntEnum):
    """Of enum CUdevice_attribute: CU_DEVICE_ATTRIBUTE_*."""

    GPU_DIRECT_RDMA_SUPPORTED = 116
    GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117
    GPU_DIRECT_RDMA_WRITES_ORDERING = 118
    DMA_BUF_SUPPORTED = 124


class PointerAttribute(enum.IntEnum):
    """Of enum CUpointer_attribute: CU_POINTER_ATTRIBUTE_*."""

    CONTEXT = 1
    MEMORY_TYPE = 2
    SYNC_MEMOPS = 6
    IS_MANAGED = 8
    DEVICE_ORDINAL = 9
    IS_GPU_DIRECT_RDMA_CAPABLE = 15


class MemoryType(enum.IntEnum):
    """Of enum CUmemorytype: CU_MEMORYTYPE_*."""

    DEVICE = 2


class RdmaOrder(enum.IntEnum):
    """Of enum CUGPUDirectRDMAWritesOrdering: CU_GPU_DIRECT_RDMA_WRITES_ORDERING_*; who sees writes without a flush."""

    NONE = 0
    OWNER = 100
    ALL_DEVICES = 200


class FlushOption(enum.IntFlag):
    """Of enum CUflushGPUDirectRDMAWritesOptions: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_*."""

    HOST = 1


class DmaBufMapping(enum.IntEnum):
    """Flags of cuMemGetHandleForAddressRange for a dma-buf: CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, or none."""

    DEFAULT = 0
    PCIE = 1


class Allocation(NamedTuple):
    address: int
    length_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.length_bytes


class CudaError(MediaError):
    """A call of the driver failed. ``name``: of the CUresult, such as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(
            f"the CUDA driver's {call} failed with {name}",
            next_step="See the kernel's log (dmesg, NVRM and Xid); without the pool the engine may still work.",
        )
        self.name = name


class CudaDriver(Protocol):
    """Calls raise :class:`CudaError`. Contexts, events, streams and addresses are the driver's, as integers.

    Calls from :meth:`allocation` on need the context of the memory, stream or event as the thread's current one.
    """

    def device_attribute(self, device: int, attribute: DeviceAttribute) -> int: ...

    def pointer_attribute(self, address: int, attribute: PointerAttribute) -> int: ...

    def pci_address(self, device: int) -> str:
        """Domain, bus, device and function, such as 0000:3b:00.0."""
        ...

    def push_context(self, context: int) -> None:
        """Of the calling thread."""
        ...

    def pop_context(self) -> None: ...

    def allocation(self, address: int) -> Allocation:
        """That which ``address`` lies in; of memory mapped in pieces, the piece."""
        ...

    def set_sync_memops(self, address: int) -> None:
        """Of the whole allocation: operations that are said to be synchronous on it are."""
        ...

    def export_dma_buf(self, address: int, length_bytes: int, mapping: DmaBufMapping) -> int:
        """A file descriptor, for whole pages of the host's of one allocation. To be given up with close_dma_buf."""
        ...

    def close_dma_buf(self, fd: int) -> None: ...

    def flush_rdma_writes(self) -> None:
        """RDMA writes that have ended are seen by the device of the current context when it returns."""
        ...

    def create_stream(self) -> int:
        """One whose work waits for no other stream's, not even the default one's."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def pin_host(self, address: int, length_bytes: int) -> None:
        """Memory of the host, from the begin of a page on: the device may reach it by itself until it is unpinned."""
        ...

    def unpin_host(self, address: int) -> None: ...

    def copy_to_device(self, to: int, source: int, length_bytes: int, stream: int) -> None:
        """Begins, as work of ``stream``. ``source``: in pinned memory of the host, which is read until that is done."""
        ...

    def copy_from_device(self, to: int, source: int, length_bytes: int, stream: int) -> None:
        """The same the other way: ``to`` is written until that is done."""
        ...

    def create_event(self) -> int: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def is_event_done(self, event: int) -> bool:
        """Has the work been done that its stream had when it was recorded?"""
        ...

    def destroy_event(self, event: int) -> None: ...


@contextlib.contextmanager
def in_context(driver: CudaDriver, context: int) -> Iterator[None]:
    """The thread's own context is put back: engines and torch have theirs."""
    driver.push_context(context)
    try:
        yield
    finally:
        driver.pop_context()
