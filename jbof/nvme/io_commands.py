"""Commands for I/O queues: Read, Write, Flush, Write Zeroes, Dataset Management (NVM 3.3, Base chapter 7).

All builders raise :class:`~meshfusion.jbof.nvme.fields.NvmeFieldError` for values out of range. Lengths are in
logical blocks; what a controller takes at once is less than what the fields can hold:
:mod:`meshfusion.jbof.nvme.split` keeps to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.command import Command, IoOpcode, common_command
from meshfusion.jbof.nvme.fields import (
    BROADCAST_NSID,
    MAX_U16,
    MAX_U32,
    MAX_U64,
    check_int,
    check_nsid,
    check_received,
    field_error,
)
from meshfusion.jbof.nvme.sgl import DataPlace, DataPointer

MAX_COMMAND_LBAS: Final = 65536  # NLB has 16 bits and is 0's based
MAX_RANGES: Final = 256  # NR has 8 bits and is 0's based
RANGE_BYTES: Final = 16

_FORCE_UNIT_ACCESS: Final = 1 << 30
_WRITE_ZEROES_DEALLOCATE: Final = 1 << 25
_DATASET_DEALLOCATE: Final = 1 << 2
_DATA_PLACEMENT: Final = 2 << 20  # DTYPE, bits 23:20 of dword 12
_RECLAIM_UNIT_HANDLE_STATUS: Final = 1  # MO
_RUH_HEAD: Final = struct.Struct("<14xH")  # NRUHSD
_RUH_ENTRY_BYTES: Final = 32
RECLAIM_UNIT_HANDLES_BYTES: Final = _RUH_HEAD.size + 127 * _RUH_ENTRY_BYTES
"""Of a status with as many handles as a namespace can have, but for one: it fits into a page."""
_RANGE: Final = struct.Struct("<IIQ")  # context attributes, length in logical blocks, starting LBA
assert _RANGE.size == RANGE_BYTES


@dataclass(frozen=True, slots=True)
class LbaRange:
    lba: int
    lba_count: int


def read(nsid: int, lba: int, lba_count: int, data: DataPointer) -> Command:
    """NVM Figures 50 to 53. ``data`` takes all blocks."""
    if data.place is DataPlace.CAPSULE:
        raise field_error("Read data", "cannot lie in the capsule: it goes from the controller to the host")
    return _transfer(IoOpcode.READ, nsid, lba, lba_count, data, flags=0)


def write(
    nsid: int,
    lba: int,
    lba_count: int,
    data: DataPointer,
    *,
    force_unit_access: bool = False,
    placement_id: int | None = None,
) -> Command:
    """NVM Figures 67 to 70. With ``force_unit_access`` it completes only when the data is durable.

    ``placement_id``: the Placement Identifier that it names, one of :func:`parse_placement_ids` (the Data Placement
    directive, Base 8.1.8.4): DTYPE 02h, and DSPEC in dword 13.
    """
    flags = _FORCE_UNIT_ACCESS if force_unit_access else 0
    if placement_id is None:
        return _transfer(IoOpcode.WRITE, nsid, lba, lba_count, data, flags=flags)
    specific = check_int("DSPEC", placement_id, 0, MAX_U16) << 16
    return _transfer(IoOpcode.WRITE, nsid, lba, lba_count, data, flags=flags | _DATA_PLACEMENT, cdw13=specific)


def reclaim_unit_handles(nsid: int, data: DataPointer) -> Command:
    """I/O Management Receive of the Reclaim Unit Handle Status: what a namespace's writes may name (Base 7.3)."""
    if not 0 < data.length_bytes <= MAX_U16 or data.length_bytes % 4:
        raise field_error("NUMD", f"{data.length_bytes} bytes are not whole dwords, or too many")
    return common_command(
        IoOpcode.IO_MANAGEMENT_RECEIVE,
        nsid=check_nsid(nsid),
        data=data,
        cdw10=_RECLAIM_UNIT_HANDLE_STATUS,
        cdw11=data.length_bytes // 4 - 1,
    )


def parse_placement_ids(data: bytes) -> tuple[int, ...]:
    """The Placement Identifiers of a Reclaim Unit Handle Status, as many as ``data`` has: in the order of the
    namespace's placement handles; a write that names none goes to the first (Base Figure 342)."""
    check_received("the reclaim unit handle status", data, _RUH_HEAD.size)
    (count,) = _RUH_HEAD.unpack_from(data)
    entries = range(_RUH_HEAD.size, min(len(data), _RUH_HEAD.size + count * _RUH_ENTRY_BYTES), _RUH_ENTRY_BYTES)
    whole = [at for at in entries if at + _RUH_ENTRY_BYTES <= len(data)]
    return tuple(int.from_bytes(data[at : at + 2], "little") for at in whole)


