"""What a controller says of its namespaces (NVM Figure 114, Base Figures 139 and 316)."""

from __future__ import annotations

import enum
import struct
import uuid
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.admin_commands import IDENTIFY_BYTES
from meshfusion.jbof.nvme.fields import MAX_NSID, check_received, protocol_error

NAMESPACE_LIST_ENTRIES: Final = 1024

_MAX_LBA_FORMATS: Final = 64
_MIN_LBA_BYTES_LOG2: Final = 9
_MAX_LBA_BYTES_LOG2: Final = 31
_HEAD: Final = struct.Struct("<QQQBBBBBBBBBB")  # nsze to dlfeat
_HINTS: Final = struct.Struct("<HHHHH")  # npwg to nows, from 64
_LBA_FORMAT: Final = struct.Struct("<HBB")


class DeallocatedRead(enum.Enum):
    """What deallocated blocks read as: bits 2:0 of DLFEAT."""

    UNKNOWN = 0
    ZEROS = 1
    ONES = 2


@dataclass(frozen=True, slots=True)
class LbaFormat:
    """``lba_bytes``: data of a block, 0 if the format is not available. ``rp``: 0 is the fastest, 3 the slowest."""

    lba_bytes: int
    metadata_bytes: int
    rp: int


@dataclass(frozen=True, slots=True)
class WriteHints:
    """Sizes in logical blocks that suit the medium; the fields are 0's based and these are not (NVM 5.2.2).

    ``npdg`` is None where a controller reports it only in a wider field of other Identify data.
    """

    npwg: int
    npwa: int
    npdg: int | None
    npda: int
    nows: int


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """Fields of NVM Figure 114 under their names there.

    ``nsze``, ``ncap``, ``nuse`` and ``noiob`` (0: none) are in logical blocks. ``lba_format`` is the one in use.
    ``hints`` is None if the controller reports none. ``nguid`` and ``eui64`` are big-endian, and zero if unknown.
    """

    nsze: int
    ncap: int
    nuse: int
    nsfeat: int
    flbas: int
    dps: int
    nmic: int
    rescap: int
    dlfeat: int
    noiob: int
    hints: WriteHints | None
    anagrpid: int
    nsattr: int
    nguid: bytes
    eui64: bytes
    lba_formats: tuple[LbaFormat, ...]
    lba_format: LbaFormat

    @property
    def lba_bytes(self) -> int:
        return self.lba_format.lba_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.nsze * self.lba_bytes

    @property
    def metadata_is_interleaved(self) -> bool:
        """Each block is followed by its metadata in the data: such namespaces are none for us."""
        return bool(self.flbas >> 4 & 1) and self.lba_format.metadata_bytes > 0

    @property
    def has_protection_information(self) -> bool:
        return bool(self.dps & 0x7)

    @property
    def is_shared(self) -> bool:
        """Other controllers may reach it too, so that it may have several paths: bit 0 of NMIC."""
        return bool(self.nmic & 1)

    @property
    def is_write_protected(self) -> bool:
        return bool(self.nsattr & 1)

    @property
    def write_zeroes_deallocates(self) -> bool:
        """Write Zeroes takes the DEAC bit."""
        return bool(self.dlfeat >> 3 & 1)

    @property
    def deallocated_read(self) -> DeallocatedRead:
        value = self.dlfeat & 0x7
        return DeallocatedRead(value) if value in (1, 2) else DeallocatedRead.UNKNOWN


@dataclass(frozen=True, slots=True)
class NamespaceIds:
    """What a namespace is known by; None for what it has not (Base Figure 316)."""

    eui64: bytes | None = None
    nguid: bytes | None = None
    uuid: uuid.UUID | None = None
    csi: int | None = None


