"""Which pool of a service an operator's call means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshfusion.dpu.api.drive_types import DriveAdmin
from meshfusion.dpu.api.limits import MAX_ID_CHARS
from meshfusion.dpu.api.types import ChunkService
from meshfusion.jbof.errors import ServiceError


class NamedPools(Protocol):
    """Both raise :class:`~meshfusion.jbof.errors.ServiceError` for a name that no pool has, and for "" where there are
    several."""

    def chunks(self, pool: str) -> ChunkService: ...

    def admin(self, pool: str) -> DriveAdmin: ...


@dataclass(frozen=True, slots=True)
class OnePool:
    """The only one, which has no name. ``drives`` None: they are not administered through the service."""

    service: ChunkService
    drives: DriveAdmin | None

    def chunks(self, pool: str) -> ChunkService:
        _refuse(pool)
        return self.service

    def admin(self, pool: str) -> DriveAdmin:
        _refuse(pool)
        assert self.drives is not None, "calls of an administration that is not served"
        return self.drives


def _refuse(pool: str) -> None:
    if pool:
        raise ServiceError(
            f"this service has no pool {pool[:MAX_ID_CHARS]!r}: it serves one, without a name",
            next_step="leave the name out, or use the address of the service that has that pool",
        )
