"""Puts together what the service tells of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from meshfusion.dpu.api.address import parse_address
from meshfusion.dpu.api.drive_types import DriveAdmin
from meshfusion.dpu.api.otel import open_tracer
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
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
from meshfusion.dpu.telemetry.watched_pool import WatchedPool

CLOSE_S: Final = 10.0  # for all pools together: what hangs is left behind


@dataclass(frozen=True, slots=True)
class ToldPool:
    """A served pool, to be told of. ``name``: "" for the only one of a service without ``pools``. ``tenant``: one of
    its own, as which the probe attaches. ``limits``: those of now. ``segments`` and ``index_directory``: see
    :class:`~meshfusion.dpu.telemetry.pool_watch.PoolWatch`."""

    service: ChunkService
    admin: DriveAdmin
    limits: Callable[[], Limits]
    name: str = ""
    tenant: str = DEFAULT_TENANT
    segments: SegmentView | None = None
    index_directory: Path | None = None


class Telemetry:
    """Of the served pools, from :meth:`start` to :meth:`close`, which comes before their own.

    ``calls`` is to observe the server, ``events`` is where parts tell what happened and what is served of it; where
    none is given, it is one of its own. ``more_pages``: beside the usual ones, such as ``/``. Raises
    :class:`~meshfusion.jbof.errors.ConfigError` when it cannot listen where it is told to.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        pools: Sequence[ToldPool],
        *,
        events: EventLog | None = None,
        more_pages: Pages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert pools, "a service without pools"
        self.events = EventLog() if events is None else events
        self.calls = CallWatch(slow_call_s=config.slow_call_s, tracer=open_tracer())
        self._config, self._clock = config, clock
        self._version = version_of_service()
        self._probers: list[Prober] = []
        self._pools = tuple(map(self._watched, pools))
        self._server: TelemetryServer | None = None
        if config.listen is not None:
            metrics = Metrics(self._pools, self.calls, self.events, version=self._version)
            health = Health(self._pools, self.calls, self.events, version=self._version)
            self._server = TelemetryServer(parse_address(config.listen), pages_of(metrics, health, more_pages))

    def _watched(self, pool: ToldPool) -> WatchedPool:
        config, sink = self._config, self.events.of_pool(pool.name)
        watch = PoolWatch(
            pool.service,
            pool.admin,
            sink,
            version=self._version,
            name=pool.name,
            segments=pool.segments,
            index_directory=pool.index_directory,
        )
        probed = not_probed
        if config.listen is not None and config.probe:
            probe = ChunkProbe(
                pool.service, clock=self._clock, write_interval_s=config.probe_write_interval_s, tenant=pool.tenant
            )
            prober = Prober(probe, sink, interval_s=config.probe_interval_s, name=pool.name, clock=self._clock)
            self._probers.append(prober)
            probed = prober.view
        return WatchedPool(pool.name, watch, probed, pool.limits)

    @property
    def address(self) -> str:
        """Where monitors ask; "" where nowhere."""
        return "" if self._server is None else str(self._server.address)

    def start(self) -> None:
        for pool in self._pools:
            pool.watch.start()
        for prober in self._probers:
            prober.start()
        if self._server is not None:
            self._server.start()

    def stopping(self, why: str) -> None:
        """Those who watch events get this as the last one: they would hold up the end of the server."""
        self.events.tell("service_stops", f"{why}: the service ends")
        self.events.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        parts: tuple[Prober | PoolWatch, ...] = (*self._probers, *(pool.watch for pool in self._pools))
        for part in parts:
            part.stop()
        end_s = time.monotonic() + CLOSE_S
        for part in parts:
            part.close(wait_s=max(0.0, end_s - time.monotonic()))


def version_of_service() -> str:
    try:
        return version("meshfusion")
    except PackageNotFoundError:
        return "unknown"
