"""A CUDA driver and device in this machine's memory that enforce the rules of the real ones.

Device memory lies at real addresses, so that digests can be computed in it. What would be wrong on a device is wrong
here: RDMA writes that nobody flushed are not seen, a read before the work that fills the memory trips an assertion, and
so does giving anything up twice, too early, or never (:meth:`FakeCuda.assert_nothing_left`). Copies are work of their
stream: they take from memory what it holds when they are done, and are seen only then.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from meshfusion.host.memory.cuda_driver import (
    Allocation,
    CudaError,
    DeviceAttribute,
    DmaBufMapping,
    FlushOption,
    MemoryType,
    PointerAttribute,
    RdmaOrder,
)
from meshfusion.jbof.media.buffer import AlignedBuffer

CONTEXT, OTHER_CONTEXT = 0xC0DE, 0xBAD
STREAM = 0x57
PCI_ADDRESS = "0000:3b:00.0"

T = TypeVar("T")

_D, _P = DeviceAttribute, PointerAttribute


class _Work(NamedTuple):
    """Of a stream: fill memory with ``data``, or with what ``source`` holds by then."""

    address: int
    data: bytes
    source: int = 0
    copied_bytes: int = 0

    @property
    def filled(self) -> Allocation:
        return Allocation(self.address, len(self.data) or self.copied_bytes)

    @property
    def read(self) -> Allocation:
        return Allocation(self.source, self.copied_bytes)

    def do(self) -> None:
        ctypes.memmove(self.address, self.data if self.data else self.source, self.filled.length_bytes)


class _Event(NamedTuple):
    stream: int
    work_count: int  # that the stream had been given when it was recorded


@dataclass
class FakeCuda:
    """Keeps :class:`~meshfusion.host.memory.cuda_driver.CudaDriver`.

    ``mappings``: of dma-bufs that it exports. ``lazy``: streams do their work when :meth:`run` says so, otherwise a
    piece each time somebody asks for it.
    """

    order: RdmaOrder = RdmaOrder.NONE
    mappings: frozenset[DmaBufMapping] = frozenset(DmaBufMapping)
    device_attributes: dict[DeviceAttribute, int] = field(default_factory=dict)
    pointer_attributes: dict[PointerAttribute, int] = field(default_factory=dict)
    lazy: bool = False
    context_stacks: threading.local = field(default_factory=threading.local)
    exported: dict[int, Allocation] = field(default_factory=dict)  # dma-bufs that are open
    export_count: int = 0
    flush_count: int = 0
    sync_memops: set[int] = field(default_factory=set)
    unflushed: list[_Work] = field(default_factory=list)
    pinned: dict[int, Allocation] = field(default_factory=dict)
    copy_count: int = 0
    streams: set[int] = field(default_factory=lambda: {STREAM})
    _allocations: dict[int, tuple[Allocation, AlignedBuffer]] = field(default_factory=dict)
    _work: dict[int, list[_Work]] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)
    _events: dict[int, _Event | None] = field(default_factory=dict)
    _registered: dict[int, Allocation] = field(default_factory=dict)
    _numbers: int = 1000
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # ---- what an engine does -------------------------------------------------------------------------------------

    def allocate(self, length_bytes: int) -> npt.NDArray[np.uint8]:
        """uint8[length_bytes], at the begin of a page; the allocation is of whole pages."""
        buffer = AlignedBuffer(-(-length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        address = buffer.array.ctypes.data
        self._allocations[address] = Allocation(address, buffer.size_bytes), buffer
        return buffer.array[:length_bytes]

    def free(self, array: npt.NDArray[np.uint8]) -> None:
        """The allocation that ``array`` lies in."""
        found = self._allocation_of(array.ctypes.data)
        assert found is not None, "freed twice"
        gone, _ = self._allocations[found.address]
        for kind in (self.exported, self._registered):
            for known in kind.values():
                assert not _overlap(gone, known), "memory was freed that others may still reach"
        self._assert_unused(gone, "memory was freed under a copy")
        del self._allocations[found.address]

    def launch(self, address: int, data: bytes, stream: int = STREAM) -> None:
        """A kernel that fills memory, some time."""
        with self._lock:
            self._work.setdefault(stream, []).append(_Work(address, data))

    def run(self, stream: int = STREAM, count: int = 1_000_000) -> None:
        with self._lock:
            work, done = self._work.get(stream, []), self._done.get(stream, 0)
            for one in work[done : done + count]:
                if self.is_device_memory(one.source):
                    self._assert_filled(one.read, stream)
                one.do()
            self._done[stream] = min(len(work), done + count)

    def run_copies(self, count: int = 1_000_000) -> None:
        """The work of all streams that are not the engine's."""
        for stream in self.streams - {STREAM}:
            self.run(stream, count)

    # ---- what an RDMA device does --------------------------------------------------------------------------------

    def pin(self, address: int, length_bytes: int) -> int:
        """An RDMA device may reach it until :meth:`unpin` of the answer."""
        assert self._allocation_of(address) is not None, "registered after it was freed"
        return self._new(self._registered, Allocation(address, length_bytes))

    def unpin(self, pin: int) -> None:
        del self._registered[pin]

    def is_device_memory(self, address: int) -> bool:
        return self._allocation_of(address) is not None

    def rdma_write(self, address: int, data: bytes) -> None:
        assert self._allocation_of(address) is not None, "an RDMA device wrote memory that was freed"
        with self._lock:
            self.unflushed.append(_Work(address, data))
            if self.order >= RdmaOrder.OWNER:
                self.land()

    def land(self) -> None:
        """What was on its way inside of the machine arrives, whoever has the memory by now."""
        with self._lock:
            for one in self.unflushed:
                one.do()
            self.unflushed.clear()

    def rdma_read(self, address: int, length_bytes: int) -> bytes:
        assert self._allocation_of(address) is not None, "an RDMA device read memory that was freed"
        with self._lock:
            self._assert_filled(Allocation(address, length_bytes), None)
            return ctypes.string_at(address, length_bytes)

    # ---- the driver's calls --------------------------------------------------------------------------------------

    def device_attribute(self, device: int, attribute: DeviceAttribute) -> int:
        assert device == 3
        values = {
            _D.GPU_DIRECT_RDMA_SUPPORTED: 1,
            _D.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: int(FlushOption.HOST),
            _D.GPU_DIRECT_RDMA_WRITES_ORDERING: int(self.order),
            _D.DMA_BUF_SUPPORTED: 1,
        }
        return (values | self.device_attributes)[attribute]

    def pointer_attribute(self, address: int, attribute: PointerAttribute) -> int:
        if self._allocation_of(address) is None:
            raise CudaError("cuPointerGetAttribute", "CUDA_ERROR_INVALID_VALUE")
        values = {
            _P.CONTEXT: CONTEXT,
            _P.MEMORY_TYPE: int(MemoryType.DEVICE),
            _P.IS_MANAGED: 0,
            _P.DEVICE_ORDINAL: 3,
            _P.IS_GPU_DIRECT_RDMA_CAPABLE: 1,
        }
        return (values | self.pointer_attributes)[attribute]

    def pci_address(self, device: int) -> str:
        assert device == 3
        return PCI_ADDRESS

    def allocation(self, address: int) -> Allocation:
        self._in_context("cuMemGetAddressRange")
        found = self._allocation_of(address)
        if found is None:
            raise CudaError("cuMemGetAddressRange", "CUDA_ERROR_NOT_FOUND")
        return found

    def push_context(self, context: int) -> None:
        assert context in (CONTEXT, OTHER_CONTEXT)
        self._stack().append(context)

    def pop_context(self) -> None:
        assert self._stack().pop() == CONTEXT, "somebody else's context"

    def set_sync_memops(self, address: int) -> None:
        self._in_context("cuPointerSetAttribute")
        held = self._allocation_of(address)
        assert held is not None
        self.sync_memops.add(held.address)

    def export_dma_buf(self, address: int, length_bytes: int, mapping: DmaBufMapping) -> int:
        self._in_context("cuMemGetHandleForAddressRange")
        if mapping not in self.mappings:
            raise CudaError("cuMemGetHandleForAddressRange", "CUDA_ERROR_NOT_SUPPORTED")
        held = self._allocation_of(address)
        is_whole = address % mmap.PAGESIZE == 0 and length_bytes % mmap.PAGESIZE == 0 and length_bytes > 0
        if not is_whole or held is None or address + length_bytes > held.end:
            raise CudaError("cuMemGetHandleForAddressRange", "CUDA_ERROR_INVALID_VALUE")
        self.export_count += 1
        return self._new(self.exported, Allocation(address, length_bytes))

    def close_dma_buf(self, fd: int) -> None:
        assert fd in self.exported, "closed twice, or never opened"
        del self.exported[fd]

    def flush_rdma_writes(self) -> None:
        self._in_context("cuFlushGPUDirectRDMAWrites")
        self.flush_count += 1
        self.land()

    def create_stream(self) -> int:
        self._in_context("cuStreamCreate")
        with self._lock:
            self._numbers += 1
            self.streams.add(self._numbers)
            return self._numbers

    def destroy_stream(self, stream: int) -> None:
        self._in_context("cuStreamDestroy")
        assert not self._left_of(stream), "a stream was destroyed before its work was done"
        self.streams.remove(stream)

    def pin_host(self, address: int, length_bytes: int) -> None:
        self._in_context("cuMemHostRegister")
        assert not self.is_device_memory(address)
        if address % mmap.PAGESIZE or any(_overlap(Allocation(address, length_bytes), p) for p in self.pinned.values()):
            raise CudaError("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self.pinned[address] = Allocation(address, length_bytes)

    def unpin_host(self, address: int) -> None:
        self._in_context("cuMemHostUnregister")
        self._assert_unused(self.pinned[address], "staging was freed under a copy")
        del self.pinned[address]

    def copy_to_device(self, to: int, source: int, length_bytes: int, stream: int) -> None:
        self._copy("cuMemcpyHtoDAsync", to, source, length_bytes, stream, device=to, host=source)

    def copy_from_device(self, to: int, source: int, length_bytes: int, stream: int) -> None:
        self._copy("cuMemcpyDtoHAsync", to, source, length_bytes, stream, device=source, host=to)

    def _copy(self, call: str, to: int, source: int, length_bytes: int, stream: int, *, device: int, host: int) -> None:
        self._in_context(call)
        assert stream in self.streams - {STREAM}, "a copy in the engine's stream, or in none"
        held = self._allocation_of(device)
        pinned = [p for p in self.pinned.values() if p.address <= host and host + length_bytes <= p.end]
        if not pinned or held is None or device + length_bytes > held.end or length_bytes <= 0:
            raise CudaError(call, "CUDA_ERROR_INVALID_VALUE")
        with self._lock:
            self.copy_count += 1
            self._work.setdefault(stream, []).append(_Work(to, b"", source, length_bytes))

    def create_event(self) -> int:
        self._in_context("cuEventCreate")
        return self._new(self._events, None)

    def record_event(self, event: int, stream: int) -> None:
        self._in_context("cuEventRecord")
        assert event in self._events
        self._events[event] = _Event(stream, len(self._work.get(stream, [])))

    def is_event_done(self, event: int) -> bool:
        recorded = self._events[event]
        assert recorded is not None, "asked before it was recorded, which is true at once"
        if not self.lazy:
            self.run(recorded.stream, 1)
        return self._done.get(recorded.stream, 0) >= recorded.work_count

    def destroy_event(self, event: int) -> None:
        self._in_context("cuEventDestroy")
        assert event in self._events, "destroyed twice"
        del self._events[event]

    # ---- for tests -----------------------------------------------------------------------------------------------

    def assert_nothing_left(self) -> None:
        """When the memory was closed."""
        assert not self.exported, "a dma-buf was left open"
        assert not self._registered, "memory was left registered"
        assert not self._events, "events were left"
        assert not self.pinned, "memory of the host was left pinned"
        assert self.streams == {STREAM}, "streams were left"
        assert not self.unflushed, "RDMA writes may still land"
        assert self._stack() == [], "a context was left on the thread"

    def _left_of(self, stream: int) -> list[_Work]:
        return self._work.get(stream, [])[self._done.get(stream, 0) :]

    def _assert_filled(self, wanted: Allocation, reader: int | None) -> None:
        """Is nothing left to do, in other streams than that which reads, that fills it?"""
        for stream in self._work:
            for work in self._left_of(stream) if stream != reader else []:
                assert not _overlap(wanted, work.filled), "memory was read before the work that fills it was done"

    def _assert_unused(self, memory: Allocation, message: str) -> None:
        with self._lock:
            for stream in self._work:
                for work in self._left_of(stream):
                    assert not _overlap(memory, work.filled), message
                    assert not _overlap(memory, work.read), message

    def _stack(self) -> list[int]:
        stack: list[int] = self.context_stacks.__dict__.setdefault("stack", [])
        return stack

    def _in_context(self, call: str) -> None:
        stack = self._stack()
        if not stack or stack[-1] != CONTEXT:
            raise CudaError(call, "CUDA_ERROR_INVALID_CONTEXT")

    def _allocation_of(self, address: int) -> Allocation | None:
        for allocation, _ in self._allocations.values():
            if allocation.address <= address < allocation.end:
                return allocation
        return None

    def _new(self, table: dict[int, T], value: T) -> int:
        with self._lock:
            self._numbers += 1
            table[self._numbers] = value
            return self._numbers


def _overlap(one: Allocation, other: Allocation) -> bool:
    return one.address < other.end and other.address < one.end
