"""The calls of one request: found by what they name, over a real server, in a bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.codec_traces import trace_from_pb, trace_to_pb
from meshfusion.dpu.api.limits import MalformedMessageError
from meshfusion.dpu.api.request_ids import MAX_CHARS, current_request_id
from meshfusion.dpu.api.running_server import RunningServer
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.trace_client import GrpcTraceSource
from meshfusion.dpu.api.trace_types import Trace, TracedCall
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.telemetry import calls as calls_module
from meshfusion.dpu.telemetry.call_parts import MAX_PARTS, CallPart, CallParts
from meshfusion.dpu.telemetry.calls import KEPT_CALLS, CallWatch
from meshfusion.jbof.errors import ServiceError, StaleHolderError, UnsupportedError
from tests.dpu.api.fake_service import FakeChunkService
from tests.dpu.pool_cases import DEADLINE_S, UNIT_BYTES, Holder, key, make_pool
from tests.dpu.telemetry.fakes import wait_until


class Served:
    """A real pool over gRPC, with its calls watched."""

    def __init__(self, folder: Path) -> None:
        make_pool(folder / "pool")
        self.pool = Pool.open(folder / "pool")
        self.calls = CallWatch(slow_call_s=5.0)
        self.server = serve(self.pool, f"unix://{folder}/s", observer=self.calls, traces=self.calls)
        self.client = GrpcChunkService(self.server.address)
        self.source = GrpcTraceSource(self.server.address)

    def close(self) -> None:
        self.client.close()
        self.source.close()
        self.server.stop(0.0)
        self.pool.close()

    def trace(self, request_id: str) -> list[tuple[str, str, dict[str, int]]]:
        wait_until(lambda: self.calls.counts().in_flight == 0, "all calls have ended")
        return [(call.call, call.code, dict(call.counts)) for call in self.source.trace(request_id).calls]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    it = Served(tmp_path)
    yield it
    it.close()


def item(i: int, request_id: str) -> t.ReserveItem:
    return t.ReserveItem(key(i), 0, 16 * i, 16, (t.ShardSize(0, UNIT_BYTES, 1),), request_id=request_id)


def match(holder: Holder, request_id: str, *chunks: int) -> t.MatchReply:
    group = t.GroupKeys(0, tuple(key(i) for i in chunks), (0,) * len(chunks))
    return holder.pool.match(t.MatchRequest(holder.id, request_id, 16, (group,)), deadline_s=DEADLINE_S)


def test_a_request_from_lookup_to_commit_among_others(served: Served) -> None:
    """Reservations and commits serve two requests at once: each is told of its own chunks."""
    with Holder(served.client) as holder:
        epoch = holder.attachment.epoch
        assert match(holder, "a", 0, 1, 2).chunk_count == 0
        items = (item(0, "a"), item(1, "a"), item(7, "b"))
        reply = served.client.reserve(t.ReserveRequest(holder.id, epoch, items), deadline_s=DEADLINE_S)
        digests = [holder.write(i.position_tokens // 16, r) for i, r in zip(items, reply.results, strict=True)]
        commits = tuple(t.CommitItem(r.grant_id, (d,)) for r, d in zip(reply.results, digests, strict=True))
        served.client.commit(t.CommitRequest(holder.id, epoch, (commits[0], commits[2])), deadline_s=DEADLINE_S)
        served.client.abort(t.AbortRequest(holder.id, epoch, (reply.results[1].grant_id,)), deadline_s=DEADLINE_S)
        found = match(holder, "a", 0, 1, 2)
        assert found.chunk_count == 1
        holder.release(found)
    assert served.trace("a") == [
        ("Match", "OK", {"chunks_asked": 3, "chunks_matched": 0}),
        ("Reserve", "OK", {"chunks_asked": 2, "chunks_granted": 2}),
        ("Commit", "OK", {"chunks_asked": 1, "chunks_committed": 1}),
        ("Abort", "OK", {"chunks_aborted": 1}),
        ("Match", "OK", {"chunks_asked": 3, "chunks_matched": 1}),
        ("Release", "OK", {"leases_released": 1}),
    ]
    assert served.trace("b") == [
        ("Reserve", "OK", {"chunks_asked": 1, "chunks_granted": 1}),
        ("Commit", "OK", {"chunks_asked": 1, "chunks_committed": 1}),
    ]
    assert served.trace("none") == []
    times = [call.time_s for call in served.source.trace("a").calls]
    assert times == sorted(times)
    assert 0 < served.source.trace("none").kept_since_s <= times[0]
    assert all(0 < call.seconds < DEADLINE_S for call in served.source.trace("a").calls)


def test_what_was_refused_is_told_with_its_code(served: Served) -> None:
    with Holder(served.client) as holder:
        reserve = t.ReserveRequest(holder.id, 99, (item(0, "a"), item(1, "b")))
        with pytest.raises(StaleHolderError):
            served.client.reserve(reserve, deadline_s=DEADLINE_S)
        lookup = t.MatchRequest("stranger", "a", 16, (t.GroupKeys(0, (key(0),), (0,)),))
        with pytest.raises(StaleHolderError):
            served.client.match(lookup, deadline_s=DEADLINE_S)
    refused: list[tuple[str, str, dict[str, int]]] = [
        ("Reserve", "FAILED_PRECONDITION", {}),
        ("Match", "FAILED_PRECONDITION", {}),
    ]
    assert served.trace("a") == refused
    assert served.trace("b") == refused[:1]


def test_a_call_that_somebody_named(served: Served) -> None:
    """Any gRPC client can name one in the metadata, for calls too that are no request's."""
    token = current_request_id.set("of mine")
    try:
        with Holder(served.client):
            served.client.status(deadline_s=DEADLINE_S)
    finally:
        current_request_id.reset(token)
    assert served.trace("of mine") == [("Attach", "OK", {}), ("Detach", "OK", {})], "status is asked again and again"


