"""The status of the pools, and of the processes, of all services of a context, side by side."""

from __future__ import annotations

from meshfusion.dpu.api.service_types import ServiceState
from meshfusion.dpu.api.types import PoolStatus
from meshfusion.tools.mfctl.cluster import Answer
from meshfusion.tools.mfctl.output import format_bytes, format_seconds

STATUS_HEADERS = ("SERVICE", "POOL", "CAPACITY", "FREE", "IN USE", "CHUNKS", "BYTES", "HOLDERS", "LEASES", "STANDS")
STATE_HEADERS = ("SERVICE", "VERSION", "PROCESS", "UP", "PHASE", "WRITES OPEN", "LEASES OPEN")
UNKNOWN = "-"
_NO_ANSWER = "NO ANSWER"


def status_row(answer: Answer[PoolStatus]) -> tuple[object, ...]:
    """FREE and IN USE: segments. STANDS: what keeps it from serving and saving, in a word or two."""
    s = answer.value
    if s is None:
        return without_answer(answer, STATUS_HEADERS)
    return (
        *(answer.member.name, s.pool_uuid, format_bytes(s.capacity_bytes), s.segments_free),
        *(s.segments_open + s.segments_sealed, s.committed_chunk_count, format_bytes(s.committed_payload_bytes)),
        *(len(s.holders), s.lease_count, standing(s)),
    )


def standing(status: PoolStatus) -> str:
    troubles = [
        *(["SAVES STOPPED"] if status.saves_stopped_reason else []),
        *(["EXPORTS NOT AS THEY SHOULD BE"] if status.exports_problem else []),
    ]
    return ", ".join(troubles) or "serving"


def state_row(answer: Answer[ServiceState]) -> tuple[object, ...]:
    s = answer.value
    if s is None:
        return without_answer(answer, STATE_HEADERS)
    return (
        *(answer.member.name, s.version, s.pid, format_seconds(s.uptime_s), s.phase.value),
        *(s.open_write_count, s.open_lease_count),
    )


def without_answer(answer: Answer[object], headers: tuple[str, ...]) -> tuple[object, ...]:
    """The row of one that failed: what is not known is not shown as nothing."""
    return (answer.member.name, *[UNKNOWN] * (len(headers) - 2), _NO_ANSWER)
