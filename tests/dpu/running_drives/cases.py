"""What tests of a served pool's drives say again and again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.api.types import HeartbeatReply, HeartbeatRequest, ReserveOutcome
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu.pool_cases import DEADLINE_S, FULL_SEGMENT_UNITS, SIZE_BYTES, Holder

FAST = DriveOptions(check_interval_s=0.02, probation_s=0.1, drain_s=0.0, window_s=0.2, look_deadline_s=0.5)


def blank(file: Path) -> Path:
    file.touch()
    os.truncate(file, SIZE_BYTES)
    return file


def put(holder: Holder, first: int, count: int) -> dict[int, int]:
    """Full segments of chunks: on which drive each lies."""
    places = {}
    for i in range(first, first + count):
        result = holder.reserve(i, FULL_SEGMENT_UNITS)
        assert result.outcome is ReserveOutcome.GRANTED
        places[i] = drive_of_segment(result.extents[0].segment)
        assert holder.commit(result, holder.write(i, result))
    return places


def matched(holder: Holder, chunks: dict[int, int]) -> dict[int, int]:
    return {i: number for i, number in chunks.items() if holder.match_alone(i).chunks}


def without(chunks: dict[int, int], drive: int) -> dict[int, int]:
    return {i: number for i, number in chunks.items() if number != drive}


def status(pool: Pool, number: int) -> DriveStatus:
    return next(drive for drive in pool.drive_admin.drives(deadline_s=1) if drive.number == number)


def is_in(pool: Pool, number: int, state: str) -> Callable[[], bool]:
    return lambda: status(pool, number).state == state


def heartbeat(holder: Holder) -> HeartbeatReply:
    request = HeartbeatRequest(holder.id, holder.attachment.epoch, ())
    return holder.pool.heartbeat(request, deadline_s=DEADLINE_S)


def counter(pool: Pool, name: str) -> int:
    return dict(pool.status(deadline_s=DEADLINE_S).counters).get(name, 0)
