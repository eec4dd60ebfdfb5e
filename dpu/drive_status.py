"""What operators are told of a drive of a pool that is served. Pure."""

from __future__ import annotations

from pathlib import Path

from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.drive_lives import DriveNews
from meshfusion.dpu.drive_records import DriveRecords
from meshfusion.dpu.pool_shelf import OpenDrive


def status_of(
    number: int,
    path: Path,
    one: OpenDrive | None,
    news: DriveNews,
    records: DriveRecords,
    *,
    name: str,
    problem: str,
    budget_left_bytes: int,
) -> DriveStatus:
    """``one``: None while it was never here; then ``name`` is all that is known of what it is."""
    health = records.health(number)
    return DriveStatus(
        number=number,
        state=news.state.value,
        reasons=news.reasons,
        path=str(path),
        serial=one.drive.label.drive_name if one else name,
        segment_count=one.drive.label.segment_count if one else 0,
        size_bytes=one.drive.geometry.capacity_bytes if one else 0,
        percentage_used=health.percentage_used if health else -1,
        problem=problem,
        months_left=records.months_left(number),
        written_bytes=health.written_bytes if health else -1,
        media_errors=health.media_errors if health else -1,
        spare_percent=health.spare_percent if health else -1,
        write_budget_left_bytes=budget_left_bytes,
        failed_command_count=records.fault_count(number),
        read_latency_s=records.read_latency_s(number),
    )
