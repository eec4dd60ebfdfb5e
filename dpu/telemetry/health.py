"""Is the service alive, is it ready, and how is it: what monitors ask. Answers as values, without HTTP."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.dpu.segment_map import map_object
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.pool_watch import PoolWatch
from meshfusion.dpu.telemetry.probe_result import ProbeState, ProbeView
from meshfusion.jbof.errors import MeshFusionError

ALIVE_DEADLINE_S: Final = 2.0
STATUS_EVENTS: Final = 100

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """``is_good``: HTTP's 200, else 503."""

    is_good: bool
    body: Body


class Health:
    """``probe``: what it found last."""

    def __init__(
        self, watch: PoolWatch, calls: CallWatch, events: EventLog, probe: Callable[[], ProbeView], *, version: str
    ) -> None:
        self._watch = watch
        self._calls = calls
        self._events = events
        self._probe = probe
        self._version = version

    def alive(self) -> HealthAnswer:
        """The process answers, and its pool in time. When not, a restart may help."""
        try:
            self._watch.fresh(deadline_s=ALIVE_DEADLINE_S)
        except MeshFusionError as error:
            return HealthAnswer(False, {"status": "failing", "reasons": [error.message]})
        return HealthAnswer(True, {"status": "ok", "reasons": []})

    def ready(self) -> HealthAnswer:
        """The last probe did all that engines do. ``degraded``: hits go on."""
        probe = self._probe()
        body = {
            "status": probe.state.value,
            "reasons": list(probe.reasons),
            "probe_age_s": probe.age_s,
            "probe_seconds": probe.seconds,
            "written_age_s": probe.written_age_s,
        }
        return HealthAnswer(probe.state is ProbeState.OK, body)

    def status(self) -> HealthAnswer:
        """All that is known. Holds no keys and nothing of prompts."""
        body: Body = {"version": self._version}
        is_good = True
        try:
            snapshot = self._watch.fresh(deadline_s=ALIVE_DEADLINE_S, with_maps=True)
        except MeshFusionError as error:
            is_good = False
            body |= {"pool": None, "drives": [], "segment_map": None, "problem": error.message}
        else:
            body["pool"] = dataclasses.asdict(snapshot.status) | {"counters": snapshot.counters}
            body["saves_stopped_s"] = snapshot.saves_stopped_s
            body["drives"] = [dataclasses.asdict(drive) for drive in snapshot.drives]
            body["segment_map"] = map_object(snapshot.maps) if snapshot.maps else None
        body["ready"] = self.ready().body
        body["events"] = [event_object(event) for event in self._events.recent(STATUS_EVENTS)]
        body["slow_calls"] = [dataclasses.asdict(call) for call in self._calls.slow_calls()]
        return HealthAnswer(is_good, body)


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
