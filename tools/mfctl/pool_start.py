"""Opens the pools of a configuration, and makes those that are to be made."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from meshfusion.dpu.config import LimitsConfig, ServedPool, ServiceConfig
from meshfusion.dpu.config_pool import pool_is_absent
from meshfusion.jbof.errors import FormatError
from meshfusion.tools.mfctl.served_pools import ServedPools

if TYPE_CHECKING:
    from meshfusion.dpu.config_exports import ExportsConfig
    from meshfusion.dpu.drive_keys import DriveKeys
    from meshfusion.dpu.encryption.slices import OpenSlices
    from meshfusion.dpu.pool import Pool
    from meshfusion.dpu.pool_opening import MakeExports

log = logging.getLogger("meshfusion.service")

_ZEROING_LOG_S: Final = 30.0


def open_pools(config: ServiceConfig, damaged: Callable[[FormatError], None], *, may_take_over: bool) -> ServedPools:
    """All, or none. Raises as :meth:`~meshfusion.dpu.pool.Pool.open`, and what making one raises."""
    from meshfusion.dpu.drive_keys import DriveKeys

    keys = DriveKeys()
    with contextlib.ExitStack() as opened:
        pools: list[tuple[ServedPool, Pool]] = []
        for served in config.served:
            slices = _slices(config, served)
            if slices is not None:
                opened.callback(slices.close)
            pool = _open_pool(config, served, damaged, keys, may_take_over=may_take_over)
            opened.callback(pool.close)
            pools.append((served, pool))
        return ServedPools(pools, opened.pop_all())


def _slices(config: ServiceConfig, served: ServedPool) -> OpenSlices | None:
    """The drives of an encrypted pool, which is made where it is to be made, opened. None: it is not encrypted."""
    from meshfusion.dpu.encryption.slices import open_pools_slices
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.jbof.drives.system.luks import CRYPTSETUP

    if served.pool.create and pool_is_absent(served.pool.path):
        _create(config, served)
    return open_pools_slices(PoolLayout(served.pool.path.absolute()), served.place, CRYPTSETUP)


def _open_pool(
    config: ServiceConfig,
    served: ServedPool,
    damaged: Callable[[FormatError], None],
    drive_keys: DriveKeys,
    *,
    may_take_over: bool,
) -> Pool:
    from meshfusion.dpu.drive_options import DriveOptions
    from meshfusion.dpu.pool import Pool, PoolOptions
    from meshfusion.dpu.pool_tending import Policy

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


def _create(config: ServiceConfig, served: ServedPool) -> None:
    """What can be seen to keep the service from starting comes first: a slip there leaves no pool of that size."""
    from meshfusion.dpu.api.address import parse_address
    from meshfusion.dpu.api.listen import check_free
    from meshfusion.dpu.pool_create import create_pool_of_drives
    from meshfusion.dpu.telemetry.http_server import check_telemetry_address

    assert served.pool.size is not None, "load_service_config asks for it when the pool is absent"
    for address in config.addresses:
        check_free(address)
    if config.telemetry.listen is not None:
        check_telemetry_address(parse_address(config.telemetry.listen))
    if served.exports is not None:
        from meshfusion.dpu.export.opening import check_target

        check_target(served.exports.target)
    create_pool_of_drives(
        served.pool.path,
        size_bytes=served.pool.size,
        segment_bytes=served.pool.segment_size,
        data_paths=served.pool.data_path or (None,),
        tell=_ZeroingLog(),
        encryption=served.place,
    )
    log.info("created pool %s", served.pool.path)


class _ZeroingLog:
    """Says now and then how far the zeroing of a new pool's drive is, which may take long."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _ZEROING_LOG_S:
            self._told_s = now_s
            log.info("zeroing a new pool's drive: %d of %d MiB", done_bytes >> 20, total_bytes >> 20)


def _exports(exports: ExportsConfig | None, limits: LimitsConfig | None) -> MakeExports | None:
    if exports is None:
        return None
    from meshfusion.dpu.export.opening import keeper_of
    from meshfusion.dpu.export.spdk.rate_limits import RateLimits

    return partial(keeper_of, exports, limits=None if limits is None else RateLimits(**limits.model_dump()))
