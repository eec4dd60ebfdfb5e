"""A pool's namespaces in its blocks, whatever blocks the target shows each in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from meshfusion.host.path.rdma import NamespaceInitiator
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.nvme.memory import RegionPart, RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingTransfer
from meshfusion.jbof.nvme.registration import DmaBufRange

APPEAR_S: Final = 2.0
READ_TIMEOUT_S: Final = 5.0


class SharedInitiator(NamespaceInitiator, Protocol):
    """What is used of :class:`~meshfusion.host.path.flexpath.multipath.Multipath`."""

    def lba_bytes(self, nsid: int) -> int | None:
        """Of a block of the namespace; None: nobody has shown it."""
        ...


class NamespaceView:
    """Keeps :class:`~meshfusion.host.path.rdma.NamespaceInitiator` with addresses in blocks of ``lba_bytes``, of the
    namespaces that were :meth:`shown <add>`."""

    def __init__(self, initiator: SharedInitiator, *, lba_bytes: int) -> None:
        self._initiator = initiator
        self._lba_bytes = lba_bytes
        self._factors: dict[int, int] = {}  # the target's blocks in one of ours, by NSID

    def add(self, nsid: int, *, appear_s: float = APPEAR_S) -> None:
        """Raises :class:`~meshfusion.jbof.errors.MediaError` when the target does not show the namespace for
        ``appear_s``, and :class:`~meshfusion.jbof.errors.UnsupportedError` when its blocks are larger or do not fit."""
        theirs, ours = _wait_for(self._initiator, nsid, appear_s), self._lba_bytes
        if theirs > ours or ours % theirs:
            raise UnsupportedError(
                f"the export has blocks of {theirs} bytes, and the pool counts in blocks of {ours}",
                next_step=f"format the drive with blocks of at most {ours} bytes",
            )
        self._factors[nsid] = ours // theirs

    @property
    def max_descriptors(self) -> int:
        return self._initiator.max_descriptors

    def register_address(self, address: int, length_bytes: int, *, writable: bool, owner: object) -> RegisteredRegion:
        return self._initiator.register_address(address, length_bytes, writable=writable, owner=owner)

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        return self._initiator.register_dma_buf(memory, writable=writable, owner=owner)

    def begin_read(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self._initiator.begin_read(nsid, lba * self._factors[nsid], memory, timeout_s=timeout_s)

    def begin_write(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self._initiator.begin_write(nsid, lba * self._factors[nsid], memory, timeout_s=timeout_s)

    def flush(self, nsid: int, *, timeout_s: float) -> None:
        self._initiator.flush(nsid, timeout_s=timeout_s)

    def close(self, *, timeout_s: float) -> None:
        self._initiator.close(timeout_s=timeout_s)


def read_blocks(initiator: NamespaceInitiator, nsid: int, lba: int, length_bytes: int) -> bytes:
    """Raises :class:`~meshfusion.jbof.errors.MeshFusionError`. Not for data that matters: nothing proves it."""
    array = AlignedBuffer(length_bytes).array
    region = initiator.register_address(array.ctypes.data, array.nbytes, writable=True, owner=array)
    transfer = initiator.begin_read(nsid, lba, [region.all()], timeout_s=READ_TIMEOUT_S)
    try:
        transfer.wait()
    finally:
        if transfer.wait_memory_free(0.0):  # else it goes with the initiator, which its owner closes now
            region.close()
    return array.tobytes()


def _wait_for(initiator: SharedInitiator, nsid: int, appear_s: float) -> int:
    """The paths are open, and tell what they reach on threads of their own."""
    end_s = time.monotonic() + appear_s
    while (lba_bytes := initiator.lba_bytes(nsid)) is None:
        if time.monotonic() > end_s:
            raise MediaError(
                f"the target does not show namespace {nsid}", next_step="see the service's log and `mfctl pool status`"
            )
        time.sleep(0.005)
    return lba_bytes
