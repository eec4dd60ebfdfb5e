"""The chunk store: index decisions, leases, grants, generations, holders, epochs. No I/O, no clock.

Every step takes the time and what was read from the index, changes the state, and returns a
:class:`~meshfusion.dpu.store.steps.Step`: a reply and the effects that must become durable, in one transaction,
*before* the reply leaves. The surroundings then call :meth:`Store.durable` (or :meth:`Store.failed`) with the step's
ticket, in ticket order.

The index that callers read from must show a chunk only once its transaction is durable; that is what makes *visible*
mean *complete* (rule 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.store.attending import Attending
from meshfusion.dpu.store.checks import PROBE_KIND
from meshfusion.dpu.store.curator import Curator, WritesEverything
from meshfusion.dpu.store.effects import DeleteChunk, HolderRecord, MoveChunk, OpenSegment
from meshfusion.dpu.store.grants import GrantTable
from meshfusion.dpu.store.holders import HolderTable
from meshfusion.dpu.store.leases import LeaseTable
from meshfusion.dpu.store.placing import Placing
from meshfusion.dpu.store.reading import Reading
from meshfusion.dpu.store.save_gate import SaveGate
from meshfusion.dpu.store.save_health import SaveHealth
from meshfusion.dpu.store.segments import Segments, is_readable
from meshfusion.dpu.store.settling import Settling
from meshfusion.dpu.store.steps import Pending, Step, Transactions
from meshfusion.dpu.store.summarizing import Summarizing
from meshfusion.dpu.store.tidying import Move, Tidying
from meshfusion.dpu.store.writing import Writing
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentRecord


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``lease_ttl_s``/``grant_ttl_s``: without renewal; ``holder_silence_s``: then its liveness lock is probed;
    ``max_pinned_fraction``: of the segments, by leases; ``quarantine_max_fraction``: of the segments, above it saves
    stop; ``free_fraction``: of each drive's segments are kept free ahead of need."""

    lease_ttl_s: float = 30.0
    grant_ttl_s: float = 60.0
    holder_silence_s: float = 15.0
    max_pinned_fraction: float = 0.5
    quarantine_max_fraction: float = 0.25
    free_fraction: float = 0.05