def parse_namespace(data: bytes) -> NamespaceInfo | None:
    """From Identify, CNS 00h. None: the namespace is not active, for which a controller returns zeros.

    Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`.
    """
    check_received("the Identify Namespace data", data, IDENTIFY_BYTES)
    if not any(data[:IDENTIFY_BYTES]):
        return None
    nsze, ncap, nuse, nsfeat, nlbaf, flbas, _mc, _dpc, dps, nmic, rescap, _fpi, dlfeat = _HEAD.unpack_from(data)
    # The formats with attributes of their own follow the others (NVM 5.5); data[82] counts them.
    format_count = nlbaf + 1 + data[82]
    formats = _lba_formats(data, format_count)
    return NamespaceInfo(
        nsze=nsze,
        ncap=ncap,
        nuse=nuse,
        nsfeat=nsfeat,
        flbas=flbas,
        dps=dps,
        nmic=nmic,
        rescap=rescap,
        dlfeat=dlfeat,
        noiob=int.from_bytes(data[46:48], "little"),
        hints=_hints(data, nsfeat),
        anagrpid=int.from_bytes(data[92:96], "little"),
        nsattr=data[99],
        nguid=bytes(data[104:120]),
        eui64=bytes(data[120:128]),
        lba_formats=formats,
        lba_format=_format_in_use(formats, flbas),
    )


def parse_namespace_list(data: bytes) -> tuple[int, ...]:
    """From Identify, CNS 02h: ascending, up to its end or the first 0 (Base Figure 139).

    With ``NAMESPACE_LIST_ENTRIES`` of them there may be more behind the last. Raises
    :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`.
    """
    check_received("the namespace list", data, IDENTIFY_BYTES)
    nsids: list[int] = []
    for (nsid,) in struct.iter_unpack("<I", data[:IDENTIFY_BYTES]):
        if nsid == 0:
            break
        if nsid > MAX_NSID or (nsids and nsid <= nsids[-1]):
            raise protocol_error(f"the namespace list is not in order: {nsid:#x} comes after {nsids[-1:]}")
        nsids.append(nsid)
    return tuple(nsids)


def parse_namespace_descriptors(data: bytes) -> NamespaceIds:
    """From Identify, CNS 03h. Descriptors of unknown types are passed over.

    Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`.
    """
    check_received("the namespace descriptors", data, IDENTIFY_BYTES)
    found: dict[int, bytes] = {}
    offset = 0
    while offset + 4 <= IDENTIFY_BYTES and data[offset + 1]:  # a length of 0 ends the list
        kind, length_bytes = data[offset], data[offset + 1]
        end = offset + 4 + length_bytes
        if end > IDENTIFY_BYTES or length_bytes != _ID_BYTES.get(kind, length_bytes):
            raise protocol_error(f"a namespace descriptor of type {kind} at byte {offset} is {length_bytes} bytes long")
        found[kind] = bytes(data[offset + 4 : end])
        offset = end
    return NamespaceIds(
        eui64=found.get(_EUI64),
        nguid=found.get(_NGUID),
        uuid=uuid.UUID(bytes=found[_UUID]) if _UUID in found else None,
        csi=found[_CSI][0] if _CSI in found else None,
    )


_EUI64, _NGUID, _UUID, _CSI = 1, 2, 3, 4
_ID_BYTES: Final = {_EUI64: 8, _NGUID: 16, _UUID: 16, _CSI: 1}


def _lba_formats(data: bytes, count: int) -> tuple[LbaFormat, ...]:
    formats = []
    for index in range(min(count, _MAX_LBA_FORMATS)):
        metadata_bytes, lbads, performance = _LBA_FORMAT.unpack_from(data, 128 + 4 * index)
        usable = _MIN_LBA_BYTES_LOG2 <= lbads <= _MAX_LBA_BYTES_LOG2
        formats.append(LbaFormat(1 << lbads if usable else 0, metadata_bytes, performance & 0x3))
    return tuple(formats)


def _format_in_use(formats: tuple[LbaFormat, ...], flbas: int) -> LbaFormat:
    # Bits 6:5 are to be ignored unless there are more than 16 formats.
    index = flbas & 0xF | (flbas >> 5 & 0x3) << 4 if len(formats) > 16 else flbas & 0xF
    if index >= len(formats) or formats[index].lba_bytes == 0:
        raise protocol_error(f"the namespace uses LBA format {index}, which is none of its {len(formats)} valid ones")
    return formats[index]


def _hints(data: bytes, nsfeat: int) -> WriteHints | None:
    optperf = nsfeat >> 4 & 0x3  # NVM Figure 115; before NVM 1.1 it was one bit, with the meaning of 01b
    if not optperf:
        return None
    npwg, npwa, npdg, npda, nows = (value + 1 for value in _HINTS.unpack_from(data, 64))
    return WriteHints(npwg, npwa, None if optperf == 0b10 else npdg, npda, nows)