def flush(nsid: int) -> Command:
    """Make durable what completed before, in one namespace or (FFFFFFFFh) in all (Base 7.2).

    Whether a controller takes FFFFFFFFh:
    :attr:`~meshfusion.jbof.nvme.identify.ControllerInfo.flushes_all_namespaces`.
    """
    return common_command(IoOpcode.FLUSH, nsid=check_int("NSID", nsid, 1, BROADCAST_NSID))


def write_zeroes(
    nsid: int, lba: int, lba_count: int, *, deallocate: bool = False, force_unit_access: bool = False
) -> Command:
    """NVM Figures 81 and 82. ``deallocate`` (DEAC) is a request; SPDK's target refuses it as an invalid field."""
    flags = (_WRITE_ZEROES_DEALLOCATE if deallocate else 0) | (_FORCE_UNIT_ACCESS if force_unit_access else 0)
    _check_blocks(lba, check_int("NLB + 1", lba_count, 1, MAX_COMMAND_LBAS))
    return common_command(
        IoOpcode.WRITE_ZEROES,
        nsid=check_nsid(nsid),
        cdw10=lba & MAX_U32,
        cdw11=lba >> 32,
        cdw12=flags | lba_count - 1,
    )


def deallocate(nsid: int, range_count: int, data: DataPointer) -> Command:
    """Dataset Management with the Deallocate attribute (NVM Figures 44 to 46).

    ``data`` describes what :func:`encode_ranges` made of ``range_count`` ranges; it may travel in the capsule. A
    controller may ignore what exceeds its limits (NVM 3.3.3.1; see
    :class:`~meshfusion.jbof.nvme.identify.NvmLimits`).
    """
    check_int("NR + 1", range_count, 1, MAX_RANGES)
    if data.length_bytes != range_count * RANGE_BYTES:
        raise field_error("range list", f"has {data.length_bytes} bytes instead of {range_count} times {RANGE_BYTES}")
    return common_command(
        IoOpcode.DATASET_MANAGEMENT,
        nsid=check_nsid(nsid),
        data=data,
        cdw10=range_count - 1,
        cdw11=_DATASET_DEALLOCATE,
    )


def encode_ranges(ranges: Iterable[LbaRange]) -> bytes:
    """The range list of :func:`deallocate`, without context attributes (NVM Figure 46)."""
    packed = []
    for item in ranges:
        _check_blocks(item.lba, check_int("LLB", item.lba_count, 1, MAX_U32))
        packed.append(_RANGE.pack(0, item.lba_count, item.lba))
    check_int("number of ranges", len(packed), 1, MAX_RANGES)
    return b"".join(packed)


def decode_ranges(data: bytes, range_count: int) -> tuple[LbaRange, ...]:
    """What :func:`encode_ranges` made; context attributes are dropped."""
    check_int("number of ranges", range_count, 1, MAX_RANGES)
    check_received("the range list", data, range_count * RANGE_BYTES)
    entries = _RANGE.iter_unpack(data[: range_count * RANGE_BYTES])
    return tuple(LbaRange(lba, lba_count) for _, lba_count, lba in entries)


def _transfer(
    opcode: IoOpcode, nsid: int, lba: int, lba_count: int, data: DataPointer, flags: int, cdw13: int = 0
) -> Command:
    _check_blocks(lba, check_int("NLB + 1", lba_count, 1, MAX_COMMAND_LBAS))
    if data.place is DataPlace.NONE or data.length_bytes % lba_count:
        raise field_error("data length", f"is {data.length_bytes} bytes; {lba_count} equal blocks are to be moved")
    return common_command(
        opcode,
        nsid=check_nsid(nsid),
        data=data,
        cdw10=lba & MAX_U32,
        cdw11=lba >> 32,
        cdw12=flags | lba_count - 1,
        cdw13=cdw13,
    )


def _check_blocks(lba: int, lba_count: int) -> None:
    check_int("SLBA", lba, 0, MAX_U64)
    if lba + lba_count > MAX_U64 + 1:
        raise field_error("SLBA", f"{lba} and {lba_count} blocks pass the end of 2^64")
