"""The probe, over a real pool whose medium and answers are made to fail; and the thread that runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_inspect import check_pool
from meshfusion.dpu.telemetry.chunk_probe import ChunkProbe
from meshfusion.dpu.telemetry.probe_result import ProbeResult, ProbeState
from meshfusion.dpu.telemetry.prober import Prober
from meshfusion.jbof.errors import MediaError, ServiceUnavailableError
from meshfusion.jbof.media.file import DataFile
from tests.dpu.pool_cases import FULL_SEGMENT_UNITS, SEGMENT_COUNT, Holder, make_pool
from tests.dpu.telemetry.fakes import Clock, Told, wait_until

INTERVAL_S = 600.0


class Between:
    """The pool as the probe sees it. ``answers``: instead of its own, by call."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.asked: list[str] = []
        self.answers: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.asked.append(name)
            return self.answers.get(name, getattr(self.pool, name))(*arguments, **named)

        return call


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool", PoolOptions(grant_ttl_s=30.0, holder_silence_s=1.0, heartbeat_s=0.5)) as pool:
        yield pool


@pytest.fixture
def between(pool: Pool) -> Between:
    return Between(pool)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def probe(between: Between, clock: Clock) -> Iterator[ChunkProbe]:
    probe = ChunkProbe(between, clock=clock, write_interval_s=INTERVAL_S)
    yield probe
    between.answers.clear()
    probe.close()


def ok(result: ProbeResult, written_age_s: float = 0.0) -> None:
    assert (result.state, result.reasons) == (ProbeState.OK, ())
    assert result.written_age_s == written_age_s


def failing(result: ProbeResult, reason: str) -> None:
    assert result.state is ProbeState.FAILING
    (told,) = result.reasons
    assert reason in told


def saves_fail(result: ProbeResult, reason: str) -> None:
    assert result.state is ProbeState.DEGRADED
    assert reason in result.reasons[0]


def counters(pool: Pool) -> dict[str, int]:
    return dict(pool.status(deadline_s=1.0).counters)


def test_writes_now_and_then_and_reads_each_time(pool: Pool, probe: ChunkProbe, clock: Clock) -> None:
    ok(probe.run())
    clock.now_s += 30.0
    ok(probe.run(), 30.0)
    clock.now_s += INTERVAL_S - 31.0
    ok(probe.run(), INTERVAL_S - 1.0)
    assert counters(pool)["committed_chunks"] == 1
    clock.now_s += 1.0
    ok(probe.run())
    assert counters(pool)["committed_chunks"] == 2
    told = counters(pool)
    for name in ("match_requests", "match_keys", "matched_chunks", "leases_granted", "leases_released"):
        assert not told.get(name), f"{name}: its lookups are no engine's"
    assert [h.engine_kind for h in pool.status(deadline_s=5.0).holders] == ["probe"]


def test_leaves_nothing_behind_but_chunks_that_are_right(pool: Pool, probe: ChunkProbe, tmp_path: Path) -> None:
    ok(probe.run())
    status = pool.status(deadline_s=1.0)
    assert (status.lease_count, status.grant_count, len(status.holders)) == (0, 0, 1)
    probe.close()
    assert pool.status(deadline_s=1.0).holders == ()
    assert not list((tmp_path / "pool" / "holders").iterdir())
    pool.close()
    report = check_pool(tmp_path / "pool", lambda *_: None)
    assert (report.chunks_checked, report.damaged) == (1, ())


def test_it_is_one_holder_that_beats(probe: ChunkProbe, between: Between) -> None:
    probe.beat()
    assert between.asked == []
    assert probe.heartbeat_s is None
    ok(probe.run())
    assert probe.heartbeat_s == 0.5
    probe.beat()
    assert between.asked[-1] == "heartbeat"
    ok(probe.run())
    assert len(between.pool.status(deadline_s=1.0).holders) == 1


def test_other_bytes_on_the_medium_are_told(probe: ChunkProbe, tmp_path: Path, between: Between) -> None:
    ok(probe.run())
    (chunk,) = between.pool.list_chunks(api.ListRequest(), deadline_s=1.0).chunks
    lba = chunk.shards[0].extent.lba + chunk.shards[0].payload_lba_offset
    with open(tmp_path / "pool" / "data", "r+b") as data:
        data.seek(lba * 4096 + 77)
        byte = data.read(1)
        data.seek(lba * 4096 + 77)
        data.write(bytes([byte[0] ^ 1]))
    failing(probe.run(), "reading from namespace 1: at block")
    assert between.pool.status(deadline_s=1.0).lease_count == 0, "its lease is given back whatever comes"
    with open(tmp_path / "pool" / "data", "r+b") as data:
        data.seek(lba * 4096 + 77)
        data.write(byte)
    ok(probe.run())


