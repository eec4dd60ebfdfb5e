"""Which units of a load are read together. Pure.

LBAs are the pool's (:mod:`meshfusion.jbof.pool_addresses`): those of different drives are far apart, so no span crosses
from one to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshfusion.jbof.pool_addresses import is_one_drives

GAP_PARTS = 8
"""Units are read together when less than this part of a unit lies between them (a chunk's header, as a rule): what lies
between is read for nothing."""


class Span(NamedTuple):
    """``unit_count`` units of one KV group from number ``first`` on, ``stride_lbas`` apart on the medium: one read of
    ``lba_count``."""

    first: int
    unit_count: int
    lba: int
    stride_lbas: int
    lba_count: int
    group: int = 0


def spans_of(lbas: Sequence[int], *, unit_lbas: int, read_lbas: int) -> list[Span]:
    """Spans of at most ``read_lbas`` (or of one unit) that cover the units at ``lbas`` once each, in order."""
    stride_max = unit_lbas + max(1, unit_lbas // GAP_PARTS)
    spans: list[Span] = []
    first, stride = 0, unit_lbas
    for index in range(1, len(lbas) + 1):
        count = index - first
        if index < len(lbas):
            step = lbas[index] - lbas[index - 1]
            is_regular = step == stride or (count == 1 and unit_lbas <= step <= stride_max)
            if is_regular and count * step + unit_lbas <= read_lbas:
                stride = step
                continue
        lba_count = (count - 1) * stride + unit_lbas
        assert is_one_drives(lbas[first], lba_count), lbas[first:index]
        spans.append(Span(first, count, lbas[first], stride, lba_count))
        first, stride = index, unit_lbas
    return spans
