"""The watch on the pool, and the answers to monitors that are made of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.health import Health, to_json
from meshfusion.dpu.telemetry.pool_watch import PoolWatch, pause_s
from meshfusion.dpu.telemetry.probe_result import ProbeState, ProbeView
from meshfusion.dpu.telemetry.snapshot import Limits
from meshfusion.dpu.telemetry.watched_pool import WatchedPool
from meshfusion.jbof.errors import ServiceUnavailableError
from tests.dpu.telemetry.fakes import Clock, FakePool, make_drive, wait_until


class Watched:
    def __init__(self) -> None:
        self.pool, self.events, self.clock = FakePool(), EventLog(), Clock()
        self.watch = PoolWatch(
            self.pool, self.pool, self.events, version="1", period_s=0.02, deadline_s=0.3, clock=self.clock
        )
        self.watch.start()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.recent(100)]


@pytest.fixture
def watched() -> Iterator[Watched]:
    it = Watched()
    yield it
    it.pool.hold.set()
    it.watch.close()


def test_fresh_is_of_a_look_that_began_after_it_was_asked_for(watched: Watched) -> None:
    for count in range(20):
        watched.pool.current_status = replace(watched.pool.current_status, lease_count=count)
        assert watched.watch.fresh(deadline_s=10.0).status.lease_count == count


def test_a_pool_that_hangs_and_answers_again_is_told_once_each(watched: Watched) -> None:
    wait_until(lambda: "epoch_began" in watched.kinds(), "the first look")
    watched.pool.hold.clear()
    wait_until(lambda: "pool_silent" in watched.kinds(), "it is told")
    with pytest.raises(ServiceUnavailableError, match="did not tell its status in time"):
        watched.watch.fresh(deadline_s=0.1)
    time.sleep(0.7)  # more than two deadlines
    watched.pool.hold.set()
    wait_until(lambda: "pool_answers" in watched.kinds(), "and again")
    assert watched.kinds() == ["epoch_began", "pool_silent", "pool_answers"]


def test_many_that_ask_wait_on_one_look(watched: Watched) -> None:
    watched.watch.fresh(deadline_s=10.0)
    watched.pool.hold.clear()
    time.sleep(0.1)
    before = threading.active_count()
    asking = [threading.Thread(target=_ask, args=(watched.watch,)) for _ in range(20)]
    for thread in asking:
        thread.start()
    time.sleep(0.1)
    assert threading.active_count() == before + 20, "none but those that ask"
    watched.pool.hold.set()
    for thread in asking:
        thread.join(10.0)
        assert not thread.is_alive()


def _ask(watch: PoolWatch) -> None:
    watch.fresh(deadline_s=10.0)


def test_an_end_does_not_wait_for_a_look_that_hangs() -> None:
    watched = Watched()
    watched.pool.hold.clear()
    time.sleep(0.1)
    begun_s = time.monotonic()
    watched.watch.close()
    assert time.monotonic() - begun_s < 10.0
    watched.pool.hold.set()


def test_a_look_that_fails_is_told_and_tried_again(watched: Watched) -> None:
    watched.pool.failure = RuntimeError("broken")
    with pytest.raises(ServiceUnavailableError, match="cannot be read: broken"):
        watched.watch.fresh(deadline_s=10.0)
    watched.pool.failure = None
    assert watched.watch.fresh(deadline_s=10.0).status.epoch == 3


def test_how_long_saves_are_stopped(watched: Watched) -> None:
    assert watched.watch.fresh(deadline_s=10.0).saves_stopped_s == 0
    status = watched.pool.current_status
    watched.pool.current_status = replace(status, saves_stopped_reason="full")
    watched.watch.fresh(deadline_s=10.0)
    watched.clock.now_s += 40.0
    assert watched.watch.fresh(deadline_s=10.0).saves_stopped_s == 40.0
    watched.pool.current_status = replace(
        status, saves_stopped_reason="failed", counters=(("saves_stopped_ms", 70_000),)
    )
    assert watched.watch.fresh(deadline_s=10.0).saves_stopped_s == 70.0
    watched.pool.current_status = status
    assert watched.watch.fresh(deadline_s=10.0).saves_stopped_s == 0
    wait_until(lambda: watched.kinds()[-1] == "saves_resumed", "told")
    assert "after 70 s" in watched.events.recent(1)[0].text


@pytest.mark.parametrize(("took_s", "expected_s"), [(0.0, 1.0), (0.01, 1.0), (0.05, 2.5), (1.0, 10.0)])
def test_looks_that_take_long_are_taken_less_often(took_s: float, expected_s: float) -> None:
    assert pause_s(1.0, took_s) == pytest.approx(expected_s)


def health_of(watched: Watched, state: ProbeState = ProbeState.OK) -> Health:
    view = ProbeView(state, ("why",), 0.1, 2.0, 3.0)
    pool = WatchedPool("", watched.watch, lambda: view, lambda: Limits(0.25, 0.5))
    return Health([pool], CallWatch(slow_call_s=1.0), watched.events, version="1")


def test_alive_while_the_pool_answers(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.dpu.telemetry.health.ALIVE_DEADLINE_S", 0.2)
    health = health_of(watched)
    assert health.alive().is_good
    watched.pool.hold.clear()
    answer = health.alive()
    assert not answer.is_good
    assert "did not tell its status in time" in answer.body["reasons"][0]
    status = health.status()
    assert (status.is_good, status.body["pool"]) == (False, None)
    assert status.body["ready"]["status"] == "ok", "what is known without the pool is told"


@pytest.mark.parametrize("state", ProbeState)
def test_ready_is_what_the_probe_found(watched: Watched, state: ProbeState) -> None:
    answer = health_of(watched, state).ready()
    assert answer.is_good == (state is ProbeState.OK)
    assert answer.body["status"] == state.value
    assert answer.body["reasons"] == ["why"]


def test_status_is_strict_json(watched: Watched) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    watched.pool.current_drives = (make_drive(months_left=float("inf")),)
    found = json.loads(to_json(health_of(watched).status().body), parse_constant=refuse)
    assert found["drives"][0]["months_left"] is None
    assert found["drives"][0]["serial"] == "SN0"
    assert found["pool"]["segment_count"] == 64
    assert found["events"][0]["severity"] == "info"


class Several:
    """``red`` and ``lab`` behind one service. ``views``: what their probes found."""

    def __init__(self) -> None:
        self.events = EventLog()
        self.pools = {"red": FakePool(), "lab": FakePool()}
        self.views = dict.fromkeys(self.pools, ProbeView(ProbeState.OK, (), 0.5, 2.0, 9.0))
        self.watches = {
            name: PoolWatch(
                *(pool, pool, self.events.of_pool(name)), version="1", name=name, period_s=0.02, deadline_s=0.3
            )
            for name, pool in self.pools.items()
        }
        self.health = Health(
            [
                WatchedPool(name, watch, partial(self.views.__getitem__, name), lambda: Limits(0.25, 0.5))
                for name, watch in self.watches.items()
            ],
            CallWatch(slow_call_s=1.0),
            self.events,
            version="1",
        )
        for watch in self.watches.values():
            watch.start()

    def told(self) -> set[tuple[str, str]]:
        return {(event.pool, event.kind) for event in self.events.recent(100)}


@pytest.fixture
def several() -> Iterator[Several]:
    it = Several()
    yield it
    for name, watch in it.watches.items():
        it.pools[name].hold.set()
        watch.close()


def test_which_of_several_pools_does_not_answer_is_named(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    assert several.health.alive().body == {"status": "ok", "reasons": []}
    monkeypatch.setattr("meshfusion.dpu.telemetry.health.ALIVE_DEADLINE_S", 0.2)
    several.pools["red"].hold.clear()
    answer = several.health.alive()
    assert (answer.is_good, answer.body["status"]) == (False, "failing")
    assert answer.body["reasons"] == ["pool red: the pool did not tell its status in time"]
    wait_until(lambda: ("red", "pool_silent") in several.told(), "it is told")
    status = several.health.status()
    assert not status.is_good
    assert status.body["pools"]["red"]["pool"] is None
    assert status.body["pools"]["red"]["problem"] == "the pool did not tell its status in time"
    assert status.body["pools"]["lab"]["pool"]["epoch"] == 3
    assert several.health.status_of("lab").is_good
    assert not several.health.status_of("red").is_good
    assert ("lab", "pool_silent") not in several.told()


@pytest.mark.parametrize(
    ("of_red", "status"),
    [(ProbeState.OK, "ok"), (ProbeState.DEGRADED, "degraded"), (ProbeState.UNKNOWN, "unknown"),
     (ProbeState.FAILING, "failing")],
)  # fmt: skip
def test_ready_is_who_is_ready_in_all_pools(several: Several, of_red: ProbeState, status: str) -> None:
    several.views["red"] = ProbeView(of_red, () if of_red is ProbeState.OK else ("full",), 0.25, 3.0, None)
    answer = several.health.ready()
    assert answer.is_good == (status == "ok")
    assert answer.body["status"] == status
    assert answer.body["reasons"] == ([] if status == "ok" else ["pool red: full"])
    assert answer.body["pools"]["red"]["status"] == status
    assert answer.body["pools"]["lab"] == {
        "status": "ok", "reasons": [], "probe_age_s": 2.0, "probe_seconds": 0.5, "written_age_s": 9.0
    }  # fmt: skip


def test_the_worst_of_several_is_told(several: Several) -> None:
    several.views["red"] = ProbeView(ProbeState.DEGRADED, ("full",))
    several.views["lab"] = ProbeView(ProbeState.FAILING, ("other bytes",))
    body = several.health.ready().body
    assert (body["status"], body["reasons"]) == ("failing", ["pool red: full", "pool lab: other bytes"])


def test_what_changes_in_one_of_several_is_told_with_its_name(several: Several) -> None:
    wait_until(lambda: {("red", "epoch_began"), ("lab", "epoch_began")} <= several.told(), "the first looks")
    several.pools["lab"].current_status = replace(several.pools["lab"].current_status, saves_stopped_reason="full")
    several.pools["red"].current_drives = (make_drive(state="gone"),)
    expected = {("lab", "saves_stopped"), ("red", "drive_state")}
    wait_until(lambda: expected <= several.told(), "both are told")
    assert not {("red", "saves_stopped"), ("lab", "drive_state")} & several.told()
    several.events.tell("service_stops", "it ends")
    of_lab = several.health.status_of("lab").body["events"]
    assert {event["pool"] for event in of_lab} == {"lab", ""}
    assert {event["pool"] for event in several.health.status().body["events"]} == {"red", "lab", ""}