@pytest.mark.parametrize(
    ("method", "step"), [("write_from", "writing to"), ("flush", "flushing"), ("read_into", "reading from")]
)
def test_a_medium_that_fails_is_told(
    probe: ChunkProbe, pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch, method: str, step: str
) -> None:
    ok(probe.run())  # the pool itself writes to open a segment
    clock.now_s += INTERVAL_S

    def fail(*_: object) -> None:
        raise MediaError("EIO", next_step="look at the drive")

    with monkeypatch.context() as patched:
        patched.setattr(DataFile, method, fail)
        result = probe.run()
        if method == "read_into":
            failing(result, f"{step} namespace 1: EIO")
        else:
            assert (result.state, result.reasons) == (ProbeState.DEGRADED, (f"{step} namespace 1: EIO",))
            assert result.written_age_s == INTERVAL_S, "what was there before is still read"
    ok(probe.run())
    # What may still land is withheld until the probe's former self is fenced, which is soon.
    wait_until(lambda: pool.status(deadline_s=1.0).grant_count == 0, "nothing is in doubt any more")


def test_a_pool_that_stopped_saves_is_degraded_while_hits_go_on(
    probe: ChunkProbe, pool: Pool, between: Between, clock: Clock
) -> None:
    def stopped(**named: Any) -> api.PoolStatus:
        return replace(pool.status(**named), saves_stopped_reason="the disk is full")

    between.answers["status"] = stopped
    result = probe.run()
    assert result.state is ProbeState.DEGRADED
    assert result.reasons == (
        "saves are stopped: the disk is full",
        "no chunk of the probe is there to be read: whether hits work is not known",
    )
    assert "reserve" not in between.asked
    between.answers.clear()
    ok(probe.run())
    between.answers["status"] = stopped
    clock.now_s += 5.0
    result = probe.run()
    assert (result.state, result.reasons) == (ProbeState.DEGRADED, ("saves are stopped: the disk is full",))
    assert result.written_age_s == 5.0
    between.answers.clear()
    ok(probe.run())
    assert counters(pool)["committed_chunks"] == 2, "that saves work again is proven at once"


def test_no_room_is_degraded(probe: ChunkProbe, between: Between) -> None:
    full = api.ReserveReply((api.ReserveResult(api.ReserveOutcome.NO_SPACE),))
    between.answers["reserve"] = lambda *_, **__: full
    result = probe.run()
    assert result.state is ProbeState.DEGRADED
    assert result.reasons[0] == "there is no room for a chunk now"
    between.answers.clear()
    ok(probe.run())


def test_a_write_that_the_policy_declines_is_no_failure(probe: ChunkProbe, between: Between, clock: Clock) -> None:
    ok(probe.run())
    declined = api.ReserveReply((api.ReserveResult(api.ReserveOutcome.DECLINED),))
    between.answers["reserve"] = lambda *_, **__: declined
    clock.now_s += INTERVAL_S
    ok(probe.run(), INTERVAL_S)


def test_what_must_not_be_is_told(probe: ChunkProbe, between: Between, clock: Clock) -> None:
    between.answers["commit"] = lambda *_, **__: api.CommitReply((False,))
    saves_fail(probe.run(), "was not committed")
    between.answers = {"match": lambda *_, **__: api.MatchReply("", 0, ())}
    failing(probe.run(), "a chunk that was just committed is not found")
    clock.now_s += INTERVAL_S
    between.answers = {"reserve": lambda *_, **__: api.ReserveReply((api.ReserveResult(api.ReserveOutcome.EXISTS),))}
    saves_fail(probe.run(), "refused with exists")


def test_a_service_that_does_not_answer_is_told(probe: ChunkProbe, between: Between, clock: Clock) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ServiceUnavailableError("no answer", next_step="wait")

    for call, step in (("attach", "attaching"), ("match", "looking a chunk up")):
        between.answers = {call: fail}
        failing(probe.run(), f"{step}: no answer")
    between.answers = {"reserve": fail}
    clock.now_s += INTERVAL_S
    saves_fail(probe.run(), "asking for room: no answer")
    between.answers = {}
    ok(probe.run())


