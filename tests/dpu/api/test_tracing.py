"""What goes on with a call of the trace that it belongs to, and what never costs or breaks anything."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from typing import Any, ClassVar

import pytest

from meshfusion.dpu.api.otel import open_tracer, provide_from_environment
from meshfusion.dpu.api.tracing import (
    NO_HEADERS,
    UNTRACED,
    NobodyCollects,
    current_trace,
    headers_of,
    received_headers,
    within_trace,
)
from meshfusion.jbof.errors import ConfigError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # of the specification


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"traceparent": PARENT, "tracestate": "a=1", "cookie": "x"}, (("traceparent", PARENT), ("tracestate", "a=1"))),
        ({"tracestate": "a=1"}, NO_HEADERS),
        ({"traceparent": PARENT, "tracestate": "x" * 513}, (("traceparent", PARENT),)),
        ({"traceparent": "a\nb"}, NO_HEADERS),
        ({"traceparent": ""}, NO_HEADERS),
        ({"traceparent": "ä"}, NO_HEADERS),
        ({}, NO_HEADERS),
        (None, NO_HEADERS),
    ],
)
def test_what_goes_on_is_a_trace_context_and_fit_for_metadata(found: Any, expected: Any) -> None:
    assert headers_of(found) == expected


def test_of_metadata_only_text_is_read() -> None:
    assert received_headers([("traceparent", PARENT.encode())]) == NO_HEADERS
    assert received_headers([("other", "x"), ("traceparent", PARENT)]) == (("traceparent", PARENT),)
    assert received_headers(None) == NO_HEADERS


def test_where_nobody_collects_the_headers_pass() -> None:
    headers = headers_of({"traceparent": PARENT})
    span = NobodyCollects().begin("name", headers)
    assert span.headers == headers
    span.end(error="none of this matters")
    assert NobodyCollects().begin("name", NO_HEADERS) is UNTRACED


def test_a_thread_is_within_one_trace_at_a_time() -> None:
    headers = headers_of({"traceparent": PARENT})
    with within_trace(headers):
        assert current_trace.get() == headers
        with within_trace(NO_HEADERS):
            assert current_trace.get() == NO_HEADERS
        assert current_trace.get() == headers
    assert current_trace.get() == NO_HEADERS


def test_a_provider_that_samples_nothing_lets_the_headers_pass() -> None:
    """This process has none: the tracer is OpenTelemetry's own no-op."""
    headers = headers_of({"traceparent": PARENT, "tracestate": "a=1"})
    assert open_tracer().begin("name", headers).headers == headers
    assert open_tracer().begin("name", NO_HEADERS) is UNTRACED


def test_without_opentelemetry_nothing_is_traced_nor_imported() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from meshfusion.dpu.api.otel import open_tracer, provide_from_environment
from meshfusion.dpu.api.tracing import NobodyCollects
assert type(open_tracer()) is NobodyCollects
assert not provide_from_environment({}, service_name="x")
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
try:
    provide_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}, service_name="x")
except Exception as error:
    assert type(error).__name__ == "ConfigError", error
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in done.stdout
    assert "pip install 'meshfusion[otel]'" in done.stdout


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_no_collector_is_no_provider(environment: dict[str, str]) -> None:
    assert not provide_from_environment(environment, service_name="x")


def test_an_unknown_protocol_is_refused() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}
    with pytest.raises(ConfigError, match="smoke") as refused:
        provide_from_environment(environment, service_name="x")
    assert "grpc" in refused.value.next_step


def test_an_untraced_request_costs_next_to_nothing() -> None:
    tracer, repeats = open_tracer(), 20_000
    began_s = time.perf_counter()
    for _ in range(repeats):
        tracer.begin("meshfusion.lookup", headers_of(None)).end()
    seconds_each = (time.perf_counter() - began_s) / repeats
    assert seconds_each < 20e-6  # measured: about 1e-6; a slow or busy machine is allowed for


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an exporter posts."""

    bodies: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append((self.path, zlib.decompress(body, 31) if "gzip" in self.headers.values() else body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


SPAN_OF_A_SERVICE = f"""
import os
from meshfusion.dpu.api.otel import open_tracer, provide_from_environment
tracer = open_tracer()
assert provide_from_environment(os.environ, service_name="meshfusion")
tracer.begin("meshfusion.service/Match", (("traceparent", "{PARENT}"),), {{"some": "attribute"}}, is_server=True).end()
"""


def run_service(port: int) -> tuple[float, str]:
    """How long its process took, and what it said."""
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    began_s = time.monotonic()
    command = [sys.executable, "-c", SPAN_OF_A_SERVICE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began_s, done.stderr


def test_spans_reach_the_collector_that_the_environment_names() -> None:
    Collector.bodies.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        run_service(server.server_port)
        server.shutdown()
        thread.join(5.0)
    ((path, body),) = Collector.bodies
    assert path == "/v1/traces"
    for text in (b"meshfusion.service/Match", b"service.name", b"meshfusion", b"some", bytes.fromhex(PARENT[3:35])):
        assert text in body


def test_a_collector_that_is_away_does_not_keep_a_service_from_ending() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and listens to nobody
        seconds, _ = run_service(taken.getsockname()[1])
    assert seconds < 30.0
