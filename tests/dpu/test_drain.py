"""Draining: as a state machine, and as a gate in front of a real pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.service_types import DrainRequest, Phase, ReloadReport, ReplacedKey
from meshfusion.dpu.drain import Drain, Held
from meshfusion.dpu.drain_gate import DrainGate
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.service_admin import ServedServiceAdmin
from meshfusion.jbof.errors import ConfigError, ServiceDrainingError
from tests.dpu.pool_cases import DEADLINE_S, Holder, key, make_pool

NOTHING = Held()


def test_it_serves_until_it_is_asked() -> None:
    drain = Drain()
    assert drain.look(1e9, NOTHING) is Phase.SERVING
    assert (drain.refuses_new, drain.remaining_s(5.0)) == (False, 0.0)


@pytest.mark.parametrize("held", [Held(writes=1), Held(leases=1)])
def test_it_waits_for_what_is_open_and_no_longer(held: Held) -> None:
    drain = Drain()
    drain.begin(100.0, 10.0)
    assert drain.look(109.9, held) is Phase.DRAINING
    assert drain.refuses_new
    assert drain.remaining_s(104.0) == 6.0
    assert drain.look(109.95, NOTHING) is Phase.DRAINED


def test_its_deadline_ends_it_with_something_open() -> None:
    drain = Drain()
    drain.begin(100.0, 10.0)
    assert drain.look(110.0, Held(leases=1)) is Phase.CUT_SHORT
    assert drain.look(111.0, NOTHING) is Phase.CUT_SHORT, "what was decided stays"
    assert drain.remaining_s(111.0) == 0.0


def test_with_nothing_open_it_ends_at_once_whatever_its_deadline() -> None:
    drain = Drain()
    drain.begin(100.0, 0.0)
    assert drain.look(100.0, NOTHING) is Phase.DRAINED


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=5))
def test_of_several_deadlines_the_soonest_holds(asked: list[tuple[float, float]]) -> None:
    drain = Drain()
    for now_s, within_s in asked:
        drain.begin(now_s, within_s)
    end_s = min(now_s + within_s for now_s, within_s in asked)
    assert drain.look(end_s - 0.001, Held(1)) is Phase.DRAINING
    assert drain.look(end_s, Held(1)) is Phase.CUT_SHORT


# ---- in front of a pool ----------------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool:
        yield pool


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(pool: Pool, clock: Clock) -> DrainGate:
    return DrainGate(pool, pool.held, clock)


def match(service: api.ChunkService, holder: Holder, i: int) -> api.MatchReply:
    request = api.MatchRequest(holder.id, "r", 16, (api.GroupKeys(0, (key(i),), (0,)),))
    return service.match(request, deadline_s=DEADLINE_S)


def test_a_writer_may_end_what_it_began_and_begins_nothing_new(pool: Pool, gate: DrainGate) -> None:
    holder = Holder(pool)
    first, second = holder.reserve(0), holder.reserve(1)
    gate.begin(30.0)
    with pytest.raises(ServiceDrainingError, match=r"a reservation refused: .* stops within 30 s"):
        gate.reserve(api.ReserveRequest(holder.id, holder.attachment.epoch, ()), deadline_s=1.0)
    with pytest.raises(ServiceDrainingError, match="attaching refused"):
        gate.attach(holder.request, deadline_s=1.0)
    assert gate.look()[:2] == (Phase.DRAINING, Held(writes=2))

    item = api.CommitItem(first.grant_id, (holder.write(0, first),))
    commit = api.CommitRequest(holder.id, holder.attachment.epoch, (item,))
    assert gate.commit(commit, deadline_s=DEADLINE_S).committed == (True,)
    assert gate.look()[:2] == (Phase.DRAINING, Held(writes=1))
    lease_id = match(gate, holder, 0).lease_id
    assert lease_id, "lookups are answered to the last"
    gate.abort(api.AbortRequest(holder.id, holder.attachment.epoch, (second.grant_id,)), deadline_s=1.0)
    assert gate.look()[:2] == (Phase.DRAINING, Held(leases=1))
    beat = api.HeartbeatRequest(holder.id, holder.attachment.epoch, (lease_id,))
    assert gate.heartbeat(beat, deadline_s=1.0) == api.HeartbeatReply((), 0, is_draining=True)
    gate.release(api.ReleaseRequest(holder.id, (lease_id,)), deadline_s=1.0)
    assert gate.look()[:2] == (Phase.DRAINED, NOTHING)


def test_a_write_of_unknown_fate_is_not_waited_for(pool: Pool, gate: DrainGate) -> None:
    holder = Holder(pool)
    place = holder.reserve(0)
    doubt = api.AbortRequest(holder.id, holder.attachment.epoch, (), (place.grant_id,))
    gate.abort(doubt, deadline_s=1.0)
    assert pool.status(deadline_s=1.0).grant_count == 1
    gate.begin(30.0)
    assert gate.look()[0] is Phase.DRAINED


def test_before_it_drains_heartbeats_say_nothing(pool: Pool, gate: DrainGate) -> None:
    holder = Holder(pool)
    beat = api.HeartbeatRequest(holder.id, holder.attachment.epoch, ())
    assert not gate.heartbeat(beat, deadline_s=1.0).is_draining


def test_a_reservation_under_way_is_waited_for(clock: Clock) -> None:
    """It was let in, and its grants are not counted yet."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def reserve(self, request: object, *, deadline_s: float) -> api.ReserveReply:
            inside.set()
            assert go_on.wait(10.0)
            return api.ReserveReply(())

    gate = DrainGate(Slow(), lambda: NOTHING, clock)  # type: ignore[arg-type]
    request = api.ReserveRequest("h", 1, ())
    thread = threading.Thread(target=lambda: gate.reserve(request, deadline_s=10.0))
    thread.start()
    assert inside.wait(10.0)
    gate.begin(5.0)
    assert gate.look() == (Phase.DRAINING, Held(writes=1), 5.0)
    go_on.set()
    thread.join()
    assert gate.look()[0] is Phase.DRAINED