def test_a_chunk_whose_segment_is_given_up_is_written_anew(probe: ChunkProbe, pool: Pool, clock: Clock) -> None:
    ok(probe.run())
    clock.now_s += 1.0
    holder = Holder(pool)
    for i in range(SEGMENT_COUNT * 2):
        assert holder.put(i, units=FULL_SEGMENT_UNITS)
    before = counters(pool)["committed_chunks"]
    result = probe.run()
    ok(result)
    assert counters(pool)["committed_chunks"] == before + 1
    holder.leave()


def test_a_probe_that_was_fenced_comes_anew(probe: ChunkProbe, between: Between, tmp_path: Path) -> None:
    ok(probe.run())
    former = between.pool.status(deadline_s=1.0).holders[0].holder_id
    between.pool.detach(api.DetachRequest(former), deadline_s=5.0)  # refused: its lock is held
    probe._forget()  # as if its process had ended
    wait_until(lambda: not between.pool.status(deadline_s=1.0).holders, "its former self is fenced")
    ok(probe.run())


class FakeProbe:
    def __init__(self) -> None:
        self.step = "at something"
        self.heartbeat_s: float | None = 0.01
        self.result = ProbeResult(ProbeState.OK, (), 0.1, 7.0)
        self.run_count = self.beat_count = 0
        self.hold = threading.Event()
        self.hold.set()
        self.is_closed = False
        self.failure: Exception | None = None

    def prepare(self) -> None:
        assert self.run_count == 0

    def run(self) -> ProbeResult:
        self.run_count += 1
        self.hold.wait(20.0)
        if self.failure is not None:
            raise self.failure
        return self.result

    def beat(self) -> None:
        self.beat_count += 1

    def close(self) -> None:
        self.is_closed = True


def test_prober_keeps_the_last_result_and_beats_in_between() -> None:
    probe, told, clock = FakeProbe(), Told(), Clock()
    prober = Prober(probe, told, interval_s=30.0, clock=clock)
    assert prober.view().state is ProbeState.UNKNOWN
    prober.start()
    wait_until(lambda: probe.beat_count > 3, "it beats")
    assert probe.run_count == 1
    clock.now_s += 5.0
    view = prober.view()
    assert (view.state, view.age_s, view.written_age_s) == (ProbeState.OK, 5.0, 12.0)
    probe.result = ProbeResult(ProbeState.DEGRADED, ("saves are stopped: x",))
    clock.now_s += 30.0
    wait_until(lambda: prober.view().state is ProbeState.DEGRADED, "the next one")
    beat_count = probe.beat_count
    wait_until(lambda: probe.beat_count > beat_count, "it waits again")
    clock.now_s += 30.0
    wait_until(lambda: probe.run_count == 3, "and the one after")
    prober.close()
    assert probe.is_closed
    assert told.take() == ["probe_changed", "probe_changed"], "told when it changes"


def test_a_probe_that_hangs_is_failing_and_says_where() -> None:
    probe, told, clock = FakeProbe(), Told(), Clock()
    prober = Prober(probe, told, interval_s=30.0, deadline_s=10.0, clock=clock)
    probe.hold.clear()
    prober.start()
    wait_until(lambda: probe.run_count == 1, "it has begun")
    assert prober.view().state is ProbeState.UNKNOWN
    clock.now_s += 11.0
    view = prober.view()
    assert view.state is ProbeState.FAILING
    assert view.reasons == ("the probe has been at this for 11 s: at something",)
    probe.hold.set()
    wait_until(lambda: prober.view().state is ProbeState.OK, "it has ended after all")
    prober.close()


def test_a_defect_of_the_probe_is_no_end_of_probing() -> None:
    probe, clock = FakeProbe(), Clock()
    prober = Prober(probe, Told(), interval_s=30.0, clock=clock)
    probe.failure = RuntimeError("a defect")
    prober.start()
    wait_until(lambda: prober.view().state is ProbeState.FAILING, "told")
    wait_until(lambda: probe.beat_count > 0, "it waits")
    assert "a defect" in prober.view().reasons[0]
    probe.failure = None
    clock.now_s += 31.0
    wait_until(lambda: prober.view().state is ProbeState.OK, "and tried again")
    prober.close()
