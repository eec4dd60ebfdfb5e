"""A status as the page may get it, with words of others in every place where they can come from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from operator import methodcaller
from typing import Any

from meshfusion.dpu.api import types as t
from meshfusion.dpu.segment_map import DriveMap
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.health import Health, HealthAnswer, to_json
from meshfusion.dpu.telemetry.pool_watch import PoolWatch
from meshfusion.dpu.telemetry.probe_result import ProbeState, ProbeView
from meshfusion.dpu.telemetry.snapshot import Limits
from meshfusion.dpu.telemetry.watched_pool import WatchedPool
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


def troubled_pool(**changes: Any) -> FakePool:
    """``changes``: of its status."""
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
    return pool


def told(pools: dict[str, FakePool], answer: Callable[[Health], HealthAnswer]) -> bytes:
    """By the service's own code."""
    events = EventLog(unix_time_s=lambda: 1_700_000_000.0)
    events.of_pool(next(iter(pools))).tell("saves_stopped", EVIL, reason=EVIL)
    probe = ProbeView(ProbeState.DEGRADED, (EVIL,), 0.25, 3.0, 60.0)
    watches = {
        name: PoolWatch(pool, pool, events.of_pool(name), version="9.8.7", name=name, segments=Maps())
        for name, pool in pools.items()
    }
    watched = [WatchedPool(n, watch, lambda: probe, lambda: Limits(0.25, 0.5)) for n, watch in watches.items()]
    for watch in watches.values():
        watch.start()
    try:
        return to_json(answer(Health(watched, slow_calls(), events, version="9.8.7")).body)
    finally:
        for watch in watches.values():
            watch.close()


def status_json(**changes: Any) -> bytes:
    """Of a service of one pool. ``changes``: of its status."""
    return told({"": troubled_pool(**changes)}, Health.status)


def several_pools_json() -> dict[str, bytes]:
    """Of a service of two, by the pages' paths: ``red`` is in trouble, ``lab`` is well."""
    pools = {"red": troubled_pool(), "lab": FakePool(path="/pool/lab", committed_chunk_count=7)}
    return {
        "/status.json": told(pools, Health.status),
        **{f"/pools/{name}/status.json": told(pools, methodcaller("status_of", name)) for name in pools},
    }


def silent_pool_json() -> bytes:
    body = json.loads(status_json())
    return to_json({**body, "pool": None, "drives": [], "segment_map": None, "problem": f"it hangs {EVIL}"})


def slow_calls() -> CallWatch:
    calls = CallWatch(slow_call_s=0.1, clock=itertools.count().__next__, unix_time_s=lambda: 1_700_000_000.0)
    calls.watch("Match", lambda raw, context: raw)
    calls._ended("Match", 0.25, "DEADLINE_EXCEEDED", EVIL)
    return calls
