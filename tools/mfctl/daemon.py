"""The life of the service process: logs, pool, server, one ready line, and a graceful end."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshfusion.dpu.config import LogConfig, ServiceConfig, notes_on_pool
from meshfusion.dpu.config_pool import pool_is_absent
from meshfusion.dpu.telemetry.log_format import JsonFormatter, TextFormatter
from meshfusion.jbof.errors import FormatError

if TYPE_CHECKING:
    from types import FrameType

    from meshfusion.dpu.pool import Pool
    from meshfusion.dpu.pool_opening import MakeExports
    from meshfusion.dpu.telemetry.service import Telemetry

log = logging.getLogger("meshfusion.service")

STOP_GRACE_S = 5.0


def run_service(config: ServiceConfig, *, ready_as_json: bool, may_take_over: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, then let running calls finish for ``STOP_GRACE_S`` seconds.

    Raises the typed errors of opening the pool and of listening, and FormatError when its index is found to be damaged
    while it is served. Must run in the main thread.
    """
    configure_logging(config.log)
    stop = _StopSignal()
    pool = _open_pool(config, stop.damaged, may_take_over=may_take_over)
    try:
        stop.defer()
        # After the pool: its checks may start child processes, which gRPC's threads do not like.
        from meshfusion.dpu.access.opening import open_door
        from meshfusion.dpu.api.server import serve

        door = open_door(config)
        telemetry = _telemetry(config, pool)
        try:
            server = serve(
                pool,
                config.listen,
                admin=pool.drive_admin,
                guard=door.guard,
                tls=door.tls,
                observer=telemetry.calls,
                events=telemetry.events,
            )
            try:
                telemetry.start()
                pool.announce_service(server.address)
                print(_ready_line(server.address, config.pool.path, pool.pool_uuid, ready_as_json), flush=True)
                signal_name = stop.wait()
                log.info("%s: stopping", signal_name)
                telemetry.stopping(signal_name)
            finally:
                server.stop(STOP_GRACE_S)
        finally:
            telemetry.close()
            door.audit.close()
    finally:
        pool.close()
    log.info("stopped")


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


def _telemetry(config: ServiceConfig, pool: Pool) -> Telemetry:
    from meshfusion.dpu.api.otel import provide_from_environment
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.dpu.telemetry.service import Telemetry
    from meshfusion.dpu.telemetry.snapshot import Limits

    provide_from_environment(service_name="meshfusion")
    leases = config.leases
    writes_per_day = config.medium.drive_writes_per_day
    limits = Limits(leases.quarantine_max_fraction, leases.max_pinned_fraction, writes_per_day)
    index = PoolLayout(config.pool.path).index
    return Telemetry(config.telemetry, pool, pool.drive_admin, limits, index_directory=index)


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


class _StopSignal:
    """Turns SIGTERM and SIGINT into a return from :meth:`wait`; before :meth:`defer`, into the end of the process. An
    index that is damaged becomes an error of :meth:`wait`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._deferred = False
        self._name = ""
        self._damage: FormatError | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._name = signal.Signals(number).name
        self._event.set()
        if not self._deferred:
            # Still opening the pool, which may take long: unwind through its clean-up.
            raise SystemExit(0)

    def defer(self) -> None:
        """From now on a signal waits for :meth:`wait`."""
        self._deferred = True

    def damaged(self, error: FormatError) -> None:
        """From any thread: whoever reads on may crash."""
        log.critical("%s: stopping", error.message)
        self._damage = error
        self._event.set()

    def wait(self) -> str:
        """Block until a signal has come; returns its name. Raises what :meth:`damaged` was told."""
        self._event.wait()
        if self._damage is not None:
            raise self._damage
        return self._name


def configure_logging(config: LogConfig) -> None:
    """Send this process's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
