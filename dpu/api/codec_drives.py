"""Between wire messages and value types: the administration of drives. Pure functions."""

from __future__ import annotations

import math

from meshfusion.dpu.api import drive_types as t
from meshfusion.dpu.api.limits import (
    MAX_NAMESPACES,
    check_count,
    check_id,
    check_int,
    check_seconds,
    check_text,
    malformed,
)
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

_MAX_REASONS = 64
_MAX_PERCENTAGE = 255
_KNOWN_OR_NOT = ("written_bytes", "media_errors", "spare_percent", "write_budget_left_bytes", "read_latency_s")


def drive_status_to_pb(s: t.DriveStatus) -> pb.DriveStatus:
    return pb.DriveStatus(
        number=s.number,
        state=s.state,
        reasons=s.reasons,
        path=s.path,
        serial=s.serial,
        segment_count=s.segment_count,
        size_bytes=s.size_bytes,
        percentage_used=s.percentage_used,
        problem=s.problem,
        months_left=s.months_left,
        failed_command_count=s.failed_command_count,
        **{name: value for name in _KNOWN_OR_NOT if (value := getattr(s, name)) >= 0},
    )


def drive_status_from_pb(m: pb.DriveStatus) -> t.DriveStatus:
    check_count("drive.reasons", m.reasons, _MAX_REASONS)
    return t.DriveStatus(
        number=m.number,
        state=check_id("drive.state", m.state),
        reasons=tuple(check_text("drive.reasons", reason) for reason in m.reasons),
        path=check_text("drive.path", m.path),
        serial=check_text("drive.serial", m.serial),
        segment_count=check_int("drive.segment_count", m.segment_count),
        size_bytes=check_int("drive.size_bytes", m.size_bytes),
        percentage_used=check_int("drive.percentage_used", m.percentage_used, -1, _MAX_PERCENTAGE),
        problem=check_text("drive.problem", m.problem),
        months_left=_months(m.months_left),
        written_bytes=_known(m, "written_bytes"),
        media_errors=_known(m, "media_errors"),
        spare_percent=_known(m, "spare_percent"),
        write_budget_left_bytes=_known(m, "write_budget_left_bytes"),
        failed_command_count=check_int("drive.failed_command_count", m.failed_command_count),
        read_latency_s=check_seconds("drive.read_latency_s", m.read_latency_s)
        if m.HasField("read_latency_s")
        else -1.0,
    )


def _known(m: pb.DriveStatus, name: str) -> int:
    """-1 where it is absent."""
    return check_int(f"drive.{name}", getattr(m, name)) if m.HasField(name) else -1


def _months(value: float) -> float:
    if math.isnan(value) or (value < 0 and value != -1):
        raise malformed("drive.months_left", f"is {value}; it must be -1, or not negative")
    return value


def drives_reply_to_pb(drives: tuple[t.DriveStatus, ...]) -> pb.DrivesReply:
    return pb.DrivesReply(drives=map(drive_status_to_pb, drives))


def drives_reply_from_pb(m: pb.DrivesReply) -> tuple[t.DriveStatus, ...]:
    check_count("drives", m.drives, MAX_NAMESPACES)
    return tuple(map(drive_status_from_pb, m.drives))


def add_drive_request_to_pb(r: t.AddDriveRequest) -> pb.AddDriveRequest:
    return pb.AddDriveRequest(size_bytes=r.size_bytes, data_path=r.data_path, overwrite_serial=r.overwrite_serial)


def add_drive_request_from_pb(m: pb.AddDriveRequest) -> t.AddDriveRequest:
    return t.AddDriveRequest(
        size_bytes=check_int("size_bytes", m.size_bytes, 1),
        data_path=check_text("data_path", m.data_path),
        overwrite_serial=check_text("overwrite_serial", m.overwrite_serial),
    )


def drain_drive_request_to_pb(r: t.DrainDriveRequest) -> pb.DrainDriveRequest:
    return pb.DrainDriveRequest(number=r.number, is_ended=r.is_ended)


def drain_drive_request_from_pb(m: pb.DrainDriveRequest) -> t.DrainDriveRequest:
    return t.DrainDriveRequest(m.number, is_ended=m.is_ended)
