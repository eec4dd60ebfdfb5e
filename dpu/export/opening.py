"""From the configuration to a keeper of exports."""

from __future__ import annotations

import importlib.util
import math
import uuid
from collections.abc import Callable
from functools import partial

from meshfusion.dpu.config_exports import ExportsConfig, SpdkConfig, parse_portal
from meshfusion.dpu.export.desired import Export, Listener, Namespace
from meshfusion.dpu.export.keeper import ExportKeeper, FencingTarget
from meshfusion.dpu.export.keys import PSK, HostKeys
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, check_bdevs, nqn_prefix_of
from meshfusion.dpu.export.spdk.bdevs import drop_bdev, keep_bdev, make_bdev
from meshfusion.dpu.export.spdk.rate_limits import RateLimits
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.jbof.errors import ConfigError, UnsupportedError


def keeper_of(
    config: ExportsConfig, pool_uuid: uuid.UUID, layout: PoolLayout, *, limits: RateLimits | None = None
) -> ExportKeeper:
    """Not started yet. ``limits``: of each drive, with an SPDK; None: what its bdevs have is somebody else's affair.

    Raises :class:`~meshfusion.dpu.export.errors.TargetUnreachableError` where this kernel has no nvmet, and
    :class:`~meshfusion.jbof.errors.ConfigError` for what cannot be exported. An SPDK that is not there may come later.
    """
    plan, target = _plan_and_target(config, pool_uuid, layout, limits)
    check_bdevs(plan, [drive.number for drive in find_drives(layout).here])
    lifetime_s = config.key_lifetime_s
    return ExportKeeper(target, plan, key_lifetime_s=math.inf if lifetime_s is None else lifetime_s)


def _plan_and_target(
    config: ExportsConfig,
    pool_uuid: uuid.UUID,
    layout: PoolLayout,
    limits: RateLimits | None = None,
) -> tuple[ExportPlan, FencingTarget]:
    """Which drives are shown, the pool says from round to round."""
    spdk = config.spdk
    plan = ExportPlan(
        kind=TargetKind(config.target),
        nqn_prefix=nqn_prefix_of(pool_uuid, config.nqn_prefix),
        pool_uuid=pool_uuid,
        backings={},
        listeners=frozenset(Listener(parse_portal(portal)) for portal in config.portals),
        socket="" if spdk is None else str(spdk.socket),
        keys=HostKeys(layout.holders) if config.authenticate else None,
        psks=HostKeys(layout.holders, PSK) if config.tcp_tls else None,
        named_bdevs={} if spdk is None else spdk.named_bdevs,
    )
    nothing = plan.export(())
    if spdk is None:
        return plan, _nvmet(nothing)
    make = partial(make_bdev, limits)
    return plan, _spdk(config, spdk, nothing, make, keep_bdev if spdk.named_bdevs else drop_bdev)


def has_hosts(config: ExportsConfig, pool_uuid: uuid.UUID, exported_as: str, layout: PoolLayout) -> bool:
    """Does the target still let a host reach this pool, or is it at something that concerns one?

    Raises :class:`~meshfusion.jbof.errors.ConfigError` when ``exported_as`` is not what ``config`` says, and what
    :func:`keeper_of` and asking the target raise.
    """
    plan, target = _plan_and_target(config, pool_uuid, layout)
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

    Raises :class:`~meshfusion.dpu.export.errors.TargetUnreachableError`, and
    :class:`~meshfusion.jbof.errors.UnsupportedError` where this installation cannot talk to an SPDK.
    """
    if target == "nvmet":
        from meshfusion.dpu.export.nvmet.configfs import KernelConfigFs

        KernelConfigFs()
    else:
        _check_spdk_package()


def _check_spdk_package() -> None:
    if importlib.util.find_spec("spdk") is None:
        raise UnsupportedError(
            "exports.target: spdk needs the Python package spdk, which is not installed",
            next_step="pip install 'meshfusion[dpu]', or use target: nvmet",
        )


def _nvmet(desired: Export) -> FencingTarget:
    from meshfusion.dpu.export.nvmet.configfs import KernelConfigFs
    from meshfusion.dpu.export.nvmet.target import NvmetTarget

    return NvmetTarget(KernelConfigFs(), desired)


def _spdk(
    config: ExportsConfig,
    spdk: SpdkConfig,
    desired: Export,
    make: Callable[[SpdkRpc, Namespace], None],
    drop: Callable[[SpdkRpc, str], None],
) -> FencingTarget:
    """``make``, ``drop``: see :class:`~meshfusion.dpu.export.spdk.target.SpdkSettings`."""
    _check_spdk_package()
    from meshfusion.dpu.export.spdk.client import SpdkClient
    from meshfusion.dpu.export.spdk.sizing import Machine, size
    from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget

    machine = Machine(spdk.memory, spdk.cores, connections=spdk.connections)
    settings = SpdkSettings(
        sizing=size(machine),
        transports=frozenset(parse_portal(portal).transport for portal in config.portals),
        make=make,
        drop=drop,
    )
    return SpdkTarget(SpdkClient(spdk.socket), settings, desired)
