"""Calls of a real server as it is seen: times, codes, request ids, and lines of the log."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshfusion.dpu.api import request_ids
from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.request_ids import current_request_id, received_request_id, request_id_of
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.line_limit import LineLimit
from meshfusion.dpu.telemetry.calls import KEPT_SLOW_CALLS, SLOW_LINES_PER_MINUTE, CallWatch
from meshfusion.dpu.telemetry.log_format import JsonFormatter, TextFormatter
from meshfusion.jbof.errors import ServiceUnavailableError, StaleHolderError
from tests.dpu.api.fake_service import FakeChunkService
from tests.dpu.telemetry.fakes import Clock, wait_until

DEADLINE_S = 10.0


class Served:
    def __init__(self, tmp_path: Path, slow_call_s: float = 5.0) -> None:
        self.service = FakeChunkService()
        self.calls = CallWatch(slow_call_s=slow_call_s)
        self.server = serve(self.service, f"unix://{tmp_path}/s", observer=self.calls)
        self.client = GrpcChunkService(self.server.address)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    it = Served(tmp_path)
    yield it
    it.client.close()
    it.server.stop(0.0)


def match(request_id: str) -> t.MatchRequest:
    return t.MatchRequest("h-1", request_id, 64, (t.GroupKeys(0, (b"k" * 32,), (0,)),))


def test_every_call_is_known_before_the_first(served: Served) -> None:
    names = {n.title().replace("_", "") for n in dir(t.ChunkService) if not n.startswith("_")} - {"Close"}
    assert served.calls.counts().times.keys() == names


def test_counts_by_code(served: Served) -> None:
    served.service.holders.add("h-1")
    served.client.match(match("r"), deadline_s=DEADLINE_S)
    served.service.holders.clear()
    with pytest.raises(StaleHolderError):
        served.client.match(match("r"), deadline_s=DEADLINE_S)
    served.service.failure = RuntimeError("a defect")
    with pytest.raises(Exception, match="inside the service"):
        served.client.status(deadline_s=DEADLINE_S)
    wait_until(lambda: served.calls.counts().in_flight == 0, "all calls have ended")
    counts = served.calls.counts()
    assert counts.codes == {("Match", "OK"): 1, ("Match", "FAILED_PRECONDITION"): 1, ("Status", "INTERNAL"): 1}
    assert counts.times["Match"].cumulative[-1] == 2
    assert 0 < counts.times["Match"].sum_s < DEADLINE_S
    assert counts.slow == 0


def test_one_whose_caller_has_gone_is_not_ok(served: Served) -> None:
    served.service.delay_s = 0.5
    with pytest.raises(ServiceUnavailableError):
        served.client.status(deadline_s=0.1)
    wait_until(lambda: bool(served.calls.counts().codes), "the call ends in the service, too")
    assert ("Status", "OK") not in served.calls.counts().codes


def test_in_flight_and_slow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(tmp_path, slow_call_s=0.05)
    served.service.delay_s = 0.2
    with caplog.at_level(logging.DEBUG, "meshfusion.access"):
        future = _started(served)
        wait_until(lambda: served.calls.counts().in_flight == 1, "it is counted while it runs")
        future.result(DEADLINE_S)
        wait_until(lambda: served.calls.counts().in_flight == 0, "and not when it has ended")
    (slow,) = served.calls.slow_calls()
    assert (slow.call, slow.code, slow.request_id) == ("Status", "OK", "of-mine")
    assert slow.seconds >= 0.2
    assert served.calls.counts().slow == 1
    (record,) = [r for r in caplog.records if r.name == "meshfusion.access"]
    assert record.levelno == logging.WARNING
    assert re.fullmatch(r"Status took 0\.\d{3} s \(OK\)", record.getMessage())
    served.client.close()
    served.server.stop(0.0)


def _started(served: Served) -> Any:
    channel = grpc.insecure_channel(served.server.address.replace("unix://", "unix:"))
    status: Any = channel.unary_unary("/meshfusion.v1.ChunkService/Status")
    return status.future(b"", metadata=((request_ids.METADATA_KEY, "of-mine"),))


@dataclass
class Asked:
    request_id: str


def test_what_a_call_is_sent_under() -> None:
    assert request_id_of(Asked("cmpl-1")) == "cmpl-1"
    assert request_id_of(Asked("a\nb é")) == "a?b??"
    items = [
        t.ReserveItem(bytes([i]) * 32, 0, 64 * i, 64, (), request_id=name) for i, name in enumerate(("a", "", "b"))
    ]
    assert request_id_of(t.ReserveRequest("h", 1, tuple(items[:2]))) == "a"
    assert re.fullmatch("[0-9a-f]{32}", request_id_of(t.ReserveRequest("h", 1, tuple(items))))
    assert len(request_id_of(Asked("x" * 1000))) == request_ids.MAX_CHARS
    assert re.fullmatch("[0-9a-f]{32}", request_id_of(None))
    assert request_id_of(Asked("")) != request_id_of(Asked(""))
    token = current_request_id.set("outer")
    try:
        assert request_id_of(None) == "outer"
        assert request_id_of(Asked("own")) == "own"
    finally:
        current_request_id.reset(token)


def test_what_a_call_came_under() -> None:
    key = request_ids.METADATA_KEY
    assert received_request_id([("other", "x"), (key, "cmpl-1")]) == "cmpl-1"
    for metadata in (None, [], [(key, "")], [(key, b"bytes")]):
        assert re.fullmatch("[0-9a-f]{32}", received_request_id(metadata))


def test_lines_of_a_call_carry_its_request(served: Served) -> None:
    lines: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((JsonFormatter().format(record), TextFormatter().format(record)))

    logger = logging.getLogger("meshfusion")
    level, handler = logger.level, Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with pytest.raises(StaleHolderError):
            served.client.match(match("cmpl-77"), deadline_s=DEADLINE_S)
        wait_until(lambda: sum("Match" in line for line, _ in lines) == 2, "the refusal and the access are logged")
        logging.getLogger("meshfusion.other").info("beside it")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    of_call = [(json.loads(line), text) for line, text in lines if "Match" in line]
    assert {body["request_id"] for body, _ in of_call} == {"cmpl-77"}
    assert {body["logger"] for body, _ in of_call} == {"meshfusion.dpu.api.server", "meshfusion.access"}
    assert all(" [cmpl-77] " in text for _, text in of_call)
    beside = [(json.loads(line), text) for line, text in lines if "beside it" in line]
    assert all("request_id" not in body and "[" not in text for body, text in beside)


def test_slow_calls_are_kept_and_their_lines_are_few(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    calls = CallWatch(slow_call_s=0.1, clock=clock, unix_time_s=clock)
    calls.watch("Match", lambda raw, context: raw)
    with caplog.at_level(logging.WARNING, "meshfusion.access"):
        for i in range(KEPT_SLOW_CALLS + 50):
            calls._ended("Match", 0.2, "OK", str(i))
        assert len(caplog.records) == SLOW_LINES_PER_MINUTE
        clock.now_s += 61.0
        calls._ended("Match", 0.2, "OK", "last")
    passed_over = KEPT_SLOW_CALLS + 50 - SLOW_LINES_PER_MINUTE
    assert f"{passed_over} slow calls before it were not logged" in caplog.records[-1].getMessage()
    assert len(calls.slow_calls()) == KEPT_SLOW_CALLS
    assert calls.slow_calls()[-1].request_id == "last"
    assert calls.counts().slow == KEPT_SLOW_CALLS + 51


class Context:
    """What is used of gRPC's."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((request_ids.METADATA_KEY, "of-the-call"),)

    def code(self) -> None:
        return None

    def is_active(self) -> bool:
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_has_answered_belongs_to_no_request(fails: bool) -> None:
    """The next one to use it may not be a call."""
    calls, seen = CallWatch(slow_call_s=1.0), []

    def handle(raw: bytes, context: object) -> bytes:
        seen.append(current_request_id.get())
        if fails:
            raise RuntimeError("a defect")
        return raw

    watched: Any = calls.watch("Match", handle)
    with contextlib.suppress(RuntimeError):
        watched(b"", Context())
    assert seen == ["of-the-call"]
    assert current_request_id.get() == ""
    assert calls.counts().in_flight == 0


def test_line_limit_is_of_any_minute() -> None:
    limit = LineLimit(2)
    taken = [limit.take(now_s) for now_s in (0.0, 59.0, 59.5, 60.0, 61.0, 119.5)]
    assert taken == [0, 0, None, 1, None, 1]
