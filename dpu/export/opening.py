"""From the configuration to a keeper of exports."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from meshfusion.dpu.config_exports import ExportsConfig, SpdkConfig, parse_portal
from meshfusion.dpu.export.desired import Export, Listener
from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.keeper import ExportKeeper, FencingTarget
from meshfusion.dpu.export.keys import PSK, HostKeys
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, nqn_prefix_of
from meshfusion.dpu.export.spdk.client import SpdkRpc
from meshfusion.dpu.export.spdk.rate_limits import RateLimits, keep_limits
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.format import LBA_BYTES

_EXISTS = -17  # bdev_aio_create answers with the negative errno: EEXIST


def keeper_of(
    config: ExportsConfig, pool_uuid: uuid.UUID, layout: PoolLayout, *, limits: RateLimits | None = None
) -> ExportKeeper:
    """Not started yet. ``limits``: of each drive, with an SPDK; None: what its bdevs have is somebody else's affair.

    Raises :class:`~meshfusion.dpu.export.errors.TargetUnreachableError` where this kernel has no nvmet, and
    :class:`~meshfusion.jbof.errors.ConfigError` for what cannot be exported. An SPDK that is not there may come later.
    """
    drives = {drive.number: drive.path.resolve() for drive in find_drives(layout).here}
    lifetime_s = config.key_lifetime_s
    plan, target = _plan_and_target(config, pool_uuid, layout, drives, limits)
    return ExportKeeper(target, plan, key_lifetime_s=math.inf if lifetime_s is None else lifetime_s)


def _plan_and_target(
    config: ExportsConfig,
    pool_uuid: uuid.UUID,
    layout: PoolLayout,
    drives: Mapping[int, Path],
    limits: RateLimits | None = None,
) -> tuple[ExportPlan, FencingTarget]:
    """``drives``: where they are, by their numbers."""
    spdk = config.spdk
    backings = {number: str(path) for number, path in drives.items()}
    if spdk is not None:
        backings = bdevs_of(spdk, pool_uuid, drives)
    plan = ExportPlan(
        kind=TargetKind(config.target),
        nqn_prefix=nqn_prefix_of(pool_uuid, config.nqn_prefix),
        pool_uuid=pool_uuid,
        backings=backings,
        listeners=frozenset(Listener(parse_portal(portal)) for portal in config.portals),
        socket="" if spdk is None else str(spdk.socket),
        keys=HostKeys(layout.holders) if config.authenticate else None,
        psks=HostKeys(layout.holders, PSK) if config.tcp_tls else None,
    )
    nothing = plan.export(())
    if spdk is None:
        return plan, _nvmet(nothing)
    files = {} if spdk.named_bdevs else {backings[number]: str(path) for number, path in drives.items()}
    attach = partial(attach_drives, files, tuple(backings.values()), limits)
    return plan, _spdk(config, spdk, nothing, attach)


def bdevs_of(spdk: SpdkConfig, pool_uuid: uuid.UUID, drives: Collection[int]) -> dict[int, str]:
    """The bdev of each of these drives. Raises :class:`~meshfusion.jbof.errors.ConfigError` when bdevs are named, and
    not that of each."""
    named = spdk.named_bdevs
    if not named:
        return {number: f"mf-{pool_uuid}{f'-{number}' if number else ''}" for number in drives}
    if missing := sorted(set(drives) - named.keys()):
        raise ConfigError(
            f"the configuration names no bdev for drive {', '.join(map(str, missing))} of the pool",
            next_step="name a bdev for each drive's number: exports.spdk.bdevs; or none, for aio bdevs of the drives",
        )
    return {number: named[number] for number in drives}


def has_hosts(config: ExportsConfig, pool_uuid: uuid.UUID, exported_as: str, layout: PoolLayout) -> bool:
    """Does the target still let a host reach this pool, or is it at something that concerns one?

    Raises :class:`~meshfusion.jbof.errors.ConfigError` when ``exported_as`` is not what ``config`` says, and what
    :func:`keeper_of` and asking the target raise.
    """
    plan, target = _plan_and_target(config, pool_uuid, layout, {})
    if plan.name != exported_as:
        raise ConfigError(
            f"the pool was exported as {exported_as}; this configuration means {plan.name}",
            next_step="name the configuration that the pool was served with",
        )
    nothing = plan.export(())
    # The kernel does not tell who is connected, and taking a host off its list does not end that: there, only a
    # subsystem without a namespace has nobody who could write.
    is_silent = plan.kind is TargetKind.NVMET
    return any(
        there.allow_any_host or there.hosts or there.connections or there.pending or (is_silent and there.namespaces)
        for there in target.read(nothing)
        if nothing.manages(there.nqn)
    )


def check_target(target: str) -> None:
    """Could :func:`keeper_of` find its target here? ``target`` as configured. Asked before a pool is made for it.

    Raises :class:`~meshfusion.dpu.export.errors.TargetUnreachableError`.
    """
    if target == "nvmet":
        from meshfusion.dpu.export.nvmet.configfs import KernelConfigFs

        KernelConfigFs()


def _nvmet(desired: Export) -> FencingTarget:
    from meshfusion.dpu.export.nvmet.configfs import KernelConfigFs
    from meshfusion.dpu.export.nvmet.target import NvmetTarget

    return NvmetTarget(KernelConfigFs(), desired)


def _spdk(config: ExportsConfig, spdk: SpdkConfig, desired: Export, attach: Callable[[SpdkRpc], None]) -> FencingTarget:
    """``attach``: see :class:`~meshfusion.dpu.export.spdk.target.SpdkSettings`."""
    from meshfusion.dpu.export.spdk.client import SpdkClient
    from meshfusion.dpu.export.spdk.sizing import Machine, size
    from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget

    machine = Machine(spdk.memory, spdk.cores, connections=spdk.connections)
    settings = SpdkSettings(
        sizing=size(machine),
        transports=frozenset(parse_portal(portal).transport for portal in config.portals),
        attach=attach,
    )
    return SpdkTarget(SpdkClient(spdk.socket), settings, desired)


def attach_drives(files: Mapping[str, str], bdevs: Collection[str], limits: RateLimits | None, rpc: SpdkRpc) -> None:
    """``files``: of which aio bdevs are to be made, by their names. ``bdevs``: all that are exported. Idempotent."""
    attach_files(files, rpc)
    if limits is not None:
        keep_limits(rpc, bdevs, limits)


def attach_files(files: Mapping[str, str], rpc: Any) -> None:
    """Make an aio bdev of each file. Idempotent. ``fallocate``: so that deallocating reaches the file."""
    for bdev, file in files.items():
        try:
            rpc.call("bdev_aio_create", 20.0, name=bdev, filename=file, block_size=LBA_BYTES, fallocate=True)
        except StepRefusedError as error:
            if error.code != _EXISTS:
                raise
