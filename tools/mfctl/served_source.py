"""Where a command that needs a running service finds it: by its address, or by the pool that it serves."""

from __future__ import annotations

import shlex
from pathlib import Path

from meshfusion.jbof.errors import ServiceUnavailableError
from meshfusion.tools.mfctl.sources import require_one_source


def service_address(path: Path | None, address: str | None) -> str:
    """Raises :class:`~meshfusion.jbof.errors.ServiceUnavailableError` when nobody serves the pool in ``path``."""
    require_one_source(path, address)
    if address is not None:
        return address
    from meshfusion.dpu.owner_lock import served_at
    from meshfusion.dpu.pool_dir import PoolLayout

    assert path is not None
    found = served_at(PoolLayout(path.absolute()))
    if not found:
        raise ServiceUnavailableError(
            f"no service serves the pool {path}",
            next_step=f"start it, or see what is on the medium: mfctl pool status {shlex.quote(str(path))}",
        )
    return found
