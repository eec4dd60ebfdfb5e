"""What a service does in a second, from two looks at its status. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.api.types import PoolStatus

# Name of the rate -> the counter that it is of.
RATES: Final = {
    "lookups": "match_requests",
    "looked_up_chunks": "match_keys",
    "hit_chunks": "matched_chunks",
    "saved_chunks": "committed_chunks",
    "saved_bytes": "committed_bytes",
    "declined_chunks": "reserve_declined",
    "refused_chunks": "reserve_no_space",
    "rewritten_bytes": "rewritten_bytes",
    "damaged_chunks": "dropped_chunks",
}


@dataclass(frozen=True, slots=True)
class Look:
    """``taken_s``: by a clock that does not jump."""

    taken_s: float
    status: PoolStatus
    drives: tuple[DriveStatus, ...]


def rates(before: Look, now: Look) -> dict[str, float] | None:
    """Each a second; None when the service began anew in between."""
    interval_s = now.taken_s - before.taken_s
    were, are = dict(before.status.counters), dict(now.status.counters)
    risen = {name: are.get(counter, 0) - were.get(counter, 0) for name, counter in RATES.items()}
    if before.status.epoch != now.status.epoch or min(risen.values()) < 0 or interval_s <= 0:
        return None
    return {name: count / interval_s for name, count in risen.items()}


def hit_share(found: dict[str, float] | None) -> float | None:
    """Of the chunks that were looked up; None while none were."""
    if found is None or not found["looked_up_chunks"]:
        return None
    return found["hit_chunks"] / found["looked_up_chunks"]


def top_object(before: Look, now: Look) -> dict[str, Any]:
    """The form for programs."""
    status, found = now.status, rates(before, now)
    return {
        "pool_uuid": status.pool_uuid,
        "epoch": status.epoch,
        "interval_s": now.taken_s - before.taken_s,
        "per_second": found,
        "hit_share": hit_share(found),
        "chunks": status.committed_chunk_count,
        "payload_bytes": status.committed_payload_bytes,
        "capacity_bytes": status.capacity_bytes,
        "pinned_bytes": status.pinned_bytes,
        "segments": {
            "free": status.segments_free,
            "open": status.segments_open,
            "sealed": status.segments_sealed,
            "quarantined": status.segments_quarantined,
        },
        "leases": status.lease_count,
        "grants": status.grant_count,
        "saves_stopped_reason": status.saves_stopped_reason,
        "exports_problem": status.exports_problem,
        "holders": [
            {
                "holder_id": holder.holder_id,
                "state": holder.state,
                "host": holder.host,
                "pid": holder.pid,
                "leases": holder.lease_count,
                "grants": holder.grant_count,
                "silent_s": holder.silent_s,
            }
            for holder in status.holders
        ],
        "drives": [
            {
                "number": drive.number,
                "state": drive.state,
                "percentage_used": drive.percentage_used if drive.percentage_used >= 0 else None,
                "months_left": drive.months_left if 0 <= drive.months_left < math.inf else None,
                "problem": drive.problem,
            }
            for drive in now.drives
        ],
    }
