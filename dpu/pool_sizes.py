"""Which sizes a new pool can have: one check for creating it and for its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.jbof.format import DATA_START_LBA, LBA_BYTES
from meshfusion.jbof.pool_addresses import MAX_DRIVE_SEGMENTS
from meshfusion.jbof.sizes import format_size

MIN_SEGMENT_COUNT = 4
MIN_SEGMENT_BYTES = 1 << 20
MAX_SEGMENT_COUNT = MAX_DRIVE_SEGMENTS
_LEAST_USUAL_SEGMENT_BYTES = 64 << 20
_USUAL_SEGMENT_COUNT = 2048


@dataclass(frozen=True, slots=True)
class SizeProblem:
    """``field``: "size" or "segment_size"."""

    field: str
    problem: str
    fix: str


def usual_segment_bytes(size_bytes: int) -> int:
    """Segments of a drive of this size, where nobody asks for others: small for trying, and on large drives as large as
    some of the drive's own units of erasing (docs/device-waf.md), whole MiB."""
    part_bytes = -(-size_bytes // _USUAL_SEGMENT_COUNT)
    return max(_LEAST_USUAL_SEGMENT_BYTES, -(-part_bytes // (1 << 20)) << 20)


def size_problems(size_bytes: int, segment_bytes: int) -> list[SizeProblem]:
    """Why no pool can have these sizes; empty when one can."""
    shown, fix = format_size(segment_bytes), "use a segment size such as 64MiB"
    if segment_bytes % LBA_BYTES or segment_bytes < MIN_SEGMENT_BYTES:
        problem = f"segment size {shown} is not a multiple of {LBA_BYTES} bytes of at least 1 MiB"
        return [SizeProblem("segment_size", problem, fix)]
    head_bytes = DATA_START_LBA * LBA_BYTES
    minimum = MIN_SEGMENT_COUNT * segment_bytes + head_bytes
    if size_bytes < minimum:
        smallest = format_size(minimum)
        problem = (
            f"pool size {format_size(size_bytes)} is too small: {MIN_SEGMENT_COUNT} segments of {shown} and "
            f"{format_size(head_bytes)} before them need {smallest}"
        )
        return [SizeProblem("size", problem, f"use a size of at least {smallest}, or smaller segments")]
    if (size_bytes - head_bytes) // segment_bytes > MAX_SEGMENT_COUNT:
        problem = f"pool size {format_size(size_bytes)} has more than {MAX_SEGMENT_COUNT} segments of {shown}"
        return [SizeProblem("segment_size", problem, "use larger segments")]
    return []