def test_a_call_let_in_while_somebody_looks_is_not_overlooked(clock: Clock) -> None:
    """What is open is asked for, then a writer comes in, then draining begins, and only then is it judged."""
    gates: list[DrainGate] = []

    def held() -> Held:
        (gate,) = gates
        if gate._drain.phase is Phase.SERVING:
            gate._entered_count += 1  # a writer
            gate.begin(5.0)
        return NOTHING

    gates.append(DrainGate(None, held, clock))  # type: ignore[arg-type]
    assert gates[0].look()[0] is Phase.DRAINING
    assert gates[0].look()[:2] == (Phase.DRAINING, Held(writes=1))


def no_reload() -> ReloadReport:
    raise AssertionError("not asked for")


def no_keys(pool: str, holder_id: str, wait_s: float) -> tuple[ReplacedKey, ...]:
    raise AssertionError("not asked for")


# ---- what operators ask ----------------------------------------------------------------------------------------------


def test_an_operator_is_answered_when_the_end_has_come(pool: Pool, gate: DrainGate, clock: Clock) -> None:
    woken: list[None] = []
    admin = ServedServiceAdmin(
        gate, version="9.9", wake=lambda: woken.append(None), reload=no_reload, replace_keys=no_keys, clock=clock
    )
    holder = Holder(pool)
    place = holder.reserve(0)
    clock.now_s += 7.0
    state = admin.drain(DrainRequest(within_s=60.0), deadline_s=5.0)
    assert (state.phase, state.open_write_count, state.remaining_s) == (Phase.DRAINING, 1, 60.0)
    assert (state.version, state.uptime_s, woken) == ("9.9", 7.0, [None])

    answers: list[Phase] = []
    waiting = threading.Thread(
        target=lambda: answers.append(admin.drain(DrainRequest(60.0, wait_s=30.0), deadline_s=40.0).phase)
    )
    waiting.start()
    gate.abort(api.AbortRequest(holder.id, holder.attachment.epoch, (place.grant_id,)), deadline_s=1.0)
    assert gate.look()[0] is Phase.DRAINED
    waiting.join(20.0)
    assert answers == [Phase.DRAINED]


def test_the_deadline_of_the_call_bounds_the_wait(pool: Pool, gate: DrainGate) -> None:
    holder = Holder(pool)
    holder.reserve(0)
    admin = ServedServiceAdmin(gate, version="", wake=lambda: None, reload=no_reload, replace_keys=no_keys)
    assert admin.drain(DrainRequest(60.0, wait_s=30.0), deadline_s=0.6).phase is Phase.DRAINING


@pytest.mark.parametrize("within_s", [-1.0, 86_401.0, float("nan")])
def test_a_deadline_that_cannot_be_is_refused_and_nothing_drains(gate: DrainGate, within_s: float) -> None:
    admin = ServedServiceAdmin(gate, version="", wake=lambda: None, reload=no_reload, replace_keys=no_keys)
    with pytest.raises(ConfigError, match="deadline of draining"):
        admin.drain(DrainRequest(within_s), deadline_s=1.0)
    assert admin.state(deadline_s=1.0).phase is Phase.SERVING