def test_only_so_many_are_kept() -> None:
    watch = CallWatch(slow_call_s=5.0)
    watch.watch("Match", lambda raw, context: raw)
    watch.watch("Heartbeat", lambda raw, context: raw)
    for i in range(KEPT_CALLS + 10):
        watch._ended("Match", 0.001, "OK", f"r{i}")
        watch._ended("Heartbeat", 0.001, "OK", "h")
    assert [len(watch.trace(f"r{i}").calls) for i in (0, 9, 10, KEPT_CALLS + 9)] == [0, 0, 1, 1]
    assert watch.trace("h").calls == ()


def test_calls_of_many_requests_push_out_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "KEPT_PARTS", 2500)
    watch = CallWatch(slow_call_s=5.0)
    watch.watch("Reserve", lambda raw, context: raw)
    for call in range(4):
        names = [f"r{call}-{i}" for i in range(MAX_PARTS)]
        watch.answered("Reserve", pb.ReserveRequest(request_ids=names), None)
        watch._ended("Reserve", 0.001, "OK", "many")
    assert len(watch.trace("many").calls) == 2
    assert [len(watch.trace(f"r{call}-5").calls) for call in range(4)] == [0, 0, 1, 1]


def test_a_commit_that_came_too_late() -> None:
    parts = CallParts()
    reserve = pb.ReserveRequest(items=[pb.ReserveItem(request=1)] * 2, request_ids=["a"])
    granted = [pb.ReserveResult(outcome=pb.RESERVE_OUTCOME_GRANTED, grant_id=f"g{i}") for i in range(2)]
    parts.of("Reserve", reserve, pb.ReserveReply(results=granted))
    commit = pb.CommitRequest(items=[pb.CommitItem(grant_id=f"g{i}") for i in range(2)])
    (part,) = parts.of("Commit", commit, pb.CommitReply(committed=[False, True]))
    assert (part.request_id, dict(part.counts)) == (
        "a", {"chunks_asked": 2, "chunks_refused": 1, "chunks_committed": 1},
    )  # fmt: skip


def test_a_message_that_is_malformed_or_huge_costs_little() -> None:
    parts = CallParts()
    names = ["x" * 5000] * 3 + [f"r{i}" for i in range(5000)]
    refused = parts.of("Reserve", pb.ReserveRequest(items=[pb.ReserveItem(request=9)], request_ids=names), None)
    assert len(refused) <= MAX_PARTS
    assert max(len(part.request_id) for part in refused) == MAX_CHARS
    assert parts.of("Match", pb.MatchRequest(request_id="a\nb"), None) == (CallPart("a?b", ()),)
    assert parts.of("Commit", pb.CommitRequest(items=[pb.CommitItem(grant_id="never given")]), None) == ()
    assert parts.of("Attach", pb.AttachRequest(), pb.Attachment()) == ()


def test_whose_a_lease_was_is_known_for_a_while() -> None:
    parts = CallParts(kept_owners=2)
    for name in ("a", "b", "c"):
        parts.of("Match", pb.MatchRequest(request_id=name), pb.MatchReply(lease_id=f"l-{name}", chunk_count=1))
    released = parts.of("Release", pb.ReleaseRequest(lease_ids=["l-a", "l-b", "l-c"]), pb.ReleaseReply())
    assert released == (CallPart("b", (("leases_released", 1),)), CallPart("c", (("leases_released", 1),)))


def test_a_defect_of_it_costs_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallWatch(slow_call_s=5.0)
    monkeypatch.setattr(calls._parts, "of", lambda *_: 1 / 0)
    server = serve(FakeChunkService(), f"unix://{tmp_path}/s", observer=calls, traces=calls)
    client = GrpcChunkService(server.address)
    assert client.status(deadline_s=DEADLINE_S).epoch == 3
    client.close()
    server.stop(0.0)


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[RunningServer]:
    running = serve(FakeChunkService(), f"unix://{tmp_path}/bare", traces=CallWatch(slow_call_s=5.0))
    yield running
    running.stop(0.0)


def test_a_service_without_traces_says_so(tmp_path: Path) -> None:
    running = serve(FakeChunkService(), f"unix://{tmp_path}/other")
    source = GrpcTraceSource(running.address)
    with pytest.raises(UnsupportedError, match="does not know the call Trace"):
        source.trace("a")
    source.close()
    running.stop(0.0)


def test_a_question_that_is_too_long_is_refused(bare: RunningServer) -> None:
    source = GrpcTraceSource(bare.address)
    assert source.trace("x" * 300) == Trace((), 0.0)
    with pytest.raises(ServiceError, match="request_id"):
        source.trace("x" * 5000)
    source.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"time_s": -1.0}, "call.time_s"),
        ({"seconds": float("nan")}, "call.seconds"),
        ({"call": ""}, "call.call"),
        ({"code": "x" * 300}, "call.code"),
        ({"counts": [pb.Counter(name="n")] * 65}, "call.counts"),
    ],
)
def test_malformed_answers_are_refused(change: dict[str, object], field: str) -> None:
    trace = Trace((TracedCall(2.0, "Match", 0.5, "OK", "r", (("chunks_asked", 3),)),), 1.0)
    message = trace_to_pb(trace)
    assert trace_from_pb(message) == trace
    (call,) = message.calls
    for name, value in change.items():
        call.ClearField(name)
        if isinstance(value, list):
            getattr(call, name).extend(value)
        else:
            setattr(call, name, value)
    with pytest.raises(MalformedMessageError, match=field):
        trace_from_pb(message)
