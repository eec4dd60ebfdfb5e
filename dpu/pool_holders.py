"""Holders of a served pool: how each comes to reach the data, and how it is known that it does not any more.

One with local access holds the lock of its liveness file while it lives. Hosts of a target are let in and cut off by
the keeper of exports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import MAX_ID_CHARS
from meshfusion.dpu.api.liveness import create_liveness, forget_liveness, take_liveness_away
from meshfusion.dpu.api.service_types import KeyChange
from meshfusion.dpu.export.keeper import Drives, ExportKeeper
from meshfusion.dpu.pool_dir import LIVENESS_SUFFIX, PoolLayout
from meshfusion.dpu.pool_transactions import Transactions
from meshfusion.dpu.store.store import Store
from meshfusion.jbof.errors import MeshFusionError, ServiceError, UnsupportedError

logger = logging.getLogger("meshfusion.pool")

UNCONFIRMED = (
    "an earlier service exported this pool to hosts that may still write, and only its target can say when they are "
    "gone: until the pool is served with these exports again, nothing is reclaimed"
)


class PoolHolders:
    """``mutex``: the pool's. ``exports``: None where data is reached locally only; ``drives``: what they show."""

    def __init__(
        self,
        layout: PoolLayout,
        store: Store,
        transactions: Transactions,
        exports: ExportKeeper | None,
        drives: Drives,
        *,
        mutex: threading.Lock,
        clock: Callable[[], float],
    ) -> None:
        self._layout, self._store, self._transactions, self._exports = layout, store, transactions, exports
        self._drives, self._mutex, self._clock = drives, mutex, clock

    def start(self) -> None:
        """Serve hosts of the target, if there is one."""
        if self._exports is not None:
            self._exports.start(self, self._drives)
        elif self._store.holders.to_serve():
            logger.warning("%s", UNCONFIRMED)

    def close(self) -> bool:
        """False: the target is still at what it was asked."""
        return self._exports is None or self._exports.close()

    # ---- coming --------------------------------------------------------------------------------------------------

    def attach(
        self, request: api.AttachRequest, numbers: Collection[int] = (), *, deadline_s: float
    ) -> tuple[str, api.Export | None]:
        """Its id, and how it reaches the data, these drives: None for locally. Raises what the store raises,
        :class:`UnsupportedError` where nothing is exported, and what the keeper of exports raises."""
        end_s = time.monotonic() + deadline_s
        is_local = request.access is api.Access.LOCAL
        if not is_local:
            self._served_exports().check(deadline_s=deadline_s)
            self._make_secrets(request.incarnation)
        with self._mutex:
            is_new = not self._store.holders.knows(request.incarnation)
            if is_local and not self._is_known(request.incarnation):
                create_liveness(self._layout.liveness(request.incarnation))
            step = self._store.attach(self._clock(), request)
            self._transactions.submit(step)
        holder_id = self._transactions.wait(step, max(0.0, end_s - time.monotonic()))
        if is_local:
            return holder_id, None
        return holder_id, self._admit(holder_id, numbers, max(0.0, end_s - time.monotonic()), is_new=is_new)

    def _make_secrets(self, incarnation: str) -> None:
        """Durable before the listing is, which a host's key must outlive; without the mutex, since disks take their
        time."""
        with self._mutex:
            is_known = self._is_known(incarnation)
        if not is_known:
            self._served_exports().prepare(incarnation)

    def _is_known(self, incarnation: str) -> bool:
        """Under the mutex. What is to be there before it is listed durably was there: a listed holder whose liveness
        file is missing could never be called gone."""
        holders = self._store.holders
        return holders.knows(incarnation) or holders.is_fenced(incarnation)

    def _admit(self, holder_id: str, numbers: Collection[int], deadline_s: float, *, is_new: bool) -> api.Export:
        """The holder is listed durably; it learns of its access only when that is there. One that asks for drives that
        have come keeps what it has when the target does not show them in time."""
        try:
            export = self._served_exports().admit(holder_id, numbers, deadline_s=deadline_s)
        except MeshFusionError:
            if is_new:
                with self._mutex:
                    self._condemn(holder_id)
            raise
        with self._mutex:
            self._store.holders.answered(self._clock(), holder_id)
        return export

    def _served_exports(self) -> ExportKeeper:
        if self._exports is None:
            raise UnsupportedError(
                "this service exports nothing over NVMe-oF", next_step="add exports to the service's configuration"
            )
        return self._exports

    # ---- keys of hosts -------------------------------------------------------------------------------------------

    def new_key(self, request: api.HeartbeatRequest) -> str:
        """Without the mutex. That which the holder must connect with from now on; empty: the one that it has."""
        return self._exports.hear(request.holder_id, request.host_key_id) if self._exports is not None else ""

    def replace_keys(self, holder_id: str, *, deadline_s: float) -> Mapping[str, KeyChange]:
        """As :meth:`~meshfusion.dpu.pool.Pool.replace_keys`."""
        exports, served = self._served_exports(), self.holders_to_serve()
        if holder_id and holder_id not in served:
            raise ServiceError(
                f"holder {holder_id[:MAX_ID_CHARS]!r} does not reach this pool through its exports",
                next_step="mfctl pool status lists the holders",
            )
        return exports.replace_keys((holder_id,) if holder_id else served, deadline_s=deadline_s)

    # ---- going ---------------------------------------------------------------------------------------------------

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        """As :meth:`~meshfusion.dpu.pool.Pool.detach`."""
        with self._mutex:  # so that the holder cannot attach anew between its lock and its end
            holder = self._store.holders.get(request.holder_id)
            if holder is None:
                return
            if not holder.is_local:
                self._condemn(request.holder_id)
                return
            if not take_liveness_away(self._layout.liveness(request.holder_id)):
                logger.warning("holder %s detached while a process of it lives; it is watched", request.holder_id)
                return
            step = self._store.detach(self._clock(), request)
            self._transactions.submit(step, partial(self._forget, request.holder_id))
        self._transactions.wait(step, deadline_s)

    def probe(self, now_s: float) -> None:
        """Fence those that are silent and whose lock is free."""
        with self._mutex:  # so that no holder attaches anew between its lock and its fence
            for holder_id in self._store.holders.to_probe(now_s):
                if take_liveness_away(self._layout.liveness(holder_id)):
                    logger.info("holder %s is gone: fenced", holder_id)
                    self._is_gone(now_s, holder_id)

    def forget_unlisted(self) -> None:
        """Liveness files of holders that left or were fenced just before an earlier owner of the pool ended."""
        for path in self._layout.holders.glob(f"*{LIVENESS_SUFFIX}"):
            if not self._store.holders.knows(path.name.removesuffix(LIVENESS_SUFFIX)):
                forget_liveness(path)
        if self._exports is not None:
            self._exports.forget_all_but(holder.record.holder_id for holder in self._store.holders)

    def wake_for_condemned(self) -> None:
        """Under the mutex."""
        if self._exports is not None and self._store.holders.to_cut_off():
            self._exports.wake()

    @property
    def exports_problem(self) -> str:
        """Under the mutex. Why hosts are not served, or not known to be gone; empty: all is well."""
        if self._exports is not None:
            return self._exports.problem
        is_reached = any(not holder.is_local for holder in self._store.holders)
        return UNCONFIRMED if is_reached else ""

    def _condemn(self, holder_id: str) -> None:
        """Under the mutex."""
        self._store.holders.condemn(holder_id)
        if self._exports is not None:
            self._exports.wake()

    def _is_gone(self, now_s: float, holder_id: str) -> None:
        """Under the mutex."""
        step = self._store.holder_is_gone(now_s, holder_id)
        self._transactions.submit(step, partial(self._forget, holder_id))

    def _forget(self, holder_id: str) -> None:
        """Its end is durable."""
        forget_liveness(self._layout.liveness(holder_id))
        if self._exports is not None:
            self._exports.forget(holder_id)

    # ---- for the keeper of exports -------------------------------------------------------------------------------

    def holders_to_serve(self) -> tuple[str, ...]:
        with self._mutex:
            return self._store.holders.to_serve()

    def holders_to_cut_off(self) -> tuple[str, ...]:
        with self._mutex:
            return self._store.holders.to_cut_off()

    def holder_is_cut_off(self, incarnation: str) -> None:
        with self._mutex:
            self._is_gone(self._clock(), incarnation)
