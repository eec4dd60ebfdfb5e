"""Whether a drive lets the host say where data goes: Flexible Data Placement and zones.

FDP configurations log page, LID 20h of Base ::

offset  size  field                          offset  size  of each configuration
     0     2  number of configurations, 0's       0     2  size of this descriptor
     2     1  version                             2     1  attributes: bit 7 valid, bit 4 volatile cache, 3:0 RGIF
     4     4  size of the log                     3     1  size of the vendor's part
    16        the configurations                  4     4  number of reclaim groups
                                                  8     2  number of reclaim unit handles
                                                 10     2  most placement identifiers, 0's
                                                 12     4  namespaces supported
                                                 16     8  bytes of a reclaim unit
                                                 24     4  estimated limit of its open time, s
                                                 64   4*n  the handles; byte 0: type

FDP statistics log page, LID 22h: three numbers of 16 bytes: written by hosts, written to the medium, erased.

Identify Namespace of the Zoned Namespace command set, CNS 05h CSI 02h of the ZNS specification: from byte 2816 on, 16
bytes for each LBA format: 8 of zone size in logical blocks, 1 of the size of zone descriptor extensions.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.fields import MAX_U32, check_received, protocol_error

FDP_STATISTICS_BYTES: Final = 64
ZNS_NAMESPACE_BYTES: Final = 4096

_HEADER: Final = struct.Struct("<HBxI8x")
_CONFIG: Final = struct.Struct("<HBBIHHIQI36x")
_HANDLE_BYTES: Final = 4
_ZONES: Final = struct.Struct("<QB7x")
_ZONES_OFFSET: Final = 2816
assert _HEADER.size == 16
assert _CONFIG.size == 64


class Isolation(enum.IntEnum):
    """Of the data behind a reclaim unit handle, when the drive moves it."""

    INITIAL = 1  # until garbage collection mixes it with that of others
    PERSISTENT = 2


@dataclass(frozen=True, slots=True)
class FdpConfig:
    """``handles``: one for each reclaim unit handle; None for types that we do not know."""

    is_valid: bool
    has_volatile_write_cache: bool
    reclaim_group_count: int
    handles: tuple[Isolation | None, ...]
    max_placement_ids: int
    max_namespaces: int
    reclaim_unit_bytes: int
    open_limit_s: int


@dataclass(frozen=True, slots=True)
class Fdp:
    """``enabled``: the configuration in use; None while Flexible Data Placement is off."""

    configs: tuple[FdpConfig, ...]
    enabled: FdpConfig | None


@dataclass(frozen=True, slots=True)
class FdpStatistics:
    """Since the endurance group was made (log page 22h)."""

    host_written_bytes: int
    media_written_bytes: int
    media_erased_bytes: int

    @property
    def write_amplification(self) -> float | None:
        """None before anything was written."""
        return self.media_written_bytes / self.host_written_bytes if self.host_written_bytes else None


@dataclass(frozen=True, slots=True)
class Zones:
    """``max_active``, ``max_open``: None for no limit (FFFFFFFFh there)."""

    zone_lbas: int
    max_active: int | None
    max_open: int | None


def fdp_configs_bytes(header: bytes) -> int:
    """The size of the whole log, from its first 16 bytes."""
    check_received("the FDP configurations log", header, _HEADER.size)
    return max(_HEADER.size, int(_HEADER.unpack_from(header)[2]))


def parse_fdp_configs(data: bytes) -> tuple[FdpConfig, ...]:
    """From log page 20h. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`."""
    check_received("the FDP configurations log", data, _HEADER.size)
    last, _version, _size = _HEADER.unpack_from(data)
    configs = []
    offset = _HEADER.size
    for _ in range(last + 1):
        check_received("the FDP configurations log", data, offset + _CONFIG.size)
        size, attributes, _, groups, handle_count, max_ids, namespaces, unit, limit_s = _CONFIG.unpack_from(
            data, offset
        )
        handles_end = offset + _CONFIG.size + handle_count * _HANDLE_BYTES
        if size < handles_end - offset:
            raise protocol_error(f"an FDP configuration says that it has {size} bytes and {handle_count} handles")
        check_received("the FDP configurations log", data, handles_end)
        types = data[offset + _CONFIG.size : handles_end : _HANDLE_BYTES]
        configs.append(
            FdpConfig(
                is_valid=bool(attributes >> 7 & 1),
                has_volatile_write_cache=bool(attributes >> 4 & 1),
                reclaim_group_count=groups,
                handles=tuple(Isolation(kind) if kind in (1, 2) else None for kind in types),
                max_placement_ids=max_ids + 1,
                max_namespaces=namespaces,
                reclaim_unit_bytes=unit,
                open_limit_s=limit_s,
            )
        )
        offset += size
    return tuple(configs)


def fdp_from_feature(configs: tuple[FdpConfig, ...], feature: int) -> Fdp:
    """``feature``: the value of feature 1Dh of Base: bit 0 on or off, bits 15:8 which configuration.

    Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError` for a configuration that is not there.
    """
    if not feature & 1:
        return Fdp(configs, None)
    index = feature >> 8 & 0xFF
    if index >= len(configs):
        raise protocol_error(f"FDP configuration {index} is in use, and there are {len(configs)}")
    return Fdp(configs, configs[index])


def parse_fdp_statistics(data: bytes) -> FdpStatistics:
    """From log page 22h. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError` when it is short."""
    check_received("the FDP statistics log", data, 48)
    return FdpStatistics(*(int.from_bytes(data[offset : offset + 16], "little") for offset in (0, 16, 32)))


def parse_zones(data: bytes, lba_format_index: int) -> Zones:
    """For the LBA format in use. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`."""
    check_received("the ZNS Identify Namespace data", data, ZNS_NAMESPACE_BYTES)
    max_active, max_open = struct.unpack_from("<II", data, 4)
    zone_lbas, _extension = _ZONES.unpack_from(data, _ZONES_OFFSET + lba_format_index * _ZONES.size)
    if not zone_lbas:
        raise protocol_error("the zones have no size")
    return Zones(zone_lbas, *(None if value == MAX_U32 else value + 1 for value in (max_active, max_open)))
