"""What a drive can do, from its Identify data (Base Figure 313, NVM Figure 114), in words and units.

The fields that are read here besides those of :mod:`meshfusion.jbof.nvme.namespaces` ::

Identify Namespace                           Identify Controller
offset  size  field                          offset  size  field
    34     2  NAWUN, 0's                        280    16  TNVMCAP, bytes
    36     2  NAWUPF, 0's
    40     2  NABSN, 0's; 0: no boundary
    44     2  NABSPF, likewise
    48    16  NVMCAP, bytes
   102     2  ENDGID
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.drives.placement import Fdp, Zones
from meshfusion.jbof.nvme.admin_commands import IDENTIFY_BYTES
from meshfusion.jbof.nvme.fields import check_received
from meshfusion.jbof.nvme.identify import ControllerInfo, NvmLimits
from meshfusion.jbof.nvme.namespaces import DeallocatedRead, LbaFormat, NamespaceInfo, WriteHints

CTRATT_ENDURANCE_GROUPS: Final = 1 << 4
CTRATT_FLEXIBLE_DATA_PLACEMENT: Final = 1 << 19

_ATOMICS: Final = struct.Struct("<HHHHHH")  # nawun, nawupf, nacwu, nabsn, nabo, nabspf, from 34
_NSFEAT_OWN_ATOMICS: Final = 1 << 1


class ReservationCapability(enum.IntFlag):
    """Bits of RESCAP (NVM Figure 114)."""

    PERSISTS = 1 << 0  # through a loss of power
    WRITE_EXCLUSIVE = 1 << 1
    EXCLUSIVE_ACCESS = 1 << 2
    WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 1 << 3
    EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 1 << 4
    WRITE_EXCLUSIVE_ALL_REGISTRANTS = 1 << 5
    EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 1 << 6
    IGNORE_EXISTING_KEY = 1 << 7


@dataclass(frozen=True, slots=True)
class AtomicWrites:
    """Sizes in logical blocks of writes that are done whole or not at all.

    ``lbas``: seen by other commands; ``power_fail_lbas``: when power is lost. A write that crosses a multiple of the
    boundary is none; None: there is no boundary.
    """

    lbas: int
    power_fail_lbas: int
    boundary_lbas: int | None
    power_fail_boundary_lbas: int | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Of one namespace, through the controller that was asked.

    ``lba_bytes`` and ``metadata_bytes`` are of the format in use, ``formats`` are all that it could be formatted to.
    None: the drive gives no ``hints``, states no ``deallocate_limits``, has no ``reservations``, ``fdp`` or ``zones``.
    ``endurance_group`` is 0 where there are none.
    """

    lba_count: int
    lba_bytes: int
    metadata_bytes: int
    formats: tuple[LbaFormat, ...]
    hints: WriteHints | None
    can_deallocate: bool
    deallocate_limits: NvmLimits | None
    deallocated_read: DeallocatedRead
    has_volatile_write_cache: bool
    atomic: AtomicWrites
    reservations: ReservationCapability | None
    is_shared: bool
    is_write_protected: bool
    endurance_group: int
    fdp: Fdp | None = None
    zones: Zones | None = None

    @property
    def capacity_bytes(self) -> int:
        return self.lba_count * self.lba_bytes

    @property
    def problem(self) -> str:
        """Why it cannot hold a pool; "" if it can."""
        if self.zones is not None:
            return "it is zoned: a zone is written in order, which segments of this version are not"
        return "its logical blocks carry metadata: format it without" if self.metadata_bytes else ""


def capabilities(
    controller: ControllerInfo,
    namespace: NamespaceInfo,
    namespace_page: bytes,
    *,
    limits: NvmLimits | None = None,
    fdp: Fdp | None = None,
    zones: Zones | None = None,
) -> Capabilities:
    """``namespace_page``: the Identify Namespace data that ``namespace`` is from."""
    has_reservations = controller.has_reservations and namespace.rescap
    return Capabilities(
        lba_count=namespace.nsze,
        lba_bytes=namespace.lba_bytes,
        metadata_bytes=namespace.lba_format.metadata_bytes,
        formats=namespace.lba_formats,
        hints=namespace.hints,
        can_deallocate=controller.has_dataset_management,
        deallocate_limits=limits,
        deallocated_read=namespace.deallocated_read,
        has_volatile_write_cache=controller.has_volatile_write_cache,
        atomic=_atomic_writes(controller, namespace.nsfeat, namespace_page),
        reservations=ReservationCapability(namespace.rescap) if has_reservations else None,
        is_shared=namespace.is_shared,
        is_write_protected=namespace.is_write_protected,
        endurance_group=endurance_group(namespace_page) if controller.ctratt & CTRATT_ENDURANCE_GROUPS else 0,
        fdp=fdp,
        zones=zones,
    )


def endurance_group(namespace_page: bytes) -> int:
    """ENDGID of the Identify Namespace data; 0 where the drive has no endurance groups."""
    check_received("the Identify Namespace data", namespace_page, IDENTIFY_BYTES)
    return int.from_bytes(namespace_page[102:104], "little")


def total_capacity_bytes(controller_page: bytes) -> int | None:
    """TNVMCAP of the Identify Controller data: of all namespaces and what is not allocated. None: not reported."""
    check_received("the Identify Controller data", controller_page, IDENTIFY_BYTES)
    return int.from_bytes(controller_page[280:296], "little") or None


def _atomic_writes(controller: ControllerInfo, nsfeat: int, page: bytes) -> AtomicWrites:
    """The namespace's own values where it says that it has some (NSFEAT bit 1; 0 there means the controller's)."""
    check_received("the Identify Namespace data", page, IDENTIFY_BYTES)
    nawun, nawupf, _nacwu, nabsn, _nabo, nabspf = _ATOMICS.unpack_from(page, 34)
    has_own = bool(nsfeat & _NSFEAT_OWN_ATOMICS)
    return AtomicWrites(
        lbas=(nawun if has_own and nawun else controller.awun) + 1,
        power_fail_lbas=(nawupf if has_own and nawupf else controller.awupf) + 1,
        boundary_lbas=nabsn + 1 if nabsn else None,
        power_fail_boundary_lbas=nabspf + 1 if nabspf else None,
    )
