"""What ``mfctl doctor`` looks at here: the software, the pool, and the machine in its role."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.doctor.examine import Surroundings, examine_machine
from meshfusion.tools.doctor.machine import Machine
from meshfusion.tools.doctor.role import Role, role_finding
from meshfusion.tools.mfctl.doctor import examine
from meshfusion.tools.mfctl.findings import Finding, State
from meshfusion.tools.mfctl.service_access import calling

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServiceConfig
    from meshfusion.tools.mfctl.context_types import ServiceContext


def examine_here(pool: Path | None, wanted: Role | None = None, config_path: Path | None = None) -> Iterator[Finding]:
    """``wanted``: None for the role that the machine looks like. ``config_path``: of the service here."""
    machine = Machine()
    role, finding = role_finding(machine, wanted)
    yield finding
    yield from examine(pool, role)
    config, context = None, None
    if config_path is not None:
        config, finding = _configuration(config_path)
        yield finding
    try:
        context = _context()
    except MeshFusionError as error:
        yield Finding("contexts", State.FAIL, error.message, error.next_step)
    around = Surroundings(datetime.now(UTC), config, config is not None and _is_served(config), context)
    yield from examine_machine(machine, role, around)


def _configuration(path: Path) -> tuple[ServiceConfig | None, Finding]:
    from meshfusion.tools.mfctl.config_model import config_alone

    try:
        return config_alone(path), Finding("configuration", State.OK, f"{path} is understood")
    except MeshFusionError as error:
        return None, Finding("configuration", State.FAIL, error.message, error.next_step)


def _context() -> ServiceContext | None:
    return calling().context


def _is_served(config: ServiceConfig) -> bool:
    from meshfusion.dpu.owner_lock import served_at
    from meshfusion.dpu.pool_dir import PoolLayout

    return any(served_at(PoolLayout(served.pool.path)) for served in config.served)
