"""How a drive is: two log pages (Base 5.1.12.1.3 and 5.1.12.1.10).

Both have 512 bytes, numbers little-endian ::

SMART / Health (LID 02h)                     Endurance group (LID 09h)
offset  size  field                          offset  size  field
     0     1  critical warnings                   0     1  critical warnings
     1     2  composite temperature, K            3     1  available spare, %
     3     1  available spare, %                  4     1  its threshold, %
     4     1  its threshold, %                    5     1  percentage used
     5     1  percentage used                    32    16  endurance estimate
    32    16  data units read                    48    16  data units read
    48    16  data units written                 64    16  data units written
   112    16  power cycles                       80    16  media units written
   128    16  power-on hours                    128    16  media and data integrity errors
   144    16  unsafe shutdowns
   160    16  media and data integrity errors
   176    16  entries of the error log

A data unit of the first is 1000 times 512 bytes; units of the second are 10^9 bytes. Both round up.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.fields import check_received

LOG_BYTES: Final = 512
HOURS_PER_MONTH: Final = 365.25 * 24 / 12

_DATA_UNIT_BYTES: Final = 512_000
_GROUP_UNIT_BYTES: Final = 1_000_000_000
_ZERO_CELSIUS_K: Final = 273
_WORN_PERCENT: Final = 100  # the maker's estimate of the life; the value goes on to 255


class Warnings(enum.IntFlag):
    """Bits of the critical warnings (Base 5.1.12.1.3)."""

    SPARE_LOW = 1 << 0
    TEMPERATURE = 1 << 1
    RELIABILITY_DEGRADED = 1 << 2
    READ_ONLY = 1 << 3
    BACKUP_FAILED = 1 << 4
    PERSISTENT_MEMORY_READ_ONLY = 1 << 5


@dataclass(frozen=True, slots=True)
class Health:
    """What a drive says of its life so far: SMART / Health Information (Base 5.1.12.1.3).

    ``temperature_c`` is None where a drive reports none. ``percentage_used`` may pass 100. What the host wrote is in
    ``written_bytes``; what reached the flash is not in this log (see :class:`EnduranceGroup` and
    :class:`~meshfusion.jbof.drives.placement.FdpStatistics`).
    """

    warnings: Warnings
    temperature_c: int | None
    spare_percent: int
    spare_threshold_percent: int
    percentage_used: int
    read_bytes: int
    written_bytes: int
    power_cycles: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int
    error_log_entries: int

    @property
    def is_spare_low(self) -> bool:
        return self.spare_percent < self.spare_threshold_percent or bool(self.warnings & Warnings.SPARE_LOW)

    @property
    def is_read_only(self) -> bool:
        return bool(self.warnings & Warnings.READ_ONLY)

    @property
    def months_left_by_age(self) -> float | None:
        """At the wear of its whole life so far, until 100 % are used; None while nothing can be told from it.

        Percentage used is whole: in the first percents this is coarse.
        """
        if self.percentage_used >= _WORN_PERCENT:
            return 0.0
        if not self.percentage_used or not self.power_on_hours:
            return None
        hours = self.power_on_hours * (_WORN_PERCENT - self.percentage_used) / self.percentage_used
        return hours / HOURS_PER_MONTH


@dataclass(frozen=True, slots=True)
class EnduranceGroup:
    """The log of a drive's endurance group (Base 5.1.12.1.10).

    ``estimate_bytes``: what may be written in its life; 0 where it is not reported.
    """

    warnings: Warnings
    spare_percent: int
    spare_threshold_percent: int
    percentage_used: int
    estimate_bytes: int
    read_bytes: int
    written_bytes: int
    media_written_bytes: int
    media_errors: int

    @property
    def write_amplification(self) -> float | None:
        """Of its whole life; None where one of both is not reported."""
        if not self.written_bytes or not self.media_written_bytes:
            return None
        return self.media_written_bytes / self.written_bytes


def parse_health(data: bytes) -> Health:
    """From log page 02h. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError` when it is short."""
    check_received("the SMART / Health log", data, LOG_BYTES)
    kelvin = int.from_bytes(data[1:3], "little")
    return Health(
        warnings=Warnings(data[0]),
        temperature_c=kelvin - _ZERO_CELSIUS_K if kelvin else None,
        spare_percent=data[3],
        spare_threshold_percent=data[4],
        percentage_used=data[5],
        read_bytes=_u128(data, 32) * _DATA_UNIT_BYTES,
        written_bytes=_u128(data, 48) * _DATA_UNIT_BYTES,
        power_cycles=_u128(data, 112),
        power_on_hours=_u128(data, 128),
        unsafe_shutdowns=_u128(data, 144),
        media_errors=_u128(data, 160),
        error_log_entries=_u128(data, 176),
    )


def parse_endurance_group(data: bytes) -> EnduranceGroup:
    """From log page 09h. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError` when it is short."""
    check_received("the Endurance Group log", data, LOG_BYTES)
    return EnduranceGroup(
        warnings=Warnings(data[0]),
        spare_percent=data[3],
        spare_threshold_percent=data[4],
        percentage_used=data[5],
        estimate_bytes=_u128(data, 32) * _GROUP_UNIT_BYTES,
        read_bytes=_u128(data, 48) * _GROUP_UNIT_BYTES,
        written_bytes=_u128(data, 64) * _GROUP_UNIT_BYTES,
        media_written_bytes=_u128(data, 80) * _GROUP_UNIT_BYTES,
        media_errors=_u128(data, 128),
    )


def _u128(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 16], "little")
