"""KV memory on a CUDA device, registered with RDMA devices in the first way that works, and always in that one.

=====================  =================================================================  ========================
way                    what is registered                                                 needs
=====================  =================================================================  ========================
dma-buf, PCIe mapping  whole pages of the host's, exported with the flag for BAR1         a driver of CUDA 12.8
dma-buf                the same without the flag                                          DMA_BUF_SUPPORTED
nvidia-peermem         the address                                                        that kernel module
=====================  =================================================================  ========================

Only one, because ways into a device may be separate ordering domains (cuda.h at cuFlushGPUDirectRDMAWrites).
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.cuda_driver import CudaDriver, DmaBufMapping, in_context
from meshfusion.host.memory.cuda_facts import CudaFacts, CudaPlace, whole_pages
from meshfusion.host.memory.cuda_staging import CudaStaging, UnitDigests
from meshfusion.host.memory.kv_memory import MemoryPlace, Produced, Registrar
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.memory import MemoryInUseError, RegisteredRegion
from meshfusion.jbof.nvme.registration import DmaBufRange

LOAD_DEPTH: Final = 3
"""One piece is read, one copied, and one digested."""

_POLL_S: Final = 0.0005
_MANY_EVENTS: Final = 32


class Way(enum.Enum):
    DMA_BUF_PCIE = "dma-buf with PCIe mapping"
    DMA_BUF = "dma-buf"
    PEERMEM = "nvidia-peermem"


_MAPPINGS: Final = {Way.DMA_BUF_PCIE: DmaBufMapping.PCIE, Way.DMA_BUF: DmaBufMapping.DEFAULT}


class CudaKvMemory:
    """Keeps :class:`~meshfusion.host.memory.kv_memory.KvMemory`, for the memory at ``place``.

    ``facts``: what RDMA needs to know, or why RDMA devices may not reach the memory. ``owner`` keeps the memory
    allocated, also for regions of it. ``current_stream`` answers which stream the calling thread issues the engine's
    work to (the driver's handle). ``digests`` runs on the device, after what the host has waited for, and ``kernels``
    on the host. Raises :class:`~meshfusion.jbof.errors.MediaError` if the driver fails.
    """

    def __init__(
        self,
        driver: CudaDriver,
        place: CudaPlace,
        facts: CudaFacts | UnsupportedError,
        *,
        owner: object,
        digests: UnitDigests,
        kernels: DigestKernels,
        current_stream: Callable[[], int],
    ) -> None:
        self._driver = driver
        self._place = place
        self._facts = facts
        self._owner: object = owner
        self._digests = digests
        self._kernels = kernels
        self._current_stream = current_stream
        self._registering = threading.Lock()
        self._way: Way | None = None
        self._fd: int | None = None
        self._regions: list[RegisteredRegion] = []
        self._events_lock = threading.Lock()  # another one: the engine's thread must not wait for a registration
        self._events: set[int] = set()
        self._stagings: set[CudaStaging] = set()
        if isinstance(facts, CudaFacts):
            with in_context(driver, place.context):
                driver.set_sync_memops(place.address)

    @property
    def place(self) -> MemoryPlace:
        place = self._place
        error = self._facts if isinstance(self._facts, UnsupportedError) else None
        return MemoryPlace(place.address, place.length_bytes, f"cuda:{place.device}", place.pci_address, error)

    # ---- staging -------------------------------------------------------------------------------------------------

    @property
    def load_depth(self) -> int:
        return LOAD_DEPTH

    def staging(self, size_bytes: int) -> CudaStaging:
        with self._registering:
            assert self._owner is not None, "used after close"
            made = CudaStaging(
                self._driver, self._place, self._digests, self._kernels, size_bytes, on_close=self._stagings.discard
            )
            self._stagings.add(made)
            return made

    @property
    def way(self) -> Way | None:
        """How it is registered, for people; None: not yet."""
        return self._way

    # ---- registration --------------------------------------------------------------------------------------------

    def register(self, registrar: Registrar) -> RegisteredRegion:
        with self._registering:
            assert self._owner is not None, "used after close"
            if isinstance(self._facts, UnsupportedError):
                raise self._facts
            region = self._register_first(registrar) if self._way is None else self._register(self._way, registrar)
            self._regions = [*(known for known in self._regions if not known.is_closed), region]
            return region

    @property
    def _rdma(self) -> CudaFacts:
        assert isinstance(self._facts, CudaFacts), "no RDMA device may reach it"
        return self._facts

    def _register_first(self, registrar: Registrar) -> RegisteredRegion:
        reasons = []
        for way in Way:
            try:
                region = self._register(way, registrar)
            except MeshFusionError as error:
                self._close_fd()
                reasons.append(f"{way.value}: {error.message}")
                continue
            self._way = way
            return region
        raise UnsupportedError(
            f"the KV memory on the CUDA device cannot be registered for RDMA ({'; '.join(reasons)})",
            next_step="Load the kernel module nvidia-peermem, or use a driver, kernel and NIC with dma-buf support.",
        )

    def _register(self, way: Way, registrar: Registrar) -> RegisteredRegion:
        if way is Way.PEERMEM:
            if not self._rdma.takes_peermem:
                raise _missing("the kernel module is not loaded, or the device does not support GPUDirect RDMA")
            address, length_bytes = self._place.address, self._place.length_bytes
            return registrar.register_address(address, length_bytes, writable=True, owner=self._owner)
        if not self._rdma.takes_dma_buf:
            raise _missing("the driver or the device has no dma-buf support")
        pages = whole_pages(self._place.address, self._place.length_bytes, self._place.allocation)
        if self._fd is None:
            # Kept open until the end: a path that joins later registers it again.
            with in_context(self._driver, self._place.context):
                self._fd = self._driver.export_dma_buf(pages.address, pages.length_bytes, _MAPPINGS[way])
        memory = DmaBufRange(self._fd, pages.offset_bytes, self._place.length_bytes)
        return registrar.register_dma_buf(memory, writable=True, owner=self._owner)

    def _close_fd(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._driver.close_dma_buf(fd)

    # ---- order ---------------------------------------------------------------------------------------------------

    def produced(self) -> Produced:
        assert self._owner is not None, "used after close"
        driver = self._driver
        with in_context(driver, self._place.context):
            self._forget_done()
            event = driver.create_event()
            with self._events_lock:
                self._events.add(event)
            driver.record_event(event, self._current_stream())
        return CudaProduced(self, event)

    def _forget_done(self) -> None:
        """Who gave up does not wait; a long-lived engine must not collect what was recorded for them."""
        with self._events_lock:
            if len(self._events) < _MANY_EVENTS:
                return
            for event in [event for event in self._events if self._driver.is_event_done(event)]:
                self._events.remove(event)
                self._driver.destroy_event(event)

    def wait_event(self, event: int, timeout_s: float) -> None:
        """Nothing to wait for when it was waited for before. Raises MediaError when it is not done in time."""
        end_s = time.monotonic() + timeout_s
        with in_context(self._driver, self._place.context):
            while True:
                with self._events_lock:
                    if event not in self._events:
                        return
                    if self._driver.is_event_done(event):
                        self._events.remove(event)
                        self._driver.destroy_event(event)
                        return
                if time.monotonic() >= end_s:
                    break
                time.sleep(_POLL_S)
        raise MediaError(
            f"the device did not finish within {timeout_s:g} s what was under way with the blocks",
            next_step="See whether the engine's device hangs (nvidia-smi, dmesg).",
        )

    def arrived(self) -> None:
        """A device whose flush fails has lost its context, and the engine with it."""
        if self._rdma.needs_flush:
            with in_context(self._driver, self._place.context):
                self._driver.flush_rdma_writes()

    def digests(self, layout: GroupLayout, block_ids: Sequence[int]) -> list[bytes]:
        if not block_ids:
            return []
        return self._digests.digest_units(layout.run_offsets_of(block_ids), layout.run_bytes)

    # ---- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives up what was exported and recorded; again is no error."""
        with self._registering, self._events_lock:
            open_count = sum(not region.is_closed for region in self._regions)
            if open_count:
                raise MemoryInUseError(
                    f"RDMA devices may still reach the KV memory through {open_count} regions",
                    next_step="Close every path first, and wait until it says that it is closed.",
                )
            if self._stagings:
                raise MemoryInUseError(
                    f"the device may still copy to or from the KV memory, in {len(self._stagings)} stagings",
                    next_step="Close every path first, and wait until it says that it is closed.",
                )
            self._owner = None
            self._close_fd()
            with in_context(self._driver, self._place.context):
                while self._events:
                    self._driver.destroy_event(self._events.pop())


class CudaProduced:
    """Keeps :class:`~meshfusion.host.memory.kv_memory.Produced`: ``event`` of ``memory``."""

    def __init__(self, memory: CudaKvMemory, event: int) -> None:
        self._memory = memory
        self._event = event

    def wait(self, timeout_s: float) -> None:
        self._memory.wait_event(self._event, timeout_s)


def _missing(reason: str) -> UnsupportedError:
    return UnsupportedError(reason, next_step="Use another way of registration.")
