"""Is the service alive, is it ready, and how is it: what monitors ask. Answers as values, without HTTP.

What is told of a pool stands at the top where it is the only one, without a name, and else in ``pools``, by the names.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.dpu.segment_map import map_object
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import KEPT_EVENTS, EventLog
from meshfusion.dpu.telemetry.pool_words import named
from meshfusion.dpu.telemetry.probe_result import ProbeState, ProbeView
from meshfusion.dpu.telemetry.watched_pool import Look, WatchedPool, look_at

ALIVE_DEADLINE_S: Final = 2.0
STATUS_EVENTS: Final = 100

_FROM_GOOD_TO_BAD: Final = (ProbeState.OK, ProbeState.DEGRADED, ProbeState.UNKNOWN, ProbeState.FAILING)

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """``is_good``: HTTP's 200, else 503."""

    is_good: bool
    body: Body


class Health:
    """Of all pools of a service."""

    def __init__(self, pools: Sequence[WatchedPool], calls: CallWatch, events: EventLog, *, version: str) -> None:
        self._pools = tuple(pools)
        self._calls = calls
        self._events = events
        self._version = version

    @property
    def names(self) -> tuple[str, ...]:
        """Of the pools; () where there is one, without a name."""
        return tuple(pool.name for pool in self._pools if pool.name)

    def alive(self) -> HealthAnswer:
        """The process answers, and its pools in time. When not, a restart may help."""
        looks = look_at(self._pools, deadline_s=ALIVE_DEADLINE_S)
        reasons = [named(look.pool.name, look.problem) for look in looks if look.snapshot is None]
        return HealthAnswer(not reasons, {"status": "failing" if reasons else "ok", "reasons": reasons})

    def ready(self) -> HealthAnswer:
        """The last probe of each pool did all that engines do. ``degraded``: hits go on. Of several, the worst."""
        probes = {pool.name: pool.probed() for pool in self._pools}
        state = max((probe.state for probe in probes.values()), key=_FROM_GOOD_TO_BAD.index)
        body = {
            "status": state.value,
            "reasons": [named(name, reason) for name, probe in probes.items() for reason in probe.reasons],
        }
        bodies = {name: _probe_object(probe) for name, probe in probes.items()}
        body |= bodies.get("", {"pools": bodies})
        return HealthAnswer(state is ProbeState.OK, body)

    def status(self) -> HealthAnswer:
        """All that is known; of several pools without the maps of their segments, which :meth:`status_of` has. Holds
        no keys and nothing of prompts."""
        looks = look_at(self._pools, deadline_s=ALIVE_DEADLINE_S, with_maps=not self.names)
        bodies = {look.pool.name: _look_object(look, with_maps=not self.names) for look in looks}
        body = {"version": self._version, **bodies.get("", {"pools": bodies})}
        body |= {"ready": self.ready().body, **self._of_the_service()}
        return HealthAnswer(all(look.snapshot is not None for look in looks), body)

    def status_of(self, name: str) -> HealthAnswer:
        """Of one of several pools, as that of an only one is told, and its own events beside the service's."""
        (pool,) = (pool for pool in self._pools if pool.name == name)
        (look,) = look_at((pool,), deadline_s=ALIVE_DEADLINE_S, with_maps=True)
        body = {"version": self._version, "name": name, **_look_object(look, with_maps=True)}
        body |= {"ready": _probe_object(pool.probed()), **self._of_the_service({"", name})}
        return HealthAnswer(look.snapshot is not None, body)

    def _of_the_service(self, pools: Set[str] | None = None) -> Body:
        """``pools``: whose events, None for all."""
        events = (event for event in self._events.recent(KEPT_EVENTS) if pools is None or event.pool in pools)
        return {
            "events": [event_object(event) for event in deque(events, STATUS_EVENTS)],
            "slow_calls": [dataclasses.asdict(call) for call in self._calls.slow_calls()],
        }


def _probe_object(probe: ProbeView) -> Body:
    return {
        "status": probe.state.value,
        "reasons": list(probe.reasons),
        "probe_age_s": probe.age_s,
        "probe_seconds": probe.seconds,
        "written_age_s": probe.written_age_s,
    }


def _look_object(look: Look, *, with_maps: bool) -> Body:
    body: Body = {}
    snapshot = look.snapshot
    if snapshot is None:
        body |= {"pool": None, "drives": [], "problem": look.problem}
    else:
        body["pool"] = dataclasses.asdict(snapshot.status) | {"counters": snapshot.counters}
        body["saves_stopped_s"] = snapshot.saves_stopped_s
        body["drives"] = [dataclasses.asdict(drive) for drive in snapshot.drives]
    if with_maps:
        body["segment_map"] = map_object(snapshot.maps) if snapshot is not None and snapshot.maps else None
    if look.pool.name:
        body["ready"] = _probe_object(look.pool.probed())
    return body


def event_object(event: Any) -> Body:
    """As JSON has it."""
    return dataclasses.asdict(event) | {"severity": event.severity.value, "fields": dict(event.fields)}


def to_json(body: Body) -> bytes:
    """Numbers that JSON does not have, such as an endless life, become null."""
    return json.dumps(_finite(body), default=str).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) != float("inf") and value == value else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
