"""What of a machine's memory can be registered with an RDMA device, and what targets call its first byte.

Every kind of memory region has its own rule for that; this is the only place that knows them:

=====================  ===============================  ==================================================
kind                   registered with                  the first byte is called (its IOVA)
=====================  ===============================  ==================================================
host memory            ``ibv_reg_mr``                   its virtual address
a device's memory      ``ibv_reg_mr``, nvidia-peermem   its virtual address on the device
a dma-buf              ``ibv_reg_dmabuf_mr``            its offset in the dma-buf: pyverbs' DmaBufMR passes
                                                        the offset as IOVA; an address is not accepted
=====================  ===============================  ==================================================

A region never reaches over what was registered, to the byte, although devices map whole pages.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.verbs_names import Verbs


@dataclass(frozen=True, slots=True)
class AddressRange:
    """Memory at its virtual address: the host's, or a device's where a kernel module gives it to RDMA devices."""

    address: int
    length_bytes: int

    @property
    def first_iova(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class DmaBufRange:
    """``length_bytes`` from ``offset_bytes`` on of the dma-buf behind ``fd``, which is open while it is registered."""

    fd: int
    offset_bytes: int
    length_bytes: int

    @property
    def first_iova(self) -> int:
        return self.offset_bytes


MemoryRange = AddressRange | DmaBufRange


class VerbsRegion(NamedTuple):
    """``mr``: pyverbs' region; ``rkey``: what targets need besides an IOVA."""

    mr: Any
    rkey: int


def register_range(
    verbs: Verbs,
    pd: Any,
    memory: MemoryRange,
    *,
    writable: bool,
    device_name: str,
    key_scope: KeyScope = KeyScope.REGION,
) -> VerbsRegion:
    """Let the queue pairs of ``pd`` read, and if ``writable`` write, this memory.

    Where ``key_scope`` is the command they may do so through memory windows only: the region has no key that opens it.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` where the device or pyverbs cannot register dma-bufs,
    :class:`~meshfusion.jbof.errors.MediaError` when a device or a limit of the system does not allow it.
    """
    match key_scope:
        case KeyScope.REGION:
            access = verbs.IBV_ACCESS_REMOTE_READ | (verbs.IBV_ACCESS_REMOTE_WRITE if writable else 0)
        case KeyScope.COMMAND:
            access = verbs.IBV_ACCESS_MW_BIND
    if writable:  # windows that are written through need it, too
        access |= verbs.IBV_ACCESS_LOCAL_WRITE
    try:
        match memory:
            case AddressRange(address, length_bytes):
                mr = verbs.MR(pd, length_bytes, access, address=address)
            case DmaBufRange(fd, offset_bytes, length_bytes):
                mr = verbs.DmaBufMR(pd, length_bytes, access, dmabuf=fd, offset=offset_bytes)
    except verbs.PyverbsError as error:
        if isinstance(memory, DmaBufRange) and getattr(error, "error_code", None) == errno.EOPNOTSUPP:
            raise UnsupportedError(
                f"{device_name} cannot register dma-bufs: {error}",
                next_step="Use a NIC and kernel with dma-buf support (mlx5, Linux 5.12), or load nvidia-peermem.",
            ) from error
        raise MediaError(
            f"{_named(memory)} cannot be registered with {device_name}: {error}",
            next_step="Raise the limit on locked memory (ulimit -l), or register less.",
        ) from error
    return VerbsRegion(mr, int(mr.rkey))


def deregister(verbs: Verbs, mr: Any) -> None:
    """The key is dead when this returns. Raises :class:`~meshfusion.jbof.errors.MediaError`: it may not be."""
    try:
        mr.close()
    except verbs.PyverbsError as error:
        raise MediaError(
            f"the RDMA device does not end access to registered memory: {error}",
            next_step="End the process before that memory is used for something else.",
        ) from error


def _named(memory: MemoryRange) -> str:
    match memory:
        case AddressRange(address, length_bytes):
            return f"{length_bytes} bytes at {address:#x}"
        case DmaBufRange(_, offset_bytes, length_bytes):
            return f"{length_bytes} bytes at {offset_bytes} of a dma-buf"
