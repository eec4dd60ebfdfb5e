"""Holders come, are heard of, and leave: listed durably before they may do anything, fenced before their space is free
again (rule 3). No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.checks import refuse_unserved
from meshfusion.dpu.store.curator import Curator
from meshfusion.dpu.store.effects import DeleteHolder, HolderRecord, PutHolder
from meshfusion.dpu.store.grants import GrantState, GrantTable
from meshfusion.dpu.store.holders import Holder, HolderTable
from meshfusion.dpu.store.leases import LeaseTable
from meshfusion.dpu.store.steps import Pending, Step, Transactions
from meshfusion.jbof.errors import StaleHolderError


class Attending:
    """``exported_as``: see :class:`~meshfusion.dpu.store.effects.HolderRecord`. ``tenants``: whose engines may come."""

    def __init__(
        self,
        holders: HolderTable,
        leases: LeaseTable,
        grants: GrantTable,
        curator: Curator,
        transactions: Transactions,
        *,
        epoch: int,
        exported_as: str,
        tenants: Collection[str],
    ) -> None:
        self._tenants = tenants
        self._holders = holders
        self._leases = leases
        self._grants = grants
        self._curator = curator
        self._transactions = transactions
        self._epoch = epoch
        self._exported_as = exported_as
        self.counters: Counter[str] = Counter()

    # ---- coming and going ----------------------------------------------------------------------------------------

    def attach(self, now_s: float, request: api.AttachRequest) -> Step[str]:
        """Raises :class:`UnsupportedError` and :class:`StaleHolderError`."""
        refuse_unserved(request, self._tenants)
        holder_id = request.incarnation
        if self._holders.is_fenced(holder_id):
            raise StaleHolderError(
                f"worker incarnation {holder_id} was fenced and is never admitted again",
                next_step="restart the engine: a new process gets a new incarnation",
            )
        record = HolderRecord(
            holder_id,
            request.engine_kind,
            request.engine_version,
            request.host,
            request.pid,
            request.identity,
            access=request.access,
            exported_as=self._exported_as if request.access is api.Access.NVMEOF else "",
        )
        known = self._holders.get(holder_id)
        if known is None:
            step = self._transactions.begin(holder_id, (PutHolder(record),), Pending(admitted=[holder_id]))
            self._holders.add(Holder(record, last_seen_s=now_s, current=True, admission=step.ticket))
            return step
        is_doubted = known.condemned or not (known.is_local or known.current)
        if known.record != record or is_doubted:
            raise StaleHolderError(
                f"worker incarnation {holder_id} is attached already, as another process or with another identity, or "
                "is no longer trusted",
                next_step="attach as a new incarnation",
            )
        known.last_seen_s = now_s
        known.current = True
        return Step(holder_id, after=known.admission)

    def detach(self, holder_id: str) -> Step[None]:
        holder = self._holders.get(holder_id)
        if holder is None or self._holders.is_fenced(holder_id):
            return Step(None)
        assert holder.is_local, "what it promises, only its target can confirm"
        self.forget(holder_id)
        return self._transactions.begin(None, (DeleteHolder(holder_id),))

    def is_gone(self, holder_id: str) -> Step[None]:
        """Its fence; what it held is free once that is durable."""
        holder = self._holders.get(holder_id)
        if holder is None or holder.fencing:
            return Step(None)
        assert holder.is_local or holder.condemned, f"{holder_id} is gone and was never condemned"
        fenced = replace(holder.record, fenced=True)
        self._holders.fence(holder)
        return self._transactions.begin(None, (PutHolder(fenced),), Pending(fenced=[holder_id]))

    def forget(self, holder_id: str) -> None:
        """Its writes are all known to be over: give back everything it held."""
        self._leases.drop_holder(holder_id)
        self._curator.forget_holder(holder_id)
        for grant in self._grants.of_holder(holder_id):
            if grant.state is not GrantState.COMMITTING:
                self._grants.resolve(grant)
        self._holders.remove(holder_id)

    # ---- being there ---------------------------------------------------------------------------------------------

    def served(self, now_s: float, holder_id: str, epoch: int | None) -> Holder:
        """The holder that asks, in ``epoch`` where it names one; it was heard of. Raises :class:`StaleHolderError` when
        it may not ask."""
        holder = self._holders.get(holder_id)
        if holder is None or not self._holders.is_served(holder) or epoch not in (None, self._epoch):
            raise StaleHolderError(
                f"holder {holder_id!r} is not attached to this service in epoch {self._epoch}",
                next_step="attach again; grants and leases from before are void",
            )
        holder.last_seen_s = now_s
        return holder

    def heartbeat(self, now_s: float, request: api.HeartbeatRequest) -> api.HeartbeatReply:
        self.served(now_s, request.holder_id, request.epoch)
        return api.HeartbeatReply(self._leases.renew(now_s, request.holder_id, request.lease_ids))

    def may_reclaim(self, segment: int) -> bool:
        """Nothing is reclaimed until every holder of an earlier epoch has re-asserted itself or is fenced."""
        return self._holders.all_current()

    def statuses(self, now_s: float) -> tuple[api.HolderStatus, ...]:
        """For people."""
        return tuple(
            api.HolderStatus(
                holder_id=holder.record.holder_id,
                engine_kind=holder.record.engine_kind,
                engine_version=holder.record.engine_version,
                host=holder.record.host,
                pid=holder.record.pid,
                lease_count=self._leases.count_of(holder.record.holder_id),
                grant_count=self._grants.count_of(holder.record.holder_id),
                silent_s=now_s - holder.last_seen_s,
                state=self._holders.state(holder, now_s),
                access=holder.record.access.value,
            )
            for holder in self._holders
        )

    # ---- outcomes ------------------------------------------------------------------------------------------------

    def settled(self, ticket: int, pending: Pending) -> None:
        """The transaction of this ticket is on the medium."""
        for holder_id in pending.admitted:
            if (holder := self._holders.get(holder_id)) is not None and holder.admission == ticket:
                holder.admission = 0
        for holder_id in pending.fenced:
            self.forget(holder_id)
            self.counters["holders_fenced"] += 1

    def failed(self, ticket: int, pending: Pending) -> None:
        """It did not happen."""
        for holder_id in pending.admitted:
            if (holder := self._holders.get(holder_id)) is not None and holder.admission == ticket:
                self.forget(holder_id)
        for holder_id in pending.fenced:
            if (holder := self._holders.get(holder_id)) is not None:
                holder.fencing = False  # it stays refused, and is probed and fenced again
