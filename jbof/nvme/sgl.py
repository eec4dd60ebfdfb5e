"""Where the data of a command lies: SGL descriptors of NVMe/RDMA (Base 4.3.2, RDMA 3.3). ::

    keyed data block (Base Figure 122)         last segment, data block (Base Figures 121, 118)
    offset  size  field                        offset  size  field
         0     8  address                           0     8  offset into the capsule
         8     3  length in bytes                   8     4  length in bytes
        11     4  key                              12     3  zero
        15     1  identifier                       15     1  identifier

The identifier is the type in bits 7:4 (Base Figure 116) and the sub type in bits 3:0 (Base Figure 117, RDMA Figure
10). All descriptors lie in the command capsule: SGL Entry 1 within the submission queue entry, a list right behind it
(RDMA 3.3).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from meshfusion.jbof.nvme.fields import MAX_U32, MAX_U64, check_int, field_error

DESCRIPTOR_BYTES: Final = 16
MAX_KEYED_BYTES: Final = 2**24 - 1  # the length of a keyed descriptor has 24 bits (Base 4.3.2)
MAX_LIST_DESCRIPTORS: Final = 16  # our bound, and what SPDK's target takes

_DATA_BLOCK_OFFSET: Final = 0x01  # type 0h, sub type 1h: offset
_LAST_SEGMENT_OFFSET: Final = 0x31  # type 3h, sub type 1h: offset
_KEYED_ADDRESS: Final = 0x40  # type 4h, sub type 0h: address
_KEYED_INVALIDATE: Final = 0x4F  # type 4h, sub type Fh: the target may invalidate the key (RDMA Figure 10)
_KEYED: Final = struct.Struct("<QQ")  # the second word is length, key and identifier from low to high
_UNKEYED: Final = struct.Struct("<QI3xB")


class RemoteMemory(NamedTuple):
    """Registered memory that a target may reach.

    ``address`` is what the registration calls the first byte: a virtual address, or an offset where the memory was
    registered with one (a dma-buf). ``rkey`` is the key of the region or window; of memory that is reached through
    windows only it is no key, but the transport's number of the region.
    """

    address: int
    length_bytes: int
    rkey: int

    def part(self, offset_bytes: int, length_bytes: int) -> RemoteMemory:
        assert 0 <= offset_bytes <= offset_bytes + length_bytes <= self.length_bytes, (self, offset_bytes, length_bytes)
        return RemoteMemory(self.address + offset_bytes, length_bytes, self.rkey)


class DataPlace(enum.Enum):
    NONE = "none"
    REMOTE = "remote"  # one keyed descriptor
    REMOTE_LIST = "remote_list"  # a list of keyed descriptors in the capsule
    CAPSULE = "capsule"  # the bytes themselves, in the capsule


class DataPointer(NamedTuple):
    """SGL Entry 1 of a command (``sgl1``, 16 bytes) and what follows its submission queue entry (``in_capsule``).

    ``length_bytes`` is what all data descriptors together describe. ``window``: what a window is to be bound to, whose
    key is put into SGL Entry 1 when the command is posted.
    """

    place: DataPlace
    sgl1: bytes
    length_bytes: int
    in_capsule: bytes = b""
    window: RemoteMemory | None = None


# Not sixteen zero bytes, although that is a valid empty descriptor: Linux' target takes a data block by address for
# an error even when it is empty.
NO_DATA: Final = DataPointer(DataPlace.NONE, _KEYED.pack(0, _KEYED_ADDRESS << 56), 0)


def remote_data(memory: RemoteMemory, *, invalidate_key: bool = False) -> DataPointer:
    """The data lies in ``memory``, which must be 1 byte to 16 MiB - 1 long.

    With ``invalidate_key`` the target may answer with RDMA_SEND_INVALIDATE of the key; whether it did so, only the
    received response tells (RDMA 3.6). Raises :class:`~meshfusion.jbof.nvme.fields.NvmeFieldError`.
    """
    identifier = _KEYED_INVALIDATE if invalidate_key else _KEYED_ADDRESS
    return DataPointer(DataPlace.REMOTE, _keyed(memory, identifier), memory.length_bytes)


def window_data(memory: RemoteMemory) -> DataPointer:
    """Like :func:`remote_data`, through a memory window that is bound for this command, and whose key dies with it.

    The target is asked to invalidate the key. ``memory.rkey``: the number of the region.
    """
    return remote_data(memory._replace(rkey=0), invalidate_key=True)._replace(window=memory)


def remote_data_list(memory: Sequence[RemoteMemory]) -> DataPointer:
    """The data lies in ``memory``, piece after piece; for I/O commands to targets that take that many descriptors.

    See :attr:`~meshfusion.jbof.nvme.identify.ControllerInfo.max_sgl_descriptors`. One piece becomes one descriptor:
    SPDK's target asserts that a list has more. Keys in a list cannot be invalidated by the target, because SPDK's
    refuses the list then. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeFieldError`.
    """
    check_int("SGL descriptor count", len(memory), 1, MAX_LIST_DESCRIPTORS)
    if len(memory) == 1:
        return remote_data(memory[0])
    descriptors = b"".join(_keyed(piece, _KEYED_ADDRESS) for piece in memory)
    # The offset is 0: the list begins right behind the submission queue entry (Base 3.3.2.1.3.1).
    segment = _UNKEYED.pack(0, len(descriptors), _LAST_SEGMENT_OFFSET)
    return DataPointer(
        DataPlace.REMOTE_LIST, segment, sum(piece.length_bytes for piece in memory), in_capsule=descriptors
    )


def capsule_data(data: bytes, *, data_offset_bytes: int = 0) -> DataPointer:
    """The data itself travels in the capsule: for I/O commands from host to controller only (RDMA 3.3).

    ``data_offset_bytes`` is where the controller expects it behind the submission queue entry, and the room there is
    :attr:`~meshfusion.jbof.nvme.identify.ControllerInfo.max_capsule_data_bytes`; see
    :attr:`~meshfusion.jbof.nvme.identify.ControllerInfo.capsule_data_offset_bytes`.
    """
    check_int("in-capsule data length", len(data), 1, MAX_U32)
    assert data_offset_bytes >= 0
    descriptor = _UNKEYED.pack(0, len(data), _DATA_BLOCK_OFFSET)
    return DataPointer(DataPlace.CAPSULE, descriptor, len(data), in_capsule=bytes(data_offset_bytes) + data)


def _keyed(memory: RemoteMemory, identifier: int) -> bytes:
    check_int("SGL address", memory.address, 0, MAX_U64)
    check_int("SGL length", memory.length_bytes, 1, MAX_KEYED_BYTES)
    check_int("SGL key", memory.rkey, 0, MAX_U32)
    if memory.address + memory.length_bytes > MAX_U64 + 1:
        raise field_error("SGL address", f"{memory.address:#x} and {memory.length_bytes} bytes pass the end of 2^64")
    return _KEYED.pack(memory.address, identifier << 56 | memory.rkey << 24 | memory.length_bytes)
