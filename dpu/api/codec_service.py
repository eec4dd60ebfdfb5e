"""Between the value types of the service's administration and their messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from meshfusion.dpu.api import service_types as t
from meshfusion.dpu.api.limits import MAX_UINT32, check_id, check_int, check_seconds, malformed
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


def calls_of(admin: t.ServiceAdmin) -> dict[str, Callable[[Any, float], Message]]:
    """Each call of the service in the proto file: decode, ask ``admin``, encode."""
    return {
        "State": lambda m, d: service_state_to_pb(admin.state(deadline_s=d)),
        "Drain": lambda m, d: service_state_to_pb(admin.drain(drain_request_from_pb(m), deadline_s=d)),
    }


def service_state_to_pb(s: t.ServiceState) -> pb.ServiceState:
    return pb.ServiceState(
        version=s.version,
        pid=s.pid,
        uptime_s=s.uptime_s,
        phase=s.phase.value,
        remaining_s=s.remaining_s,
        open_write_count=s.open_write_count,
        open_lease_count=s.open_lease_count,
    )


def service_state_from_pb(m: pb.ServiceState) -> t.ServiceState:
    return t.ServiceState(
        version=check_id("version", m.version),
        pid=check_int("pid", m.pid, 0, MAX_UINT32),
        uptime_s=check_seconds("uptime_s", m.uptime_s),
        phase=_phase_from_pb(m.phase),
        remaining_s=check_seconds("remaining_s", m.remaining_s),
        open_write_count=check_int("open_write_count", m.open_write_count),
        open_lease_count=check_int("open_lease_count", m.open_lease_count),
    )


def _phase_from_pb(value: str) -> t.Phase:
    try:
        return t.Phase(value)
    except ValueError:
        raise malformed("phase", f"is {check_id('phase', value)!r}, which this version does not know") from None


def drain_request_to_pb(r: t.DrainRequest) -> pb.DrainRequest:
    return pb.DrainRequest(deadline_s=r.within_s, wait_s=r.wait_s)


def drain_request_from_pb(m: pb.DrainRequest) -> t.DrainRequest:
    return t.DrainRequest(within_s=check_seconds("deadline_s", m.deadline_s), wait_s=check_seconds("wait_s", m.wait_s))
