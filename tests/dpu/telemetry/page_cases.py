"""A status as the page may get it, with words of others in every place where they can come from."""

from __future__ import annotations

import itertools
import json
from typing import Any

from meshfusion.dpu.api import types as t
from meshfusion.dpu.segment_map import DriveMap
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.health import Health, to_json
from meshfusion.dpu.telemetry.pool_watch import PoolWatch
from meshfusion.dpu.telemetry.probe_result import ProbeState, ProbeView
from meshfusion.jbof.segment_states import SegmentTally
from tests.dpu.telemetry.fakes import FakePool, make_drive

EVIL = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>"\'&lt;'
COUNTERS = {
    **{"match_requests": 40, "match_keys": 2000, "matched_chunks": 1500, "leases_granted": 30, "leases_released": 25},
    **{"leases_lapsed": 1, "dropped_reports": 3, "dropped_chunks": 2, "committed_chunks": 60, "reserve_granted": 70},
    **{"reserve_exists": 20, "reserve_busy": 5, "reserve_no_space": 4, "reserve_declined": 1},
}
CELLS = (
    (0, 0, 0, 4, 0, 2, 0),
    (1, 0, 0, 3, 0, 0, 0),
    (2, 0, 1, 1, 0, 0, 1),
    (0, 0, 1, 2, 1, 0, 1),
    (3, 0, 0, 0, 0, 0, 0),
)


class Maps:
    """A ``SegmentView``."""

    def segment_maps(self) -> tuple[DriveMap, ...]:
        return (DriveMap(0, 19, 4, tuple(SegmentTally(*cell) for cell in CELLS)),)


def holders() -> tuple[t.HolderStatus, ...]:
    return (
        t.HolderStatus("h-1", "vllm", "0.32.0", EVIL, 4242, 2, 1, 0.25, "live"),
        t.HolderStatus("probe-1", "probe", "of the service itself", "localhost", 1, 0, 0, 75.0, "silent", "nvmeof"),
    )


def status_json(**changes: Any) -> bytes:
    """Made by the service's own code. ``changes``: of the pool's status."""
    pool = FakePool(
        **{
            "holders": holders(),
            "path": f"/pool/{EVIL}",
            "counters": tuple(COUNTERS.items()),
            "saves_stopped_reason": f"the index is full {EVIL}",
            "exports_problem": f"the target says {EVIL}",
            "oldest_lease_s": 12.5,
            "oldest_grant_s": 3.0,
            "transactions_pending": 7,
            **changes,
        }
    )
    pool.current_drives = (
        make_drive(0, months_left=float("inf"), path=f"/dev/{EVIL}", serial=EVIL),
        make_drive(1, percentage_used=85, state="failing", reasons=(EVIL,), problem=EVIL, write_budget_left_bytes=-1),
        make_drive(2, percentage_used=-1, months_left=-1.0, written_bytes=-1, media_errors=-1, read_latency_s=-1.0),
    )
    events, calls = EventLog(unix_time_s=lambda: 1_700_000_000.0), slow_calls()
    events.tell("saves_stopped", EVIL, reason=EVIL)
    watch = PoolWatch(pool, pool, events, version="9.8.7", segments=Maps())
    watch.start()
    probe = ProbeView(ProbeState.DEGRADED, (EVIL,), 0.25, 3.0, 60.0)
    try:
        return to_json(Health(watch, calls, events, lambda: probe, version="9.8.7").status().body)
    finally:
        watch.close()


def silent_pool_json() -> bytes:
    body = json.loads(status_json())
    return to_json({**body, "pool": None, "drives": [], "segment_map": None, "problem": f"it hangs {EVIL}"})


def slow_calls() -> CallWatch:
    calls = CallWatch(slow_call_s=0.1, clock=itertools.count().__next__, unix_time_s=lambda: 1_700_000_000.0)
    calls.watch("Match", lambda raw, context: raw)
    calls._ended("Match", 0.25, "DEADLINE_EXCEEDED", EVIL)
    return calls
