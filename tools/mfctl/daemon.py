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
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from meshfusion.dpu.config import LogConfig, ServiceConfig, notes_on_pool
from meshfusion.dpu.config_pool import pool_is_absent
from meshfusion.dpu.drain_gate import DrainGate
from meshfusion.dpu.service_admin import ServedServiceAdmin
from meshfusion.dpu.telemetry.log_format import JsonFormatter, TextFormatter
from meshfusion.jbof.errors import FormatError
from meshfusion.tools.mfctl.log_file import LogFile
from meshfusion.tools.mfctl.reloader import Reloader
from meshfusion.tools.mfctl.sd_notify import Notifier
from meshfusion.tools.mfctl.service_life import ServiceLife
from meshfusion.tools.mfctl.service_signals import ServiceSignals
from meshfusion.tools.mfctl.watchdog import Watchdog

if TYPE_CHECKING:
    from meshfusion.dpu.pool import Pool
    from meshfusion.dpu.pool_opening import MakeExports
    from meshfusion.dpu.telemetry.event_log import EventLog
    from meshfusion.dpu.telemetry.service import Telemetry

log = logging.getLogger("meshfusion.service")

CALLS_GRACE_S = 5.0
# No work under the pool's lock takes as long.
MUTEX_PATIENCE_S = 1.0


def run_service(config: ServiceConfig, *, config_path: Path, ready_as_json: bool, may_take_over: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, or until it is drained; then let running calls finish for ``CALLS_GRACE_S``.

    ``config``: as read from ``config_path``, which is read anew on SIGHUP.

    Raises the typed errors of opening the pool and of listening, and FormatError when its index is found to be damaged
    while it is served. Must run in the main thread.
    """
    configure_logging(config.log)
    _use_all_descriptors()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # for one that answers no calls any more
    signals = ServiceSignals()
    pool = _open_pool(config, signals.damaged, may_take_over=may_take_over)
    try:
        signals.defer()
        # After the pool: its checks may start child processes, which gRPC's threads do not like.
        from meshfusion.dpu.access.opening import open_door
        from meshfusion.dpu.api.server import serve
        from meshfusion.dpu.telemetry.event_log import EventLog

        gate = DrainGate(pool, pool.held, time.monotonic)
        notifier = Notifier.from_environment(os.environ, os.getpid())
        watchdog = Watchdog(notifier, partial(pool.progress, patience_s=MUTEX_PATIENCE_S))
        reloader = Reloader(config_path.absolute(), config, retune=pool.retune, relog=configure_logging)
        life = ServiceLife(
            gate,
            signals,
            notifier,
            watchdog,
            stop_grace_s=lambda: reloader.running.stop_grace_s,
            reload=reloader.reload,
        )
        operation = ServedServiceAdmin(gate, version=own_version(), wake=signals.wake, reload=reloader.reload)
        events = EventLog()
        door = open_door(config, lambda text: events.tell("certificate_problem", text))
        telemetry = _telemetry(config, pool, events)
        try:
            server = serve(
                gate,
                config.listen,
                admin=pool.drive_admin,
                operation=operation,
                guard=door.guard,
                tls=door.tls,
                observer=telemetry.calls,
                events=telemetry.events,
                traces=telemetry.calls,
            )
            try:
                telemetry.start()
                pool.announce_service(server.address)
                print(_ready_line(server.address, config.pool.path, pool.pool_uuid, ready_as_json), flush=True)
                life.last()
                telemetry.stopping(life.ended_by)
            finally:
                server.stop(0.0 if life.is_hurried else CALLS_GRACE_S)
        finally:
            telemetry.close()
            door.audit.close()
    finally:
        pool.close()
    log.info("stopped")


def _use_all_descriptors() -> None:
    """Each caller's connection is one. What is usual for a process, 1024, is for those that use select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # what there is must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open_pool(config: ServiceConfig, damaged: Callable[[FormatError], None], *, may_take_over: bool) -> Pool:
    from meshfusion.dpu.api.address import parse_address
    from meshfusion.dpu.api.listen import check_free
    from meshfusion.dpu.pool import Pool, PoolOptions
    from meshfusion.dpu.pool_create import create_pool_of_drives
    from meshfusion.dpu.pool_tending import Policy
    from meshfusion.dpu.running_drives import DriveOptions
    from meshfusion.dpu.telemetry.http_server import check_telemetry_address

    if config.pool.create and pool_is_absent(config.pool.path):
        assert config.pool.size is not None, "load_service_config asks for it when the pool is absent"
        check_free(parse_address(config.listen))  # so that a slip here leaves no pool of that size behind
        if config.telemetry.listen is not None:
            check_telemetry_address(parse_address(config.telemetry.listen))
        if config.exports is not None:
            from meshfusion.dpu.export.opening import check_target

            check_target(config.exports.target)
        create_pool_of_drives(
            config.pool.path,
            size_bytes=config.pool.size,
            segment_bytes=config.pool.segment_size,
            data_paths=config.pool.data_path or (None,),
        )
        log.info("created pool %s", config.pool.path)
    for note in notes_on_pool(config.pool):
        log.warning("%s", note)
    options = PoolOptions(
        **config.leases.model_dump(),
        policy=Policy(config.medium.policy),
        drive_writes_per_day=config.medium.drive_writes_per_day,
        free_fraction=config.medium.free_fraction,
    )
    pool = Pool.open(
        config.pool.path,
        options,
        exports=_exports(config),
        damaged=damaged,
        drive_options=DriveOptions(**config.drives.model_dump()),
        may_take_over=may_take_over,
    )
    log.info("opened pool %s (%s)", config.pool.path, pool.pool_uuid)
    return pool


def _telemetry(config: ServiceConfig, pool: Pool, events: EventLog) -> Telemetry:
    from meshfusion.dpu.api.otel import provide_from_environment
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.dpu.telemetry.service import Telemetry
    from meshfusion.dpu.telemetry.snapshot import Limits
    from meshfusion.dpu.telemetry.status_page import status_page

    provide_from_environment(service_name="meshfusion")
    leases = config.leases
    writes_per_day = config.medium.drive_writes_per_day
    limits = Limits(leases.quarantine_max_fraction, leases.max_pinned_fraction, writes_per_day)
    index = PoolLayout(config.pool.path).index
    return Telemetry(
        config.telemetry,
        pool,
        pool.drive_admin,
        limits,
        events=events,
        segments=pool.segment_view,
        index_directory=index,
        more_pages=status_page(),
    )


def _exports(config: ServiceConfig) -> MakeExports | None:
    if config.exports is None:
        return None
    from meshfusion.dpu.export.opening import keeper_of

    return partial(keeper_of, config.exports)


def _ready_line(address: str, path: Path, pool_uuid: str, as_json: bool) -> str:
    fields = {"address": address, "pool": str(path), "pool_uuid": pool_uuid, "pid": os.getpid()}
    if as_json:
        return json.dumps({"ready": True, **fields})
    return "ready " + " ".join(f"{name}={value}" for name, value in fields.items())


def own_version() -> str:
    """Of this installation."""
    try:
        return version("meshfusion")
    except PackageNotFoundError:
        return "unknown"


def configure_logging(config: LogConfig) -> None:
    """Send this process's log to its file, or to stderr. Raises ConfigError when the file cannot be written; the log
    goes on as before then."""
    handler = logging.StreamHandler(sys.stderr) if config.file is None else LogFile(config.file)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
