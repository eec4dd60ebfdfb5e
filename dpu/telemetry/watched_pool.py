"""One of the pools that the service tells of, and a look at all of them at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshfusion.dpu.telemetry.pool_watch import PoolWatch
from meshfusion.dpu.telemetry.probe_result import ProbeView
from meshfusion.dpu.telemetry.snapshot import Limits, Snapshot
from meshfusion.jbof.errors import MeshFusionError


@dataclass(frozen=True, slots=True)
class WatchedPool:
    """``name``: "" for the only one of a service without ``pools``. ``probed``: what the probe found last. ``limits``:
    those of now, which a reload may change."""

    name: str
    watch: PoolWatch
    probed: Callable[[], ProbeView]
    limits: Callable[[], Limits]


@dataclass(frozen=True, slots=True)
class Look:
    """``snapshot`` None: the pool did not answer in time, as ``problem`` says."""

    pool: WatchedPool
    snapshot: Snapshot | None
    problem: str = ""


def look_at(pools: Sequence[WatchedPool], *, deadline_s: float, with_maps: bool = False) -> tuple[Look, ...]:
    """In their order, all within the deadline: each is asked before one is waited for, so that a pool which hangs
    takes nothing from what the others tell."""
    end_s = time.monotonic() + deadline_s
    asked = [(pool, pool.watch.ask(with_maps=with_maps)) for pool in pools]
    return tuple(_look(pool, number, end_s) for pool, number in asked)


def _look(pool: WatchedPool, number: int, end_s: float) -> Look:
    try:
        return Look(pool, pool.watch.told(number, wait_s=max(0.0, end_s - time.monotonic())))
    except MeshFusionError as error:
        return Look(pool, None, error.message)
