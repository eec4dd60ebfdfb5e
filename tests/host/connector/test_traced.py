"""One request, one trace: what the connector does for it, its calls as the service sees them, and its load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.otel import open_tracer
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.tracing import NobodyCollects, headers_of, within_trace
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.jbof.errors import StaleHolderError
from tests.host.support.engine_on_pool import CHUNK_TOKENS, EngineFactory, committed, prompt, settle
from tests.host.support.mini_request import Request, make_request
from tests.host.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick_reattach")

TRACES = {"writer": "0af7651916cd43dd8448eb211c80319c", "reader": "1bf7651916cd43dd8448eb211c80319c"}
PARENT = "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What this process's provider got. It can be set once in a process: here for the test alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def service(pool: Pool, tmp_path: Path, spans: InMemorySpanExporter) -> Iterator[GrpcChunkService]:
    watch = CallWatch(slow_call_s=5.0, tracer=open_tracer())
    server = serve(pool, f"unix://{tmp_path}/s", observer=watch)
    client = GrpcChunkService(server.address)
    yield client
    client.close()
    server.stop(0.0)


def traced(name: str, tokens: list[int]) -> Request:
    request = make_request(name, tokens)
    request.trace_headers = {"traceparent": f"00-{TRACES[name]}-{PARENT}-01"}
    return request


def of(spans: InMemorySpanExporter, request_id: str) -> dict[str, ReadableSpan]:
    """By name, those of the request's trace."""
    found = [s for s in spans.get_finished_spans() if s.context and f"{s.context.trace_id:032x}" == TRACES[request_id]]
    assert len({span.name for span in found}) == len(found), [span.name for span in found]
    return {span.name: span for span in found}


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return f"{span.parent.span_id:016x}"


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def test_a_request_its_calls_and_its_load_are_one_trace(
    pool: Pool, start: EngineFactory, service: Any, spans: InMemorySpanExporter
) -> None:
    engine = start(service=service, tracer=open_tracer())
    tokens = prompt(3 * CHUNK_TOKENS + 2)
    engine.add(traced("writer", tokens))
    engine.run(tokens_max=len(tokens))
    committed(pool, 3)
    until(lambda: "meshfusion.service/Commit" in of(spans, "writer"))
    engine.add(traced("reader", tokens))
    engine.run()

    wrote = of(spans, "writer")
    assert wrote.keys() == {
        "meshfusion.lookup",
        "meshfusion.service/Match",
        "meshfusion.save",
        "meshfusion.service/Reserve",
        "meshfusion.service/Commit",
    }
    assert parent_of(wrote["meshfusion.lookup"]) == parent_of(wrote["meshfusion.save"]) == PARENT
    assert parent_of(wrote["meshfusion.service/Match"]) == id_of(wrote["meshfusion.lookup"])
    for call in ("Reserve", "Commit"):
        assert parent_of(wrote[f"meshfusion.service/{call}"]) == id_of(wrote["meshfusion.save"])

    read = of(spans, "reader")
    assert read.keys() == {"meshfusion.lookup", "meshfusion.service/Match", "meshfusion.load"}
    match = read["meshfusion.service/Match"]
    assert match.kind is trace.SpanKind.SERVER
    assert match.attributes is not None
    assert match.attributes["meshfusion.request_id"] == "reader"
    assert parent_of(read["meshfusion.load"]) == PARENT
    assert all(span.status.is_ok for span in (*wrote.values(), *read.values()))
    settle(engine, pool)


def test_where_the_engine_collects_nothing_the_service_still_joins_the_trace(
    pool: Pool, start: EngineFactory, service: Any, spans: InMemorySpanExporter
) -> None:
    engine = start(service=service, tracer=NobodyCollects())
    engine.add(traced("writer", prompt(CHUNK_TOKENS + 2)))
    engine.run()
    until(lambda: "meshfusion.service/Commit" in of(spans, "writer"))
    assert {parent_of(span) for span in of(spans, "writer").values()} == {PARENT}
    settle(engine, pool)


def test_a_request_without_a_trace_makes_no_span(
    pool: Pool, start: EngineFactory, service: Any, spans: InMemorySpanExporter
) -> None:
    engine = start(service=service, tracer=open_tracer())
    engine.add(make_request("writer", prompt(2 * CHUNK_TOKENS)))
    engine.run()
    committed(pool, 2)
    settle(engine, pool)
    assert spans.get_finished_spans() == ()


def test_a_call_that_fails_says_so(service: GrpcChunkService, spans: InMemorySpanExporter) -> None:
    with (
        within_trace(headers_of({"traceparent": f"00-{TRACES['reader']}-{PARENT}-01"})),
        pytest.raises(StaleHolderError),
    ):
        service.match(api.MatchRequest("nobody", "reader", 64, (api.GroupKeys(0, (b"k" * 32,), (0,)),)), deadline_s=5.0)
    until(lambda: of(spans, "reader"))
    (span,) = of(spans, "reader").values()
    assert (span.name, span.status.is_ok) == ("meshfusion.service/Match", False)
    assert span.status.description == "FAILED_PRECONDITION"
