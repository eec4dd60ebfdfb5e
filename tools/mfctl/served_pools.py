"""The pools of a running service, as the one thing that drains, is watched, is tuned and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from meshfusion.dpu.config_changes import tuning_of
from meshfusion.dpu.drain import Held
from meshfusion.dpu.progress import Progress
from meshfusion.jbof.errors import ServiceError

if TYPE_CHECKING:
    from meshfusion.dpu.api.drive_types import DriveAdmin
    from meshfusion.dpu.api.service_types import KeyChange, ReplacedKey
    from meshfusion.dpu.api.types import ChunkService
    from meshfusion.dpu.config import ServedPool, ServiceConfig
    from meshfusion.dpu.pool import Pool
    from meshfusion.dpu.tenancy import PoolRouter


class ServedPools:
    """``pools``: open, each with what it was configured as, and this one's to close. ``opened``: what they lie on, to
    be closed after them; it may close them, too. ``service``: for engines.
    ``admin``: the drives' of the only pool; None where pools have names, and ``router`` has them all."""

    def __init__(self, pools: Sequence[tuple[ServedPool, Pool]], opened: contextlib.ExitStack | None = None) -> None:
        from meshfusion.dpu.tenancy import PoolRouter, TenantPool

        assert pools, "a service without pools"
        self._pools = tuple(pools)
        self._opened = opened or contextlib.ExitStack()
        self.router: PoolRouter | None = None
        self.only: Pool | None = None
        if pools[0][0].name:
            self.router = PoolRouter({served.name: TenantPool(pool, served.tenants) for served, pool in pools})
        else:
            ((_, self.only),) = pools

    @property
    def each(self) -> tuple[tuple[ServedPool, Pool], ...]:
        """With what it was configured as when the service began, in the file's order."""
        return self._pools

    @property
    def service(self) -> ChunkService:
        return self._all

    @property
    def admin(self) -> DriveAdmin | None:
        return None if self.only is None else self.only.drive_admin

    def held(self) -> Held:
        """What others have open in any of them."""
        each = [pool.held() for _, pool in self._pools]
        return Held(writes=sum(held.writes for held in each), leases=sum(held.leases for held in each))

    def looks(self, *, patience_s: float) -> tuple[Callable[[], Progress | None], ...]:
        """How far each has come; see :meth:`~meshfusion.dpu.pool.Pool.progress`."""
        return tuple(partial(pool.progress, patience_s=patience_s) for _, pool in self._pools)

    def retune(self, config: ServiceConfig) -> None:
        """All of them, each to its own part of what the service runs with. Raises ConfigError as
        :meth:`~meshfusion.dpu.pool.Pool.retune`: those before it are tuned already."""
        for served, pool in self._pools:
            pool.retune(tuning_of(config, served.name))

    def replace_keys(self, pool: str, holder_id: str, wait_s: float) -> tuple[ReplacedKey, ...]:
        """Of that pool's hosts, or with "" of all pools'; of one holder or all. Raises as
        :meth:`~meshfusion.dpu.pool.Pool.replace_keys`, and ServiceError for a name that no pool has."""
        from meshfusion.dpu.api.service_types import ReplacedKey

        meant = self._meant(pool, holder_id)
        changes: dict[str, KeyChange] = {}
        with ThreadPoolExecutor(len(meant), "meshfusion-rekey") as each:  # or the first would have all the time
            for found in each.map(lambda one: one.replace_keys(holder_id, deadline_s=wait_s), meant):
                changes |= found
        return tuple(ReplacedKey(holder, change) for holder, change in sorted(changes.items()))

    def _meant(self, pool: str, holder_id: str) -> list[Pool]:
        """A pool that is not named is the holder's, and without one each; the first tells that nobody has it."""
        names = {served.name or "": one for served, one in self._pools}
        if pool and pool not in names:
            raise ServiceError(
                f"this service has no pool {pool!r}", next_step=f"name one: {', '.join(filter(None, names)) or 'none'}"
            )
        meant = [names[pool]] if pool else list(names.values())
        return [one for one in meant if one.has_holder(holder_id)] or meant[:1] if holder_id else meant

    def announce_service(self, address: str) -> None:
        """Let whoever finds one of the pools in use learn where it is served, and by which name."""
        self._all.announce_service(address)

    def ready_fields(self, *, as_text: bool) -> dict[str, object]:
        """Which pools these are, for the ready line."""
        if self.router is None:
            ((served, pool),) = self._pools
            return {"pool": str(served.pool.path), "pool_uuid": pool.pool_uuid}
        uuids = self.router.uuids
        return {"pools": ",".join(uuids) if as_text else uuids}

    def close(self) -> None:
        """All of them, whatever becomes of one. Raises what one of them raised."""
        with self._opened:
            self._all.close()

    @property
    def _all(self) -> Pool | PoolRouter:
        if self.only is not None:
            return self.only
        assert self.router is not None, "one of them there is"
        return self.router
