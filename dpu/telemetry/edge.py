"""What a service of several pools tells of itself: its calls and its events, and nothing of any one pool."""

from __future__ import annotations

from meshfusion.dpu.api.otel import open_tracer
from meshfusion.dpu.config_telemetry import TelemetryConfig
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog


class EdgeTelemetry:
    """Instead of :class:`~meshfusion.dpu.telemetry.service.Telemetry`, which watches one pool: metrics, health and
    events that do not say of which of several pools they are would mislead."""

    def __init__(self, config: TelemetryConfig, events: EventLog) -> None:
        self.events = events
        self.calls = CallWatch(slow_call_s=config.slow_call_s, tracer=open_tracer())

    def start(self) -> None:
        """Nothing: there is nothing to watch but what comes by itself."""

    def stopping(self, why: str) -> None:
        """Those who watch events get this as the last one: they would hold up the end of the server."""
        self.events.tell("service_stops", f"{why}: the service ends")
        self.events.close()

    def close(self) -> None:
        """Nothing."""
