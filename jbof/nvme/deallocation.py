"""Ranges to deallocate, into as many Dataset Management commands as a controller heeds (NVM 3.3.3, Figure 120)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshfusion.jbof.nvme.fields import MAX_U32
from meshfusion.jbof.nvme.identify import NvmLimits
from meshfusion.jbof.nvme.io_commands import MAX_RANGES, LbaRange


def split_ranges(ranges: Iterable[LbaRange], limits: NvmLimits | None) -> tuple[tuple[LbaRange, ...], ...]:
    """The range list of each command, in order. ``limits`` is None for a controller that tells none.

    A controller may ignore what exceeds its limits, so none is exceeded: ranges in a command (DMRL), blocks in a range
    (DMRSL), blocks in a command (DMSL).
    """
    max_ranges = min(limits.dmrl or MAX_RANGES, MAX_RANGES) if limits else MAX_RANGES
    max_command_lbas = limits.dmsl if limits and limits.dmsl else None
    max_range_lbas = min((limits.dmrsl if limits else 0) or MAX_U32, max_command_lbas or MAX_U32)
    commands: list[tuple[LbaRange, ...]] = []
    current: list[LbaRange] = []
    current_lbas = 0
    for piece in _cut(ranges, max_range_lbas):
        too_long = max_command_lbas is not None and current_lbas + piece.lba_count > max_command_lbas
        if current and (len(current) == max_ranges or too_long):
            commands.append(tuple(current))
            current, current_lbas = [], 0
        current.append(piece)
        current_lbas += piece.lba_count
    if current:
        commands.append(tuple(current))
    return tuple(commands)


def _cut(ranges: Iterable[LbaRange], max_lbas: int) -> Iterator[LbaRange]:
    for item in ranges:
        for offset in range(0, item.lba_count, max_lbas):
            yield LbaRange(item.lba + offset, min(max_lbas, item.lba_count - offset))
