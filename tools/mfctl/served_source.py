"""Where a command that needs a running service finds it: by its address, or by the pool that it serves."""

from __future__ import annotations

import shlex
from pathlib import Path

from meshfusion.jbof.errors import ServiceUnavailableError
from meshfusion.tools.mfctl.context_choice import Services, services_of
from meshfusion.tools.mfctl.context_types import Member


def pool_name_of(path: Path | None, pool_name: str) -> str:
    """What its service, which may have others, calls the pool in ``path``; ``pool_name`` where no path is named."""
    if path is None:
        return pool_name
    from meshfusion.dpu.owner_lock import served_as
    from meshfusion.dpu.pool_dir import PoolLayout

    return served_as(PoolLayout(path.absolute()))


def serving(path: Path | None, address: str | None, pool_name: str = "") -> Services:
    """Raises :class:`~meshfusion.jbof.errors.ServiceUnavailableError` when nobody serves the pool in ``path``."""
    services = services_of(path, address, pool_name)
    if services is not None:
        return services
    from meshfusion.dpu.owner_lock import served_at
    from meshfusion.dpu.pool_dir import PoolLayout

    assert path is not None
    found = served_at(PoolLayout(path.absolute()))
    if not found:
        raise ServiceUnavailableError(
            f"no service serves the pool {path}",
            next_step=f"start it, or see what is on the medium: mfctl pool status {shlex.quote(str(path))}",
        )
    return Services((Member(found, found),))
