"""The life of the service process: logs, pool, server, one ready line, and a graceful end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from meshfusion.dpu.config import LimitsConfig, LogConfig, ServedPool, ServiceConfig
from meshfusion.dpu.config_pool import pool_is_absent
from meshfusion.jbof.errors import FormatError

if TYPE_CHECKING:
    from types import FrameType

    from meshfusion.dpu.config_exports import ExportsConfig
    from meshfusion.dpu.drive_keys import DriveKeys
    from meshfusion.dpu.pool import Pool
    from meshfusion.dpu.pool_opening import MakeExports
    from meshfusion.dpu.tenancy import PoolRouter

log = logging.getLogger("meshfusion.service")

STOP_GRACE_S = 5.0
ZEROING_LOG_S = 30.0


def run_service(config: ServiceConfig, *, ready_as_json: bool, may_take_over: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, then let running calls finish for ``STOP_GRACE_S`` seconds.

    Raises the typed errors of opening the pool and of listening, and FormatError when its index is found to be damaged
    while it is served. Must run in the main thread.
    """
    configure_logging(config.log)
    stop = _StopSignal()
    pool = _open_pools(config, stop.damaged, may_take_over=may_take_over)
    try:
        stop.defer()
        # After the pool: its checks may start child processes, which gRPC's threads do not like.
        from meshfusion.dpu.api.server import serve

        server = serve(pool, config.listen, **_for_operators(pool))
        try:
            pool.announce_service(server.address)
            print(_ready_line(server.address, config, pool, ready_as_json), flush=True)
            signal_name = stop.wait()
            log.info("%s: stopping", signal_name)
        finally:
            server.stop(STOP_GRACE_S)
    finally:
        pool.close()
    log.info("stopped")


def _open_pools(
    config: ServiceConfig, damaged: Callable[[FormatError], None], *, may_take_over: bool
) -> Pool | PoolRouter:
    """All, or none."""
    from meshfusion.dpu.drive_keys import DriveKeys
    from meshfusion.dpu.tenancy import PoolRouter, TenantPool

    keys = DriveKeys()
    with contextlib.ExitStack() as opened:
        pools: dict[str, Pool] = {}
        for served in config.served:
            pool = pools[served.name] = _open_pool(config, served, damaged, keys, may_take_over=may_take_over)
            opened.callback(pool.close)
        opened.pop_all()
    if config.pools is None:
        return pool
    return PoolRouter({served.name: TenantPool(pools[served.name], served.tenants) for served in config.served})


def _for_operators(pool: Pool | PoolRouter) -> dict[str, Any]:
    from meshfusion.dpu.pool import Pool

    return {"admin": pool.drive_admin} if isinstance(pool, Pool) else {"pools": pool}


def _open_pool(
    config: ServiceConfig,
    served: ServedPool,
    damaged: Callable[[FormatError], None],
    drive_keys: DriveKeys,
    *,
    may_take_over: bool,
) -> Pool:
    from meshfusion.dpu.api.address import parse_address
    from meshfusion.dpu.api.listen import check_free
    from meshfusion.dpu.pool import Pool, PoolOptions
    from meshfusion.dpu.pool_create import create_pool_of_drives
    from meshfusion.dpu.pool_tending import Policy
    from meshfusion.dpu.running_drives import DriveOptions

    if served.pool.create and pool_is_absent(served.pool.path):
        assert served.pool.size is not None, "load_service_config asks for it when the pool is absent"
        check_free(parse_address(config.listen))  # so that a slip here leaves no pool of that size behind
        if served.exports is not None:
            from meshfusion.dpu.export.opening import check_target

            check_target(served.exports.target)
        create_pool_of_drives(
            served.pool.path,
            size_bytes=served.pool.size,
            segment_bytes=served.pool.segment_size,
            data_paths=served.pool.data_path or (None,),
            tell=_ZeroingLog(),
        )
        log.info("created pool %s", served.pool.path)
    for note in served.notes:
        log.warning("%s", note)
    options = PoolOptions(
        **config.leases.model_dump(),
        policy=Policy(served.medium.policy),
        drive_writes_per_day=served.medium.drive_writes_per_day,
        free_fraction=served.medium.free_fraction,
    )
    pool = Pool.open(
        served.pool.path,
        options,
        exports=_exports(served.exports, served.limits),
        damaged=damaged,
        drive_options=DriveOptions(**config.drives.model_dump()),
        may_take_over=may_take_over,
        tenants=served.tenants,
        drive_keys=drive_keys,
    )
    log.info("opened pool %s (%s)", served.pool.path, pool.pool_uuid)
    return pool


class _ZeroingLog:
    """Says now and then how far the zeroing of a new pool's drive is, which may take long."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= ZEROING_LOG_S:
            self._told_s = now_s
            log.info("zeroing a new pool's drive: %d of %d MiB", done_bytes >> 20, total_bytes >> 20)


def _exports(exports: ExportsConfig | None, limits: LimitsConfig | None) -> MakeExports | None:
    if exports is None:
        return None
    from meshfusion.dpu.export.opening import keeper_of
    from meshfusion.dpu.export.spdk.rate_limits import RateLimits

    return partial(keeper_of, exports, limits=None if limits is None else RateLimits(**limits.model_dump()))


def _ready_line(address: str, config: ServiceConfig, pool: Pool | PoolRouter, as_json: bool) -> str:
    from meshfusion.dpu.pool import Pool

    fields: dict[str, object] = {"address": address}
    if isinstance(pool, Pool):
        (served,) = config.served
        fields |= {"pool": str(served.pool.path), "pool_uuid": pool.pool_uuid}
    else:
        fields["pools"] = pool.uuids if as_json else ",".join(pool.uuids)
    fields["pid"] = os.getpid()
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
    if config.format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        body = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body)
