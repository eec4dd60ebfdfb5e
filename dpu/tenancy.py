"""One service of several pools, each of its own tenants (rule 11).

A pool has its store, index, drives and exports to itself, so that what keeps tenants apart is which pool a call
reaches. That is decided here, and only here: an attachment goes to the pool of its tenant, and every later call of a
holder to the pool that admitted it, which looks after it as if it were the only one. What operators ask names the pool.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.drive_types import DriveAdmin
from meshfusion.dpu.api.limits import MAX_ID_CHARS
from meshfusion.dpu.store.checks import UNSERVED_STEP
from meshfusion.jbof.errors import ServiceError, StaleHolderError, UnsupportedError


class AdmittingPool(api.ChunkService, Protocol):
    """What is used of :class:`~meshfusion.dpu.pool.Pool`."""

    @property
    def drive_admin(self) -> DriveAdmin: ...

    @property
    def pool_uuid(self) -> str: ...

    def has_holder(self, holder_id: str) -> bool: ...

    def announce_service(self, address: str, name: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class TenantPool:
    """``pool``: open, and the router's to close. ``tenants``: those that it was opened for."""

    pool: AdmittingPool
    tenants: frozenset[str]


class PoolRouter:
    """A :class:`~meshfusion.dpu.api.types.ChunkService` of several, by their names. From any thread.

    Which pool a holder is of, the pools are asked each time: nothing here could differ from what they know, and a
    restart changes nothing. A holder id is in one of them at most, which :meth:`attach` sees to.
    """

    def __init__(self, pools: Mapping[str, TenantPool]) -> None:
        assert pools, "a service without pools"
        self._pools = {name: one.pool for name, one in pools.items()}
        self._of_tenant = {tenant: one.pool for one in pools.values() for tenant in one.tenants}
        assert len(self._of_tenant) == sum(len(one.tenants) for one in pools.values()), "a tenant of two pools"
        self._attaching: list[tuple[str, AdmittingPool]] = []
        self._lock = threading.Lock()  # of what is being attached; held for no other call

    # ---- for operators -------------------------------------------------------------------------------------------

    @property
    def uuids(self) -> dict[str, str]:
        """Of the pools, by their names."""
        return {name: pool.pool_uuid for name, pool in self._pools.items()}

    def chunks(self, pool: str) -> api.ChunkService:
        """The pool of that name; "" for the only one. Raises :class:`~meshfusion.jbof.errors.ServiceError`."""
        return self._named(pool)

    def admin(self, pool: str) -> DriveAdmin:
        """Its drives'. Raises as :meth:`chunks`."""
        return self._named(pool).drive_admin

    def _named(self, name: str) -> AdmittingPool:
        if not name and len(self._pools) == 1:
            return next(iter(self._pools.values()))
        found = self._pools.get(name)
        if found is None:
            problem = f"has no pool {name[:MAX_ID_CHARS]!r}" if name else "has several pools"
            raise ServiceError(
                f"this service {problem}", next_step=f"name one, with mfctl's --pool: {', '.join(self._pools)}"
            )
        return found

    # ---- for engines ---------------------------------------------------------------------------------------------

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        """By the pool of its tenant, whose engine learns of no other."""
        pool = self._of_tenant.get(request.tenant)
        if pool is None:
            raise UnsupportedError(
                f"not served here: tenant {request.tenant[:MAX_ID_CHARS]!r}", next_step=UNSERVED_STEP
            )
        with self._sole_claim(request.incarnation, pool):
            return pool.attach(request, deadline_s=deadline_s)

    @contextlib.contextmanager
    def _sole_claim(self, incarnation: str, pool: AdmittingPool) -> Iterator[None]:
        """No other pool has the holder, nor begins to have it meanwhile."""
        with self._lock:
            begun = next((pool for attaching, pool in self._attaching if attaching == incarnation), None)
            if (begun or self._pool_of(incarnation) or pool) is not pool:
                raise StaleHolderError(  # as a pool refuses an incarnation that is in use
                    f"worker incarnation {incarnation[:MAX_ID_CHARS]} is attached already, as another process",
                    next_step="attach as a new incarnation",
                )
            self._attaching.append((incarnation, pool))
        try:
            yield
        finally:
            with self._lock:
                self._attaching.remove((incarnation, pool))

    def _pool_of(self, holder_id: str) -> AdmittingPool | None:
        return next((pool for pool in self._pools.values() if pool.has_holder(holder_id)), None)

    def _of(self, holder_id: str) -> AdmittingPool:
        """That which admitted it. Raises :class:`~meshfusion.jbof.errors.StaleHolderError`, as a pool would."""
        found = self._pool_of(holder_id)
        if found is None:
            raise StaleHolderError(
                f"holder {holder_id[:MAX_ID_CHARS]} is not attached, or was fenced", next_step="attach again"
            )
        return found

    def match(self, request: api.MatchRequest, *, deadline_s: float) -> api.MatchReply:
        return self._of(request.holder_id).match(request, deadline_s=deadline_s)

    def release(self, request: api.ReleaseRequest, *, deadline_s: float) -> None:
        pool = self._pool_of(request.holder_id)
        if pool is not None:  # else it has no leases
            pool.release(request, deadline_s=deadline_s)

    def reserve(self, request: api.ReserveRequest, *, deadline_s: float) -> api.ReserveReply:
        return self._of(request.holder_id).reserve(request, deadline_s=deadline_s)

    def commit(self, request: api.CommitRequest, *, deadline_s: float) -> api.CommitReply:
        return self._of(request.holder_id).commit(request, deadline_s=deadline_s)

    def abort(self, request: api.AbortRequest, *, deadline_s: float) -> None:
        self._of(request.holder_id).abort(request, deadline_s=deadline_s)

    def heartbeat(self, request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        return self._of(request.holder_id).heartbeat(request, deadline_s=deadline_s)

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        return self._of(request.holder_id).drop(request, deadline_s=deadline_s)

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        pool = self._pool_of(request.holder_id)
        if pool is not None:  # else it is gone, and has nothing to leave
            pool.detach(request, deadline_s=deadline_s)

    # ---- of the only pool ----------------------------------------------------------------------------------------

    def status(self, *, deadline_s: float) -> api.PoolStatus:
        return self._named("").status(deadline_s=deadline_s)

    def list_chunks(self, request: api.ListRequest, *, deadline_s: float) -> api.ListReply:
        return self._named("").list_chunks(request, deadline_s=deadline_s)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> api.ChunkRecord | None:
        return self._named("").get_chunk(key, deadline_s=deadline_s)

    # ---- life ----------------------------------------------------------------------------------------------------

    def announce_service(self, address: str) -> None:
        """Let whoever finds one of the pools in use learn where it is served, and by which name."""
        for name, pool in self._pools.items():
            pool.announce_service(address, name)

    def close(self) -> None:
        """All of them, whatever becomes of one. Raises what one of them raised."""
        with contextlib.ExitStack() as closing:
            for pool in self._pools.values():
                closing.callback(pool.close)
