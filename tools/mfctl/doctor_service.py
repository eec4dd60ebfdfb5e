"""What ``mfctl doctor`` asks the service that has a pool: what stands in its way, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.findings import Finding, State
from meshfusion.tools.mfctl.service_access import access_to

_ANSWER_S: Final = 3.0


def check_service(pool: Path) -> Iterator[Finding]:
    """Nothing where no service has the pool."""
    from meshfusion.dpu.api.client import GrpcChunkService
    from meshfusion.dpu.owner_lock import served_as, served_at
    from meshfusion.dpu.pool_dir import PoolLayout

    layout = PoolLayout(pool.absolute())
    address, name = served_at(layout), served_as(layout)
    if not address:
        return
    try:
        client = GrpcChunkService(address, access_to(address), pool=name)
        try:
            status = client.status(deadline_s=_ANSWER_S)
        finally:
            client.close()
    except MeshFusionError as error:
        yield Finding("service", State.FAIL, error.message, error.next_step)
        return
    yield Finding("service", State.OK, f"answers at {address}")
    if status.saves_stopped_reason:
        remedy = "Do what it says; saves go on by themselves. What is stored is served meanwhile."
        yield Finding("saves", State.WARN, f"stopped: {status.saves_stopped_reason}", remedy)
    else:
        yield Finding("saves", State.OK, "accepted")
    if status.exports_problem:
        yield Finding(
            "exports",
            State.WARN,
            status.exports_problem,
            f"mfctl pool status --service {address}{f' --pool {name}' if name else ''}",
        )
