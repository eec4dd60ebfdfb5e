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
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.cuda_driver import CudaDriver, DmaBufMapping, in_context
from meshfusion.host.memory.cuda_facts import CudaFacts, whole_pages
from meshfusion.host.memory.kv_memory import Produced, Registrar
from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.memory import MemoryInUseError, RegisteredRegion
from meshfusion.jbof.nvme.registration import DmaBufRange

_POLL_S: Final = 0.0005


class UnitDigests(Protocol):
    """Keeps the contract of :class:`~meshfusion.host.memory.torch_digest.TorchDigest`."""

    def digest_units(self, run_offsets: npt.NDArray[np.int64], run_bytes: int) -> list[bytes]: ...


class Way(enum.Enum):
    DMA_BUF_PCIE = "dma-buf with PCIe mapping"
    DMA_BUF = "dma-buf"
    PEERMEM = "nvidia-peermem"


_MAPPINGS: Final = {Way.DMA_BUF_PCIE: DmaBufMapping.PCIE, Way.DMA_BUF: DmaBufMapping.DEFAULT}


class CudaKvMemory:
    """Keeps :class:`~meshfusion.host.memory.kv_memory.KvMemory`, for ``length_bytes`` at ``address`` of a device.

    ``owner`` keeps the memory allocated, also for regions of it. ``current_stream`` answers which stream the calling
    thread issues the engine's work to (the driver's handle). ``digests`` runs on the device, after what the host has
    waited for. Raises :class:`~meshfusion.jbof.errors.MediaError` if the driver fails.
    """

    def __init__(
        self,
        driver: CudaDriver,
        facts: CudaFacts,
        address: int,
        length_bytes: int,
        *,
        owner: object,
        digests: UnitDigests,
        current_stream: Callable[[], int],
    ) -> None:
        self._driver = driver
        self._facts = facts
        self._address = address
        self._length_bytes = length_bytes
        self._owner: object = owner
        self._digests = digests
        self._current_stream = current_stream
        self._registering = threading.Lock()
        self._way: Way | None = None
        self._fd: int | None = None
        self._regions: list[RegisteredRegion] = []
        self._events_lock = threading.Lock()  # another one: the engine's thread must not wait for a registration
        self._events: set[int] = set()
        with in_context(driver, facts.context):
            driver.set_sync_memops(address)

    @property
    def way(self) -> Way | None:
        """How it is registered, for people; None: not yet."""
        return self._way

    # ---- registration --------------------------------------------------------------------------------------------

    def register(self, registrar: Registrar) -> RegisteredRegion:
        with self._registering:
            assert self._owner is not None, "used after close"
            region = self._register_first(registrar) if self._way is None else self._register(self._way, registrar)
            self._regions = [*(known for known in self._regions if not known.is_closed), region]
            return region

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
            if not self._facts.takes_peermem:
                raise _missing("the kernel module is not loaded, or the device does not support GPUDirect RDMA")
            return registrar.register_address(self._address, self._length_bytes, writable=True, owner=self._owner)
        if not self._facts.takes_dma_buf:
            raise _missing("the driver or the device has no dma-buf support")
        pages = whole_pages(self._address, self._length_bytes, self._facts.allocation)
        if self._fd is None:
            # Kept open until the end: a path that joins later registers it again.
            with in_context(self._driver, self._facts.context):
                self._fd = self._driver.export_dma_buf(pages.address, pages.length_bytes, _MAPPINGS[way])
        memory = DmaBufRange(self._fd, pages.offset_bytes, self._length_bytes)
        return registrar.register_dma_buf(memory, writable=True, owner=self._owner)

    def _close_fd(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._driver.close_dma_buf(fd)

    # ---- order ---------------------------------------------------------------------------------------------------

    def produced(self) -> Produced:
        assert self._owner is not None, "used after close"
        driver = self._driver
        with in_context(driver, self._facts.context):
            event = driver.create_event()
            with self._events_lock:
                self._events.add(event)
            driver.record_event(event, self._current_stream())
        return CudaProduced(self, event)

    def wait_event(self, event: int, timeout_s: float) -> None:
        """Nothing to wait for when it was waited for before. Raises MediaError when it is not done in time."""
        end_s = time.monotonic() + timeout_s
        with in_context(self._driver, self._facts.context):
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
            f"the device did not finish within {timeout_s:g} s what was to be saved",
            next_step="See whether the engine's device hangs (nvidia-smi, dmesg).",
        )

    def arrived(self) -> None:
        """A device whose flush fails has lost its context, and the engine with it."""
        if self._facts.needs_flush:
            with in_context(self._driver, self._facts.context):
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
            self._owner = None
            self._close_fd()
            with in_context(self._driver, self._facts.context):
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