class Store:
    """State of one pool under one owner epoch. The one entry to the parts that it is made of."""

    def __init__(
        self,
        segments: Segments,
        options: StoreOptions,
        *,
        epoch: int,
        former_holders: Iterable[HolderRecord] = (),
        exported_as: str = "",
        curator: Curator | None = None,
        tenants: Collection[str] = (DEFAULT_TENANT,),
        now_s: float,
    ) -> None:
        """``tenants``: whose engines may attach."""
        self.segments = segments
        self.options = options
        self.epoch = epoch
        self.counters: Counter[str] = Counter()
        self.leases = LeaseTable(segments, epoch=epoch, ttl_s=options.lease_ttl_s)
        self.grants = GrantTable(segments, epoch=epoch, ttl_s=options.grant_ttl_s)
        self.holders = HolderTable(former_holders, silence_s=options.holder_silence_s, now_s=now_s)
        self.saves = SaveHealth()
        self._curator = curator = curator or WritesEverything()
        self._transactions = Transactions()
        self._gate = SaveGate(
            segments, self.grants, self.saves, quarantine_max_fraction=options.quarantine_max_fraction
        )
        self._tidying = Tidying(segments)
        self._placing = Placing(segments, self._transactions)
        self._summarizing = Summarizing(segments, self._transactions, now_s=now_s)
        self._attending = Attending(
            self.holders,
            self.leases,
            self.grants,
            curator,
            self._transactions,
            epoch=epoch,
            exported_as=exported_as,
            tenants=tenants,
        )
        self._reading = Reading(
            segments, self.leases, curator, self._attending, max_pinned_fraction=options.max_pinned_fraction
        )
        self._writing = Writing(
            segments, self.grants, curator, self._placing, self._attending, self._gate, self._transactions
        )
        self._settling = Settling(
            segments,
            self.grants,
            curator,
            self.saves,
            self._transactions,
            attending=self._attending,
            placing=self._placing,
            summarizing=self._summarizing,
            tidying=self._tidying,
        )

    @property
    def counts(self) -> Counter[str]:
        """All of them, of its parts too."""
        parts = (
            self._attending,
            self._reading,
            self._writing,
            self._placing,
            self._tidying,
            self._summarizing,
            self._settling,
            self._curator,
        )
        return sum((part.counters for part in parts), self.counters)

    # ---- holders -------------------------------------------------------------------------------------------------

    def attach(self, now_s: float, request: api.AttachRequest) -> Step[str]:
        """Admit a worker incarnation; the reply is its holder id. Attaching again is idempotent.

        A holder of an earlier epoch that attaches promises that no write from that epoch is outstanding. From a host of
        a target that is not enough: what it sent before, the target may still be at.
        """
        return self._attending.attach(now_s, request)

    def detach(self, now_s: float, request: api.DetachRequest) -> Step[None]:
        """A holder with local access leaves: nobody holds its liveness lock, so no write of it is outstanding."""
        return self._attending.detach(request.holder_id)

    def heartbeat(self, now_s: float, request: api.HeartbeatRequest) -> api.HeartbeatReply:
        return self._attending.heartbeat(now_s, request)

    def holder_is_gone(self, now_s: float, holder_id: str) -> Step[None]:
        """It is known that no write of this holder is in flight, and that it can begin none.

        With local access: its liveness lock was taken from it, so no process of it exists. Else: it was condemned, and
        then its target has confirmed that its access is gone and its queue pairs are drained (rule 3).
        """
        return self._attending.is_gone(holder_id)

    def holder_statuses(self, now_s: float) -> tuple[api.HolderStatus, ...]:
        """For people."""
        return self._attending.statuses(now_s)

    # ---- reading -------------------------------------------------------------------------------------------------

    def match(self, now_s: float, request: api.MatchRequest, found: Mapping[bytes, api.ChunkRecord]) -> api.MatchReply:
        """The longest boundary at which all groups can resume, leased: all that they need there, or nothing (rule 1).

        ``found``: what the index holds for the request's keys. Where the longest would pin more than leases may, it is
        the longest that does not.
        """
        return self._reading.match(now_s, request, found)

    def release(self, now_s: float, request: api.ReleaseRequest) -> None:
        released = sum(self.leases.release(request.holder_id, lease_id) for lease_id in request.lease_ids)
        holder = self.holders.get(request.holder_id)
        if holder is not None and holder.record.engine_kind != PROBE_KIND:
            self.counters["leases_released"] += released

    def is_readable(self, record: api.ChunkRecord) -> bool:
        """Does every shard still lie where the record says, under the same generation?"""
        return is_readable(self.segments, record)

    def drop(self, now_s: float, request: api.DropRequest, found: api.ChunkRecord | None) -> Step[bool]:
        """Forget a chunk whose bytes did not match, unless it has been written anew since."""
        self.counters["dropped_reports"] += 1
        if found is None or not self.is_readable(found) or all(s.extent != request.extent for s in found.shards):
            return Step(False)
        self.counters["dropped_chunks"] += 1
        self._curator.dropped(found)
        return self._transactions.begin(True, (DeleteChunk(request.key, request.extent),))

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(
        self,
        now_s: float,
        request: api.ReserveRequest,
        stored: Mapping[bytes, api.ChunkRecord],
        drives: Collection[int] | None = None,
    ) -> Step[api.ReserveReply]:
        """Extents for the items nobody has stored or is writing. ``stored``: index entries of the items' keys.
        ``drives``: those that the holder reaches, and gets places on; None: all."""
        return self._writing.reserve(now_s, request, stored, drives)

    def commit(self, now_s: float, request: api.CommitRequest) -> Step[api.CommitReply]:
        """Data and flush are done; make the chunks visible. Refused once expiry began (rule 3), and with one item all
        others of its bundle (rule 1)."""
        return self._writing.commit(now_s, request)

    def abort(self, now_s: float, request: api.AbortRequest) -> None:
        """The holder gives grants back and promises that no write under them is outstanding.

        What it calls doubtful stays quarantined. The surroundings call it too, for the grants of a reserve whose reply
        never left.
        """
        self._writing.abort(request)

    def saves_go_elsewhere(self) -> None:
        """What made saves stop was one drive, and others take them."""
        self.saves.go_elsewhere()

    def saves_stopped_reason(self, now_s: float) -> str:
        """For people, with since when and what to do; "" while saves work."""
        return self._gate.reason(now_s)

    def quarantined_segment_count(self) -> int:
        return self.grants.quarantined_segment_count

    # ---- drives --------------------------------------------------------------------------------------------------

    def drive_is_gone(self, number: int) -> None:
        """What is granted on it is not committed any more, and what moves there has not moved: whether what was written
        is on the drive that comes back, nobody knows (rule 1). Its holders answer, and then its space is free again."""

        def is_lost(segment: int) -> bool:
            return drive_of_segment(segment) == number

        self.counters["grants_lost_with_drives"] += self.grants.expire_in(is_lost)
        self._tidying.lose(is_lost)

    def drive_has_left(self, number: int) -> None:
        """For good: its segments are nobody's any more."""
        self._curator.left(lambda segment: drive_of_segment(segment) == number)

    def forget(self, segment: int, chunks: Collection[api.ChunkRecord]) -> Step[None]:
        """Of a drive that is being emptied, the chunks with a shard in this segment, in which nobody writes."""
        assert not self.segments.pins(segment)[1], f"segment {segment} forgotten under a writer"
        places = {
            chunk.key: shard.extent for chunk in chunks for shard in chunk.shards if shard.extent.segment == segment
        }
        effects = tuple(DeleteChunk(key, extent) for key, extent in places.items())
        for chunk in chunks:
            self._curator.dropped(chunk)
        self.counters["chunks_drained"] += len(effects)
        return self._transactions.begin(None, effects) if effects else Step(None)

    # ---- giving segments up --------------------------------------------------------------------------------------

    def begin_tidying(self, now_s: float) -> SegmentRecord | None:
        """The segment to make ready, if one is needed. What follows: :mod:`~meshfusion.dpu.store.tidying`."""
        if self._tidying.segment is not None or self._gate.refuses(now_s):
            return None
        record = self.segments.to_tidy(self.options.free_fraction, self._attending.may_reclaim)
        if record is not None:
            self._tidying.begin(record)
        return record

    def plan_moves(self, now_s: float, chunks: Sequence[api.ChunkRecord]) -> Step[tuple[Move, ...]]:
        """``chunks``: what the index has in the segment. Where those go that are worth it."""
        pending = Pending()

        def place(lba_counts: Sequence[int]) -> tuple[api.Extent, ...] | None:
            return self._placing.place(now_s, lba_counts, pending.opened, _never)

        readable = [chunk for chunk in chunks if self.is_readable(chunk)]
        kept = self._curator.worth_keeping(now_s, readable, self._tidying.allowed_bytes)
        moves = self._tidying.plan(kept, place)
        extents = [shard.extent for move in moves for shard in move.after.shards]
        return self._placing.step(now_s, moves, pending, extents)

    def moved(self, keys: Collection[bytes]) -> Step[None]:
        """Of the planned moves, those of these chunks are written and flushed (rule 1); the others failed, and nothing
        of them is in flight."""
        moves = self._tidying.moved(self._transactions.next_ticket, keys)
        effects = tuple(MoveChunk(move.before, move.after) for move in moves)
        return self._transactions.begin(None, effects) if effects else Step(None)

    def leave_as_is(self) -> None:
        """Something failed while the segment was made ready: it stays what it was."""
        self._tidying.end()

    def give_up(self) -> Step[None]:
        """The segment that was made ready; unless somebody reads it, which is left in peace."""
        record = self._tidying.end()
        if not self.segments.may_give_up(record):
            return Step(None)
        given_up = self.segments.give_up(record.segment)
        return self._transactions.begin(None, (OpenSegment(given_up),), Pending(given_up=given_up))

    def own_pins(self) -> Counter[int]:
        """Of writers, by segment, that are not grants'."""
        return self._tidying.pins()

    # ---- changes while it is served ------------------------------------------------------------------------------

    def retune(self, *, max_pinned_fraction: float, quarantine_max_fraction: float, free_fraction: float) -> None:
        """As in :class:`StoreOptions`, from now on."""
        self.options = replace(
            self.options,
            max_pinned_fraction=max_pinned_fraction,
            quarantine_max_fraction=quarantine_max_fraction,
            free_fraction=free_fraction,
        )
        self._reading.retune(max_pinned_fraction=max_pinned_fraction)
        self._gate.retune(quarantine_max_fraction=quarantine_max_fraction)

    # ---- time and outcomes ---------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Let leases lapse and grants expire, and condemn holders of a target that have been silent for too long."""
        self.counters["leases_lapsed"] += self.leases.expire(now_s)
        self.counters["grants_expired"] += self.grants.expire(now_s)
        self.counters["holders_condemned"] += self.holders.condemn_silent(now_s)

    def tend(self, now_s: float) -> bool:
        """Learn from lookups and value some segments anew; a bounded piece of work, to be called now and then, and at
        once again where it returns True."""
        has_more = self._curator.tend(now_s, self._tidying.allowed_bytes)
        is_scarce = self.segments.is_scarce(self.options.free_fraction)
        self._writing.room_worth = self._curator.least_worth() if is_scarce else 0.0
        return has_more

    def adopt(self, now_s: float, record: SegmentRecord, chunks: Iterable[api.ChunkRecord]) -> None:
        """These chunks lie in this segment since an earlier life of the service; to be told once."""
        if self.segments.is_readable(record.segment, record.generation):
            self._curator.adopted(now_s, record.segment, chunks)

    def summarize(self, now_s: float) -> Step[None]:
        """Write the summaries that are due, a few at once. To be called now and then."""
        return self._summarizing.step(now_s)

    def durable(self, ticket: int) -> None:
        """The transaction of this ticket is on the medium."""
        self._settling.durable(ticket)

    def failed(self, now_s: float, ticket: int, reason: str) -> None:
        """The transaction of this ticket did not happen. Saves stop for a while, unless it was of summaries; hits go
        on. ``reason``: for people, with what to do."""
        self._settling.failed(now_s, ticket, reason)


def _never(_: int) -> bool:
    return False
