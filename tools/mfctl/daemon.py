"""The life of the service process: logs, pool, server, one ready line, and a graceful end."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshfusion.dpu.config import LogConfig, ServedPool, ServiceConfig
from meshfusion.dpu.drain_gate import DrainGate
from meshfusion.dpu.service_admin import ServedServiceAdmin
from meshfusion.dpu.telemetry.log_format import JsonFormatter, TextFormatter
from meshfusion.tools.mfctl.log_file import LogFile
from meshfusion.tools.mfctl.own_version import own_version
from meshfusion.tools.mfctl.pool_start import open_pools
from meshfusion.tools.mfctl.reloader import Reloader
from meshfusion.tools.mfctl.sd_notify import Notifier
from meshfusion.tools.mfctl.served_pools import ServedPools
from meshfusion.tools.mfctl.service_life import ServiceLife
from meshfusion.tools.mfctl.service_signals import ServiceSignals
from meshfusion.tools.mfctl.watchdog import Watchdog

if TYPE_CHECKING:
    from meshfusion.dpu.api.running_server import RunningServer
    from meshfusion.dpu.pool import Pool
    from meshfusion.dpu.telemetry.event_log import EventLog
    from meshfusion.dpu.telemetry.service import Telemetry, ToldPool

log = logging.getLogger("meshfusion.service")

CALLS_GRACE_S = 5.0
# No work under the pool's lock takes as long.
MUTEX_PATIENCE_S = 1.0


def run_service(config: ServiceConfig, *, config_path: Path, ready_as_json: bool, may_take_over: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, or until it is drained; then let running calls finish for ``CALLS_GRACE_S``.

    ``config``: as read from ``config_path``, which is read anew on SIGHUP.

    Raises the typed errors of opening the pools and of listening, and FormatError when an index is found to be damaged
    while it is served. Must run in the main thread.
    """
    configure_logging(config.log)
    _use_all_descriptors()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # for one that answers no calls any more
    signals = ServiceSignals()
    pools = open_pools(config, signals.damaged, may_take_over=may_take_over)
    try:
        signals.defer()
        # After the pool: its checks may start child processes, which gRPC's threads do not like.
        from meshfusion.dpu.access.opening import open_door
        from meshfusion.dpu.api.server import serve
        from meshfusion.dpu.telemetry.event_log import EventLog

        gate = DrainGate(pools.service, pools.held, time.monotonic)
        notifier = Notifier.from_environment(os.environ, os.getpid())
        watchdog = Watchdog(notifier, *pools.looks(patience_s=MUTEX_PATIENCE_S))
        reloader = Reloader(config_path.absolute(), config, retune=pools.retune, relog=configure_logging)
        life = ServiceLife(
            gate,
            signals,
            notifier,
            watchdog,
            stop_grace_s=lambda: reloader.running.stop_grace_s,
            reload=reloader.reload,
        )
        operation = ServedServiceAdmin(
            gate,
            version=own_version(),
            wake=signals.wake,
            reload=reloader.reload,
            replace_keys=pools.replace_keys,
        )
        events = EventLog()
        door = open_door(config, lambda text: events.tell("certificate_problem", text))
        telemetry = _telemetry(lambda: reloader.running, pools, events)
        try:
            server = serve(
                gate,
                config.listen,
                admin=pools.admin,
                pools=pools.router,
                operation=operation,
                guard=door.guard,
                tls=door.tls,
                observer=telemetry.calls,
                events=telemetry.events,
                traces=telemetry.calls,
            )
            try:
                telemetry.start()
                pools.announce_service(server.address)
                print(_ready_line(server, pools, as_json=ready_as_json), flush=True)
                life.last()
                telemetry.stopping(life.ended_by)
            finally:
                server.stop(0.0 if life.is_hurried else CALLS_GRACE_S)
        finally:
            telemetry.close()
            door.audit.close()
    finally:
        pools.close()
    log.info("stopped")


def _use_all_descriptors() -> None:
    """Each caller's connection is one. What is usual for a process, 1024, is for those that use select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # what there is must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _telemetry(running: Callable[[], ServiceConfig], pools: ServedPools, events: EventLog) -> Telemetry:
    """``running``: what the service runs with now; a reload may change some of it."""
    from meshfusion.dpu.api.otel import provide_from_environment
    from meshfusion.dpu.telemetry.service import Telemetry
    from meshfusion.dpu.telemetry.status_page import status_page

    provide_from_environment(service_name="meshfusion")
    told = [_told_pool(running, served, pool) for served, pool in pools.each]
    return Telemetry(running().telemetry, told, events=events, more_pages=status_page())


def _told_pool(running: Callable[[], ServiceConfig], served: ServedPool, pool: Pool) -> ToldPool:
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.dpu.telemetry.service import ToldPool
    from meshfusion.dpu.telemetry.snapshot import Limits

    def limits() -> Limits:
        config = running()
        leases, medium = config.leases, config.medium_of(served.name)
        return Limits(leases.quarantine_max_fraction, leases.max_pinned_fraction, medium.drive_writes_per_day)

    return ToldPool(
        pool,
        pool.drive_admin,
        limits,
        name=served.name,
        tenant=min(served.tenants),
        segments=pool.segment_view,
        index_directory=PoolLayout(served.pool.path).index,
    )


def _ready_line(server: RunningServer, pools: ServedPools, *, as_json: bool) -> str:
    """``address``: that which is best on this machine; ``addresses`` where there are several."""
    fields: dict[str, object] = {"address": server.address}
    if len(server.addresses) > 1:
        fields["addresses"] = list(server.addresses) if as_json else ",".join(server.addresses)
    fields |= {**pools.ready_fields(as_text=not as_json), "pid": os.getpid()}
    if as_json:
        return json.dumps({"ready": True, **fields})
    return "ready " + " ".join(f"{name}={value}" for name, value in fields.items())


def configure_logging(config: LogConfig) -> None:
    """Send this process's log to its file, or to stderr. Raises ConfigError when the file cannot be written; the log
    goes on as before then."""
    handler = logging.StreamHandler(sys.stderr) if config.file is None else LogFile(config.file)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
