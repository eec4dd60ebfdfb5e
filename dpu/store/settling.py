"""What follows when the fate of a transaction is known: its parts are settled, in the order that they need.

Nothing of a transaction counts before: that is what makes *visible* mean *complete* (rule 1). No I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from meshfusion.dpu.store.attending import Attending
from meshfusion.dpu.store.curator import Curator
from meshfusion.dpu.store.grants import GrantState, GrantTable
from meshfusion.dpu.store.placing import Placing
from meshfusion.dpu.store.save_health import SaveHealth
from meshfusion.dpu.store.segments import Segments
from meshfusion.dpu.store.steps import Pending, Transactions
from meshfusion.dpu.store.summarizing import Summarizing
from meshfusion.dpu.store.tidying import Tidying
from meshfusion.jbof.segments import SegmentRecord


class Settling:
    """Told of each ticket once, in their order."""

    def __init__(
        self,
        segments: Segments,
        grants: GrantTable,
        curator: Curator,
        health: SaveHealth,
        transactions: Transactions,
        *,
        attending: Attending,
        placing: Placing,
        summarizing: Summarizing,
        tidying: Tidying,
    ) -> None:
        self._segments = segments
        self._grants = grants
        self._curator = curator
        self._health = health
        self._transactions = transactions
        self._attending = attending
        self._placing = placing
        self._summarizing = summarizing
        self._tidying = tidying
        self.counters: Counter[str] = Counter()

    def durable(self, ticket: int) -> None:
        """The transaction of this ticket is on the medium."""
        pending = self._transactions.end(ticket)
        if pending.summarizing:
            self._summarizing.worked(pending.summarizing)
        else:
            self._health.worked(opened=len(pending.opened))
        self._curator.moved(self._tidying.settled(ticket, worked=True))
        if pending.given_up is not None:
            self._free(pending.given_up)
            self.counters["segments_given_up"] += 1
        for record in pending.opened:
            self._placing.opened(ticket, record)
            self._curator.emptied(record.segment)
        self._committed(pending)
        self._attending.settled(ticket, pending)

    def failed(self, now_s: float, ticket: int, reason: str) -> None:
        """It did not happen."""
        pending = self._transactions.end(ticket)
        self.counters["transactions_failed"] += 1
        if pending.summarizing:
            self._summarizing.failed(now_s, pending.summarizing)
            return
        self._health.failed(now_s, reason, opened=len(pending.opened))
        self._tidying.settled(ticket, worked=False)
        if pending.given_up is not None:
            self._free(pending.given_up)
        self._not_opened(pending.opened)
        for grant, _ in pending.committing:
            if grant.state is GrantState.COMMITTING:
                self._grants.resolve(grant)
        self._attending.failed(ticket, pending)

    def _committed(self, pending: Pending) -> None:
        for grant, chunk in pending.committing:
            self._grants.resolve(grant)
            self.counters["committed_chunks"] += 1
            payload_bytes = sum(shard.payload_bytes for shard in chunk.shards)
            self.counters["committed_bytes"] += payload_bytes
            self._tidying.saved(payload_bytes)
        if pending.committing:
            self._curator.stored(chunk for _, chunk in pending.committing)

    def _not_opened(self, records: Collection[SegmentRecord]) -> None:
        self._tidying.forget_openings(records)
        for record in records:
            for grant in self._grants:
                if any(e.segment == record.segment and e.generation == record.generation for e in grant.extents):
                    self._grants.resolve(grant)  # its extents never left: replies wait for the opening
            self._placing.failed(record)

    def _free(self, record: SegmentRecord) -> None:
        self._segments.given_up(record)
        self._curator.emptied(record.segment)
