"""Spans by OpenTelemetry: an optional dependency (extra ``otel``), imported by :func:`open_tracer` alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshfusion.dpu.api.tracing import (
    NO_ATTRIBUTES,
    UNTRACED,
    Attributes,
    Headers,
    NobodyCollects,
    PassedOn,
    Span,
    Tracer,
)
from meshfusion.jbof.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import trace

logger = logging.getLogger("meshfusion.tracing")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def open_tracer() -> Tracer:
    """Spans go to this process's tracer provider, whoever sets it and whenever: an engine does when told to trace.
    Where OpenTelemetry is not installed, to nobody."""
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext
    except ImportError:
        return NobodyCollects()
    return _OtelTracer(trace, tracecontext.TraceContextTextMapPropagator())


def provide_from_environment(environment: Mapping[str, str] = os.environ, *, service_name: str) -> bool:
    """For a process of our own: a tracer provider, where OpenTelemetry's usual variables name a collector. Do they?

    The SDK reads the further ones itself: OTEL_SERVICE_NAME (else ``service_name``), OTEL_RESOURCE_ATTRIBUTES,
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_*. Raises :class:`~meshfusion.jbof.errors.ConfigError` when one cannot be
    met.
    """
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    named = [name for name in _ENDPOINTS if environment.get(name)]
    if is_off or not named:
        return False
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
    )
    exporter = _exporter(protocol, named[0])
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own_name = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": service_name}
    provider = TracerProvider(resource=Resource.create(own_name))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    logger.info("spans go to %s", environment[named[0]])
    return True


def _exporter(protocol: str, named_by: str) -> Any:
    try:
        match protocol:
            case "grpc":
                from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

                return by_grpc.OTLPSpanExporter()
            case "http/protobuf":
                from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

                return by_http.OTLPSpanExporter()
    except ImportError as error:
        raise ConfigError(
            f"{named_by} asks for spans, and OpenTelemetry's SDK or exporter is not installed ({error.name})",
            next_step="pip install 'meshfusion[otel]', or set OTEL_SDK_DISABLED=true",
        ) from error
    raise ConfigError(
        f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, which is not known", next_step="set grpc or http/protobuf"
    )


class _OtelTracer:
    """Keeps the contract of :class:`~meshfusion.dpu.api.tracing.Tracer`."""

    def __init__(self, api: Any, propagator: Any) -> None:
        self._api = api
        self._propagator = propagator
        self._tracer = api.get_tracer("meshfusion")

    def begin(
        self, name: str, parent: Headers, attributes: Attributes = NO_ATTRIBUTES, *, is_server: bool = False
    ) -> Span:
        if not parent:
            return UNTRACED
        context = self._propagator.extract(dict(parent))
        kind = self._api.SpanKind.SERVER if is_server else self._api.SpanKind.INTERNAL
        span = self._tracer.start_span(name, context, kind=kind, attributes=dict(attributes))
        if not span.is_recording():
            return PassedOn(parent)  # as it came: who collects elsewhere finds its parent there
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._api.set_span_in_context(span, context))
        return _OtelSpan(span, tuple(carrier.items()), self._api)


class _OtelSpan:
    def __init__(self, span: trace.Span, headers: Headers, api: Any) -> None:
        self._span = span
        self._api = api
        self.headers = headers

    def end(self, attributes: Attributes = NO_ATTRIBUTES, *, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(self._api.StatusCode.ERROR, error)
        self._span.end()
