"""Puts together what the service tells of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshfusion.dpu.api.address import parse_address
from meshfusion.dpu.api.drive_types import DriveAdmin
from meshfusion.dpu.api.otel import open_tracer
from meshfusion.dpu.api.types import ChunkService
from meshfusion.dpu.config_telemetry import TelemetryConfig
from meshfusion.dpu.segment_map import SegmentView
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.chunk_probe import ChunkProbe
from meshfusion.dpu.telemetry.collector import Metrics
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.health import Health
from meshfusion.dpu.telemetry.http_server import TelemetryServer
from meshfusion.dpu.telemetry.pages import Pages, pages_of
from meshfusion.dpu.telemetry.pool_watch import PoolWatch
from meshfusion.dpu.telemetry.prober import Prober, not_probed
from meshfusion.dpu.telemetry.snapshot import Limits


class Telemetry:
    """Of one served pool, from :meth:`start` to :meth:`close`, which comes before the pool's own.

    ``calls`` is to observe the server, ``events`` is where parts tell what happened and what is served of it; where
    none is given, it is one of its own. ``segments`` and
    ``index_directory``: see :class:`~meshfusion.dpu.telemetry.pool_watch.PoolWatch`. ``more_pages``: beside the usual
    ones, such as ``/``. Raises
    :class:`~meshfusion.jbof.errors.ConfigError` when it cannot listen where it is told to.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        service: ChunkService,
        admin: DriveAdmin,
        limits: Limits,
        *,
        events: EventLog | None = None,
        segments: SegmentView | None = None,
        index_directory: Path | None = None,
        more_pages: Pages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.events = EventLog() if events is None else events
        self.calls = CallWatch(slow_call_s=config.slow_call_s, tracer=open_tracer())
        its_version = version_of_service()
        self._watch = PoolWatch(
            service, admin, self.events, version=its_version, segments=segments, index_directory=index_directory
        )
        self._prober: Prober | None = None
        if config.listen is not None and config.probe:
            probe = ChunkProbe(service, clock=clock, write_interval_s=config.probe_write_interval_s)
            self._prober = Prober(probe, self.events, interval_s=config.probe_interval_s, clock=clock)
        probed = not_probed if self._prober is None else self._prober.view
        metrics = Metrics(self._watch, self.calls, self.events, probed, limits, version=its_version)
        health = Health(self._watch, self.calls, self.events, probed, version=its_version)
        self._server: TelemetryServer | None = None
        if config.listen is not None:
            self._server = TelemetryServer(parse_address(config.listen), pages_of(metrics, health, more_pages))

    @property
    def address(self) -> str:
        """Where monitors ask; "" where nowhere."""
        return "" if self._server is None else str(self._server.address)

    def start(self) -> None:
        self._watch.start()
        if self._prober is not None:
            self._prober.start()
        if self._server is not None:
            self._server.start()

    def stopping(self, why: str) -> None:
        """Those who watch events get this as the last one: they would hold up the end of the server."""
        self.events.tell("service_stops", f"{why}: the service ends")
        self.events.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._prober is not None:
            self._prober.close()
        self._watch.close()


def version_of_service() -> str:
    try:
        return version("meshfusion")
    except PackageNotFoundError:
        return "unknown"
