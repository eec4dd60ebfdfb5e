"""Saves: places are granted for what nobody has stored, and what was written there is committed. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.attending import Attending
from meshfusion.dpu.store.checks import record_of, refuse_commit, refuse_item
from meshfusion.dpu.store.curator import Curator, Offer, Scarcity
from meshfusion.dpu.store.effects import PutChunk
from meshfusion.dpu.store.grants import Grant, GrantState, GrantTable
from meshfusion.dpu.store.placing import Placing
from meshfusion.dpu.store.save_gate import SaveGate
from meshfusion.dpu.store.segments import Segments, is_readable
from meshfusion.dpu.store.steps import Pending, Step, Transactions
from meshfusion.jbof.format import shard_lba_count

# What their holder says of them does not matter any more.
_SETTLED_ELSEWHERE = (GrantState.COMMITTING, GrantState.DOUBTFUL)


class Writing:
    """``room_worth``, to be set as it changes: see :class:`~meshfusion.dpu.store.curator.Scarcity`."""

    def __init__(
        self,
        segments: Segments,
        grants: GrantTable,
        curator: Curator,
        placing: Placing,
        attending: Attending,
        gate: SaveGate,
        transactions: Transactions,
    ) -> None:
        self._segments = segments
        self._grants = grants
        self._curator = curator
        self._placing = placing
        self._attending = attending
        self._gate = gate
        self._transactions = transactions
        self.room_worth = 0.0
        self.counters: Counter[str] = Counter()

    # ---- reserving -----------------------------------------------------------------------------------------------

    def reserve(
        self,
        now_s: float,
        request: api.ReserveRequest,
        stored: Mapping[bytes, api.ChunkRecord],
        drives: Collection[int] | None = None,
    ) -> Step[api.ReserveReply]:
        """``drives``: see :meth:`~meshfusion.dpu.store.placing.Placing.place`."""
        holder = self._attending.served(now_s, request.holder_id, request.epoch)
        for item in request.items:
            refuse_item(item, self._segments.geometry)
        pending = Pending()
        offers = [Offer(item, self._needless(item, stored) is None) for item in request.items]
        scarcity = Scarcity(self._segments.budget_level(now_s), self.room_worth)
        classes = self._curator.admit(now_s, request.holder_id, holder.record.identity, offers, scarcity)
        results: list[api.ReserveResult] = []
        for item, lifetime_class in zip(request.items, classes, strict=True):
            result = self._reserve_item(now_s, request.holder_id, item, stored, lifetime_class, pending, drives)
            results.append(result)
            self.counters[f"reserve_{result.outcome.value}"] += 1
        extents = [extent for result in results for extent in result.extents]
        return self._placing.step(now_s, api.ReserveReply(tuple(results)), pending, extents)

    def _needless(self, item: api.ReserveItem, stored: Mapping[bytes, api.ChunkRecord]) -> api.ReserveOutcome | None:
        """Why nobody else needs to write this chunk; None when somebody does."""
        existing = stored.get(item.key)
        if existing is not None and is_readable(self._segments, existing):
            return api.ReserveOutcome.EXISTS
        return api.ReserveOutcome.BUSY if self._grants.has_writer(item.key) else None

    def _reserve_item(
        self,
        now_s: float,
        holder_id: str,
        item: api.ReserveItem,
        stored: Mapping[bytes, api.ChunkRecord],
        lifetime_class: int | None,
        pending: Pending,
        drives: Collection[int] | None,
    ) -> api.ReserveResult:
        """``lifetime_class``: None when it is not worth a write."""
        needless = self._needless(item, stored)  # an item before it may have been of the same chunk
        if needless is not None:
            return api.ReserveResult(needless)
        if lifetime_class is None:
            return api.ReserveResult(api.ReserveOutcome.DECLINED)
        if self._gate.refuses(now_s):
            return api.ReserveResult(api.ReserveOutcome.NO_SPACE)
        lba_counts = [self._lba_count(shard) for shard in item.shards]
        extents = self._placing.place(now_s, lba_counts, pending.opened, self._attending.may_reclaim, drives)
        if extents is None:
            return api.ReserveResult(api.ReserveOutcome.NO_SPACE)
        grant = self._grants.add(now_s, holder_id, item, extents)
        return api.ReserveResult(api.ReserveOutcome.GRANTED, grant.grant_id, grant.extents)

    def _lba_count(self, shard: api.ShardSize) -> int:
        return shard_lba_count(shard.unit_bytes, shard.unit_count, self._segments.geometry.lba_bytes)

    # ---- committing and giving back ------------------------------------------------------------------------------

    def commit(self, now_s: float, request: api.CommitRequest) -> Step[api.CommitReply]:
        holder = self._attending.served(now_s, request.holder_id, request.epoch)
        for item in request.items:
            if (asked := self._grants.get(request.holder_id, item.grant_id)) is not None:
                refuse_commit(asked, item)
        taken: dict[str, Grant] = {}
        committed = [self._take_for_commit(now_s, request.holder_id, item, taken) for item in request.items]
        broken = {item.bundle for item, is_taken in zip(request.items, committed, strict=True) if not is_taken} - {0}
        pending = Pending()
        for i, item in enumerate(request.items):
            if not committed[i]:
                continue
            grant = taken[item.grant_id]
            if item.bundle in broken:
                self._grants.resolve(grant)  # written and flushed, so nothing of it is in flight: as if given back
                self.counters["commit_refused_bundle"] += 1
                committed[i] = False
                continue
            record = record_of(grant, item, holder.record, self._segments.geometry.lba_bytes)
            grant.state = GrantState.COMMITTING
            pending.committing.append((grant, record))
        reply = api.CommitReply(tuple(committed))
        if not pending.committing:
            return Step(reply)
        return self._transactions.begin(reply, tuple(PutChunk(record) for _, record in pending.committing), pending)

    def _take_for_commit(self, now_s: float, holder_id: str, item: api.CommitItem, taken: dict[str, Grant]) -> bool:
        """May the grant of this item be committed? If so it is added to ``taken``, where it must not be yet."""
        grant = self._grants.get(holder_id, item.grant_id)
        if grant is None or grant.state in _SETTLED_ELSEWHERE or grant.grant_id in taken:
            return False
        if grant.state is GrantState.EXPIRED or grant.expires_s <= now_s:
            self._grants.resolve(grant)  # the holder has answered: nothing of it is in flight
            self.counters["commit_refused_expired"] += 1
            return False
        taken[grant.grant_id] = grant
        return True

    def abort(self, request: api.AbortRequest) -> None:
        for grant_id in request.grant_ids:
            grant = self._grants.get(request.holder_id, grant_id)
            if grant is not None and grant.state not in _SETTLED_ELSEWHERE:
                self._grants.resolve(grant)
                self.counters["grants_aborted"] += 1
        for grant_id in request.doubtful_grant_ids:
            grant = self._grants.get(request.holder_id, grant_id)
            if grant is not None and grant.state not in _SETTLED_ELSEWHERE:
                self._grants.doubt(grant)
                self.counters["grants_in_doubt"] += 1
