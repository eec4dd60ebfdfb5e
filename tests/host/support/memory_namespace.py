"""A namespace in memory behind the initiator's calls, with faults at will: it reads and writes registered addresses."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.nvme.memory import RegionPart, RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingTransfer
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange, MemoryRange
from meshfusion.jbof.nvme.sgl import RemoteMemory

NSID = 1


@dataclass
class Held:
    """A transfer whose end the test decides. ``land``: its data arrives now, wherever it goes."""

    pending: PendingTransfer
    land: Callable[[], None]


@dataclass
class MemoryNamespace:
    """Keeps :class:`~meshfusion.host.path.rdma.NamespaceInitiator`."""

    capacity_bytes: int
    max_descriptors: int = 1
    error: MeshFusionError | None = None  # of every transfer
    is_retryable: bool = False  # that error
    holds: bool = False  # transfers stay under way until the test ends them
    flush_error: MeshFusionError | None = None
    medium: bytearray = field(init=False)
    held: list[Held] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)
    regions: list[RegisteredRegion] = field(default_factory=list)
    is_closed: bool = False
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    nsid: int = NSID
    lba_bytes: int = LBA_BYTES

    def __post_init__(self) -> None:
        self.medium = bytearray(self.capacity_bytes)
        self._next_key = 100

    def register_address(self, address: int, length_bytes: int, *, writable: bool, owner: object) -> RegisteredRegion:
        assert writable
        return self.new_region(AddressRange(address, length_bytes), owner)

    def new_region(self, memory: MemoryRange, owner: object) -> RegisteredRegion:
        self._next_key += 1
        remote = RemoteMemory(memory.first_iova, memory.length_bytes, self._next_key)
        region = RegisteredRegion(remote, owner, lambda: None)
        self.regions.append(region)
        return region

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        raise UnsupportedError("a namespace in memory has no dma-bufs", next_step="none")

    def begin_read(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self._begin("read", nsid, lba, memory, timeout_s)

    def begin_write(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self._begin("write", nsid, lba, memory, timeout_s)

    def flush(self, nsid: int, *, timeout_s: float) -> None:
        assert nsid == self.nsid
        self.log.append(("flush", 0))
        if self.flush_error is not None:
            raise self.flush_error

    def close(self, *, timeout_s: float) -> None:
        """Queue pairs die: what is held is in doubt, and its memory free."""
        self.is_closed = True
        for held in self.held:
            held.pending.doubt(gone())
            held.pending.free_memory()
        self.held.clear()
        for region in self.regions:
            region.revoke()

    def rdma_write(self, remote: RemoteMemory, data: bytes) -> None:
        ctypes.memmove(remote.address, data, remote.length_bytes)

    def rdma_read(self, remote: RemoteMemory) -> bytes:
        return ctypes.string_at(remote.address, remote.length_bytes)

    def _begin(self, what: str, nsid: int, lba: int, memory: Sequence[RegionPart], timeout_s: float) -> PendingTransfer:
        assert nsid == self.nsid
        pending = PendingTransfer(memory, time.monotonic() + timeout_s)
        self.log.append((what, lba))
        remotes = [part.remote for part in memory]

        def land() -> None:
            at = lba * self.lba_bytes
            for remote in remotes:
                if what == "read":
                    self.rdma_write(remote, bytes(self.medium[at : at + remote.length_bytes]))
                else:
                    self.medium[at : at + remote.length_bytes] = self.rdma_read(remote)
                at += remote.length_bytes

        if self.is_closed:
            pending.end(gone())
        elif self.error is not None:
            pending.end(self.error, is_retryable=self.is_retryable)
        elif self.holds:
            self.held.append(Held(pending, land))
            self.waiting.release()
        else:
            try:
                land()
            except AssertionError:
                pending.end(gone())
                raise
            pending.end()
        return pending


def gone() -> MediaError:
    return MediaError("the connection is gone", next_step="connect again")
