"""The chunk store: index decisions, leases, grants, generations, holders, epochs. No I/O, no clock.

Every step takes the time and what was read from the index, changes the state, and returns a :class:`Step`: a reply and
the effects that must become durable, in one transaction, *before* the reply leaves. The surroundings then call
:meth:`Store.durable` (or :meth:`Store.failed`) with the step's ticket, in ticket order.

The index that callers read from must show a chunk only once its transaction is durable; that is what makes *visible*
mean *complete* (rule 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import check_groups
from meshfusion.dpu.store.boundary import longest_boundary
from meshfusion.dpu.store.checks import SERVED_TENANT, record_of, refuse_commit, refuse_item, refuse_unserved
from meshfusion.dpu.store.curator import Curator, Offer, Scarcity, WritesEverything
from meshfusion.dpu.store.effects import (
    DeleteChunk,
    DeleteHolder,
    Effect,
    HolderRecord,
    MoveChunk,
    OpenSegment,
    PutChunk,
    PutHolder,
    SummarizeSegment,
)
from meshfusion.dpu.store.grants import Grant, GrantState, GrantTable
from meshfusion.dpu.store.holders import Holder, HolderTable
from meshfusion.dpu.store.leases import LeaseTable
from meshfusion.dpu.store.placing import Placing
from meshfusion.dpu.store.save_health import SAVE_RETRY_S, SaveHealth
from meshfusion.dpu.store.segments import Segments
from meshfusion.dpu.store.tidying import Move, Tidying
from meshfusion.jbof.errors import StaleHolderError
from meshfusion.jbof.format import shard_lba_count
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentRecord

Reply = TypeVar("Reply", covariant=True)
AnyReply = TypeVar("AnyReply")

SUMMARIES_AT_ONCE = 16  # what waits behind them is held up no longer than that takes
# What their holder says of them does not matter any more.
_SETTLED_ELSEWHERE = (GrantState.COMMITTING, GrantState.DOUBTFUL)


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


@dataclass(frozen=True, slots=True)
class Step(Generic[Reply]):
    """A reply, and the effects that must be durable before it leaves.

    ``ticket``: name it to ``durable``/``failed`` when it has effects. ``after``: a ticket of an earlier step that must
    be durable too before this reply may leave.
    """

    reply: Reply
    effects: tuple[Effect, ...] = ()
    ticket: int = 0
    after: int = 0


@dataclass(slots=True)
class _Pending:
    opened: list[SegmentRecord] = field(default_factory=list)
    committing: list[tuple[Grant, api.ChunkRecord]] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)
    summarizing: tuple[SegmentRecord, ...] = ()
    given_up: SegmentRecord | None = None


class Store:
    """State of one pool under one owner epoch."""

    def __init__(
        self,
        segments: Segments,
        options: StoreOptions,
        *,
        epoch: int,
        former_holders: Iterable[HolderRecord] = (),
        exported_as: str = "",
        curator: Curator | None = None,
        now_s: float,
    ) -> None:
        self.segments = segments
        self._curator = curator or WritesEverything()
        self.options = options
        self.epoch = epoch
        self._exported_as = exported_as
        self.leases = LeaseTable(segments, epoch=epoch, ttl_s=options.lease_ttl_s)
        self.grants = GrantTable(segments, epoch=epoch, ttl_s=options.grant_ttl_s)
        self.counters: Counter[str] = Counter()
        self.saves = SaveHealth()
        self._summaries_from_s = now_s
        self.holders = HolderTable(former_holders, silence_s=options.holder_silence_s, now_s=now_s)
        self._tidying = Tidying(segments)
        self._room_worth = 0.0
        self._pending: dict[int, _Pending] = {}
        self._placing = Placing(segments)
        self._ticket = 0

    @property
    def counts(self) -> Counter[str]:
        """All of them, of its parts too."""
        return self.counters + self._placing.counters + self._tidying.counters + self._curator.counters

    # ---- holders -------------------------------------------------------------------------------------------------

    def attach(self, now_s: float, request: api.AttachRequest) -> Step[str]:
        """Admit a worker incarnation; the reply is its holder id. Attaching again is idempotent.

        A holder of an earlier epoch that attaches promises that no write from that epoch is outstanding. From a host of
        a target that is not enough: what it sent before, the target may still be at.
        """
        refuse_unserved(request)
        holder_id = request.incarnation
        if self.holders.is_fenced(holder_id):
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
        known = self.holders.get(holder_id)
        if known is None:
            step = self._step(holder_id, (PutHolder(record),), _Pending(admitted=[holder_id]))
            self.holders.add(Holder(record, last_seen_s=now_s, current=True, admission=step.ticket))
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

    def detach(self, now_s: float, request: api.DetachRequest) -> Step[None]:
        """A holder with local access leaves: nobody holds its liveness lock, so no write of it is outstanding."""
        holder = self.holders.get(request.holder_id)
        if holder is None or self.holders.is_fenced(request.holder_id):
            return Step(None)
        assert holder.is_local, "what it promises, only its target can confirm"
        self._forget_holder(request.holder_id)
        return self._step(None, (DeleteHolder(request.holder_id),), _Pending())

    def heartbeat(self, now_s: float, request: api.HeartbeatRequest) -> api.HeartbeatReply:
        self._holder(now_s, request.holder_id, request.epoch)
        return api.HeartbeatReply(self.leases.renew(now_s, request.holder_id, request.lease_ids))

    def holder_is_gone(self, now_s: float, holder_id: str) -> Step[None]:
        """It is known that no write of this holder is in flight, and that it can begin none.

        With local access: its liveness lock was taken from it, so no process of it exists. Else: it was condemned, and
        then its target has confirmed that its access is gone and its queue pairs are drained (rule 3).
        """
        holder = self.holders.get(holder_id)
        if holder is None or holder.fencing:
            return Step(None)
        assert holder.is_local or holder.condemned, f"{holder_id} is gone and was never condemned"
        fenced = replace(holder.record, fenced=True)
        self.holders.fence(holder)
        return self._step(None, (PutHolder(fenced),), _Pending(fenced=[holder_id]))

    # ---- reading -------------------------------------------------------------------------------------------------

    def match(self, now_s: float, request: api.MatchRequest, found: Mapping[bytes, api.ChunkRecord]) -> api.MatchReply:
        """The longest boundary at which all groups can resume, leased: all that they need there, or nothing (rule 1).

        ``found``: what the index holds for the request's keys. Where the longest would pin more than leases may, it is
        the longest that does not.
        """
        check_groups(request.groups)
        holder = self._holder(now_s, request.holder_id, None)

        def find(group: api.GroupKeys, i: int) -> api.ChunkRecord | None:
            record = found.get(group.keys[i])
            return record if record is not None and self._is_servable(record, group, i, holder, request) else None

        pinned_max = int(self.options.max_pinned_fraction * self.segments.geometry.segment_count)
        boundary = longest_boundary(request.groups, find, self.segments, pinned_max)
        self.counters["match_requests"] += 1
        self.counters["match_keys"] += sum(len(group.keys) - group.keys.count(b"") for group in request.groups)
        self.counters["match_shortened_by_pins"] += boundary.is_shortened
        self._curator.asked(now_s, request.holder_id, holder.record.identity, request, boundary.chunk_count)
        if not boundary.chunk_count:
            return api.MatchReply("", 0, ())
        for segment in boundary.segments:
            self.segments.used(segment, now_s)
        self._curator.used(boundary.segments)
        lease = self.leases.grant(now_s, request.holder_id, request.request_id, boundary.segments)
        self.counters["matched_chunks"] += len(boundary.chunks)
        return api.MatchReply(lease.lease_id, boundary.chunk_count, boundary.chunks)

    def release(self, now_s: float, request: api.ReleaseRequest) -> None:
        for lease_id in request.lease_ids:
            self.leases.release(request.holder_id, lease_id)

    def is_readable(self, record: api.ChunkRecord) -> bool:
        """Does every shard still lie where the record says, under the same generation?"""
        return all(self.segments.is_readable(s.extent.segment, s.extent.generation) for s in record.shards)

    def drop(self, now_s: float, request: api.DropRequest, found: api.ChunkRecord | None) -> Step[bool]:
        """Forget a chunk whose bytes did not match, unless it has been written anew since."""
        self.counters["dropped_reports"] += 1
        if found is None or not self.is_readable(found) or all(s.extent != request.extent for s in found.shards):
            return Step(False)
        self.counters["dropped_chunks"] += 1
        self._curator.dropped(found)
        return self._step(True, (DeleteChunk(request.key, request.extent),), _Pending())

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(
        self, now_s: float, request: api.ReserveRequest, stored: Mapping[bytes, api.ChunkRecord]
    ) -> Step[api.ReserveReply]:
        """Extents for the items nobody has stored or is writing. ``stored``: index entries of the items' keys."""
        holder = self._holder(now_s, request.holder_id, request.epoch)
        for item in request.items:
            refuse_item(item, self.segments.geometry)
        pending = _Pending()
        after = 0
        offers = [Offer(item, self._needless(item, stored) is None) for item in request.items]
        scarcity = Scarcity(self.segments.budget_level(now_s), self._room_worth)
        classes = self._curator.admit(now_s, request.holder_id, holder.record.identity, offers, scarcity)
        results: list[api.ReserveResult] = []
        for item, lifetime_class in zip(request.items, classes, strict=True):
            result = self._reserve_item(now_s, request.holder_id, item, stored, lifetime_class, pending)
            results.append(result)
            self.counters[f"reserve_{result.outcome.value}"] += 1
            after = max(after, self._placing.ticket_of(result.extents))
        return self._opening_step(now_s, api.ReserveReply(tuple(results)), pending, after)

    def commit(self, now_s: float, request: api.CommitRequest) -> Step[api.CommitReply]:
        """Data and flush are done; make the chunks visible. Refused once expiry began (rule 3), and with one item all
        others of its bundle (rule 1)."""
        holder = self._holder(now_s, request.holder_id, request.epoch)
        for item in request.items:
            if (asked := self.grants.get(request.holder_id, item.grant_id)) is not None:
                refuse_commit(asked, item)
        taken: dict[str, Grant] = {}
        committed = [self._take_for_commit(now_s, request.holder_id, item, taken) for item in request.items]
        broken = {item.bundle for item, is_taken in zip(request.items, committed, strict=True) if not is_taken} - {0}
        pending = _Pending()
        for i, item in enumerate(request.items):
            if not committed[i]:
                continue
            grant = taken[item.grant_id]
            if item.bundle in broken:
                self.grants.resolve(grant)  # written and flushed, so nothing of it is in flight: as if given back
                self.counters["commit_refused_bundle"] += 1
                committed[i] = False
                continue
            record = record_of(grant, item, holder.record, self.segments.geometry.lba_bytes)
            grant.state = GrantState.COMMITTING
            pending.committing.append((grant, record))
        reply = api.CommitReply(tuple(committed))
        if not pending.committing:
            return Step(reply)
        return self._step(reply, tuple(PutChunk(record) for _, record in pending.committing), pending)

    def abort(self, now_s: float, request: api.AbortRequest) -> None:
        """The holder gives grants back and promises that no write under them is outstanding.

        What it calls doubtful stays quarantined. The surroundings call it too, for the grants of a reserve whose reply
        never left.
        """
        for grant_id in request.grant_ids:
            grant = self.grants.get(request.holder_id, grant_id)
            if grant is not None and grant.state not in _SETTLED_ELSEWHERE:
                self.grants.resolve(grant)
                self.counters["grants_aborted"] += 1
        for grant_id in request.doubtful_grant_ids:
            grant = self.grants.get(request.holder_id, grant_id)
            if grant is not None and grant.state not in _SETTLED_ELSEWHERE:
                self.grants.doubt(grant)
                self.counters["grants_in_doubt"] += 1

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
        return self._step(None, effects, _Pending()) if effects else Step(None)

    def saves_go_elsewhere(self) -> None:
        """What made saves stop was one drive, and others take them."""
        self.saves.go_elsewhere()

    # ---- giving segments up --------------------------------------------------------------------------------------

    def begin_tidying(self, now_s: float) -> SegmentRecord | None:
        """The segment to make ready, if one is needed. What follows: :mod:`~meshfusion.dpu.store.tidying`."""
        if self._tidying.segment is not None or self.saves.refuses(now_s) or self._quarantine_full():
            return None
        record = self.segments.to_tidy(self.options.free_fraction, self._may_reclaim)
        if record is not None:
            self._tidying.begin(record)
        return record

    def plan_moves(self, now_s: float, chunks: Sequence[api.ChunkRecord]) -> Step[tuple[Move, ...]]:
        """``chunks``: what the index has in the segment. Where those go that are worth it."""
        pending = _Pending()

        def place(lba_counts: Sequence[int]) -> tuple[api.Extent, ...] | None:
            return self._placing.place(now_s, lba_counts, pending.opened, _never)

        readable = [chunk for chunk in chunks if self.is_readable(chunk)]
        kept = self._curator.worth_keeping(now_s, readable, self._tidying.allowed_bytes)
        moves = self._tidying.plan(kept, place)
        after = self._placing.ticket_of(shard.extent for move in moves for shard in move.after.shards)
        return self._opening_step(now_s, moves, pending, after)

    def moved(self, keys: Collection[bytes]) -> Step[None]:
        """Of the planned moves, those of these chunks are written and flushed (rule 1); the others failed, and nothing
        of them is in flight."""
        moves = self._tidying.moved(self._ticket + 1, keys)
        effects = tuple(MoveChunk(move.before, move.after) for move in moves)
        return self._step(None, effects, _Pending()) if effects else Step(None)

    def leave_as_is(self) -> None:
        """Something failed while the segment was made ready: it stays what it was."""
        self._tidying.end()

    def give_up(self) -> Step[None]:
        """The segment that was made ready; unless somebody reads it, which is left in peace."""
        record = self._tidying.end()
        if not self.segments.may_give_up(record):
            return Step(None)
        given_up = self.segments.give_up(record.segment)
        return self._step(None, (OpenSegment(given_up),), _Pending(given_up=given_up))

    def own_pins(self) -> Counter[int]:
        """Of writers, by segment, that are not grants'."""
        return self._tidying.pins()

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
        self._room_worth = self._curator.least_worth() if is_scarce else 0.0
        return has_more

    def adopt(self, now_s: float, record: SegmentRecord, chunks: Iterable[api.ChunkRecord]) -> None:
        """These chunks lie in this segment since an earlier life of the service; to be told once."""
        if self.segments.is_readable(record.segment, record.generation):
            self._curator.adopted(now_s, record.segment, chunks)

    def summarize(self, now_s: float) -> Step[None]:
        """Write the summaries that are due, a few at once. To be called now and then."""
        due = self.segments.settled()[:SUMMARIES_AT_ONCE]
        if not due or now_s < self._summaries_from_s:
            return Step(None)
        for record in due:
            self.segments.summarizing(record)
        return self._step(None, tuple(SummarizeSegment(record) for record in due), _Pending(summarizing=due))

    def durable(self, ticket: int) -> None:
        """The transaction of this ticket is on the medium."""
        pending = self._pending.pop(ticket)
        for record in pending.summarizing:
            self.segments.summarized(record, worked=True)
            self.counters["segments_summarized"] += 1
        if not pending.summarizing:
            self.saves.worked(opened=len(pending.opened))
        self._curator.moved(self._tidying.settled(ticket, worked=True))
        if pending.given_up is not None:
            self.segments.given_up(pending.given_up)
            self._curator.emptied(pending.given_up.segment)
            self.counters["segments_given_up"] += 1
        for record in pending.opened:
            self._placing.opened(ticket, record)
            self._curator.emptied(record.segment)
        for grant, chunk in pending.committing:
            self.grants.resolve(grant)
            self.counters["committed_chunks"] += 1
            payload_bytes = sum(shard.payload_bytes for shard in chunk.shards)
            self.counters["committed_bytes"] += payload_bytes
            self._tidying.saved(payload_bytes)
        if pending.committing:
            self._curator.stored(chunk for _, chunk in pending.committing)
        for holder_id in pending.admitted:
            if (holder := self.holders.get(holder_id)) is not None and holder.admission == ticket:
                holder.admission = 0
        for holder_id in pending.fenced:
            self._forget_holder(holder_id)
            self.counters["holders_fenced"] += 1

    def failed(self, now_s: float, ticket: int, reason: str) -> None:
        """The transaction of this ticket did not happen. Saves stop for a while; hits go on. ``reason``: for people,
        with what to do.

        A summary that is not there costs a longer rebuild and nothing else: it is tried again later.
        """
        pending = self._pending.pop(ticket)
        self.counters["transactions_failed"] += 1
        if pending.summarizing:
            self._summaries_from_s = now_s + SAVE_RETRY_S
            for record in pending.summarizing:
                self.segments.summarized(record, worked=False)
            return
        self.saves.failed(now_s, reason, opened=len(pending.opened))
        self._tidying.settled(ticket, worked=False)
        if pending.given_up is not None:
            self.segments.given_up(pending.given_up)
            self._curator.emptied(pending.given_up.segment)
        self._tidying.forget_openings(pending.opened)
        for record in pending.opened:
            for grant in self.grants:
                if any(e.segment == record.segment and e.generation == record.generation for e in grant.extents):
                    self.grants.resolve(grant)  # its extents never left: replies wait for the opening
            self._placing.failed(record)
        for grant, _ in pending.committing:
            if grant.state is GrantState.COMMITTING:
                self.grants.resolve(grant)
        for holder_id in pending.admitted:
            if (holder := self.holders.get(holder_id)) is not None and holder.admission == ticket:
                self._forget_holder(holder_id)
        for holder_id in pending.fenced:
            if (holder := self.holders.get(holder_id)) is not None:
                holder.fencing = False  # it stays refused, and is probed and fenced again

    def saves_stopped_reason(self, now_s: float) -> str:
        """For people, with since when and what to do; "" while saves work."""
        if reason := self.saves.reason(now_s):
            return reason
        if self._quarantine_full():
            count = self.quarantined_segment_count()
            return f"{count} segments are quarantined: their writers are silent, not fenced; end these engines"
        wait_s = self.segments.opening_wait_s(now_s)
        if math.isinf(wait_s):
            return "no drive of the pool takes writes: mfctl jbof drives says why"
        if wait_s:
            return (
                "the drives' writes for now are spent (medium.drive_writes_per_day): when what is open is full, the "
                f"next segment is opened in {math.ceil(wait_s / 60)} min"
            )
        return ""

    def quarantined_segment_count(self) -> int:
        return self.grants.quarantined_segment_count

    def holder_statuses(self, now_s: float) -> tuple[api.HolderStatus, ...]:
        return tuple(
            api.HolderStatus(
                holder_id=holder.record.holder_id,
                engine_kind=holder.record.engine_kind,
                engine_version=holder.record.engine_version,
                host=holder.record.host,
                pid=holder.record.pid,
                lease_count=self.leases.count_of(holder.record.holder_id),
                grant_count=self.grants.count_of(holder.record.holder_id),
                silent_s=now_s - holder.last_seen_s,
                state=self.holders.state(holder, now_s),
                access=holder.record.access.value,
            )
            for holder in self.holders
        )

    # ---- inside --------------------------------------------------------------------------------------------------

    def _step(self, reply: AnyReply, effects: tuple[Effect, ...], pending: _Pending, after: int = 0) -> Step[AnyReply]:
        self._ticket += 1
        self._pending[self._ticket] = pending
        return Step(reply, effects, self._ticket, after)

    def _opening_step(self, now_s: float, reply: AnyReply, pending: _Pending, after: int) -> Step[AnyReply]:
        """The reply leaves when the openings that it stands on are durable: its own, and that of ticket ``after``."""
        if not pending.opened:
            return Step(reply, after=after)
        step = self._step(reply, self._placing.effects_of(now_s, pending.opened), pending, after=after)
        self._placing.begin(step.ticket, pending.opened)
        return step

    def _holder(self, now_s: float, holder_id: str, epoch: int | None) -> Holder:
        holder = self.holders.get(holder_id)
        if holder is None or not self.holders.is_served(holder) or epoch not in (None, self.epoch):
            raise StaleHolderError(
                f"holder {holder_id!r} is not attached to this service in epoch {self.epoch}",
                next_step="attach again; grants and leases from before are void",
            )
        holder.last_seen_s = now_s
        return holder

    def _forget_holder(self, holder_id: str) -> None:
        """Its writes are all known to be over: give back everything it held."""
        self.leases.drop_holder(holder_id)
        self._curator.forget_holder(holder_id)
        for grant in self.grants.of_holder(holder_id):
            if grant.state is not GrantState.COMMITTING:
                self.grants.resolve(grant)
        self.holders.remove(holder_id)

    def _take_for_commit(self, now_s: float, holder_id: str, item: api.CommitItem, taken: dict[str, Grant]) -> bool:
        """May the grant of this item be committed? If so it is added to ``taken``, where it must not be yet."""
        grant = self.grants.get(holder_id, item.grant_id)
        if grant is None or grant.state in _SETTLED_ELSEWHERE or grant.grant_id in taken:
            return False
        if grant.state is GrantState.EXPIRED or grant.expires_s <= now_s:
            self.grants.resolve(grant)  # the holder has answered: nothing of it is in flight
            self.counters["commit_refused_expired"] += 1
            return False
        taken[grant.grant_id] = grant
        return True

    def _is_servable(
        self, record: api.ChunkRecord, group: api.GroupKeys, i: int, holder: Holder, request: api.MatchRequest
    ) -> bool:
        servable = (
            record.key == group.keys[i]
            and record.identity == holder.record.identity
            and record.tenant == SERVED_TENANT
            and record.group == group.group
            and record.position_tokens == i * request.chunk_tokens
            and record.token_count == request.chunk_tokens
        )
        if not servable:
            self.counters["match_refused_mismatch"] += 1
            return False
        return self.is_readable(record)

    def _needless(self, item: api.ReserveItem, stored: Mapping[bytes, api.ChunkRecord]) -> api.ReserveOutcome | None:
        """Why nobody else needs to write this chunk; None when somebody does."""
        existing = stored.get(item.key)
        if existing is not None and self.is_readable(existing):
            return api.ReserveOutcome.EXISTS
        return api.ReserveOutcome.BUSY if self.grants.has_writer(item.key) else None

    def _reserve_item(
        self,
        now_s: float,
        holder_id: str,
        item: api.ReserveItem,
        stored: Mapping[bytes, api.ChunkRecord],
        lifetime_class: int | None,
        pending: _Pending,
    ) -> api.ReserveResult:
        """``lifetime_class``: None when it is not worth a write."""
        needless = self._needless(item, stored)  # an item before it may have been of the same chunk
        if needless is not None:
            return api.ReserveResult(needless)
        if lifetime_class is None:
            return api.ReserveResult(api.ReserveOutcome.DECLINED)
        if self.saves.refuses(now_s):
            return api.ReserveResult(api.ReserveOutcome.NO_SPACE)
        if self._quarantine_full():
            return api.ReserveResult(api.ReserveOutcome.NO_SPACE)
        lba_counts = [self._lba_count(shard) for shard in item.shards]
        extents = self._placing.place(now_s, lba_counts, pending.opened, self._may_reclaim)
        if extents is None:
            return api.ReserveResult(api.ReserveOutcome.NO_SPACE)
        grant = self.grants.add(now_s, holder_id, item, extents)
        return api.ReserveResult(api.ReserveOutcome.GRANTED, grant.grant_id, grant.extents)

    def _quarantine_full(self) -> bool:
        limit = self.options.quarantine_max_fraction * self.segments.geometry.segment_count
        return self.quarantined_segment_count() > limit

    def _lba_count(self, shard: api.ShardSize) -> int:
        return shard_lba_count(shard.unit_bytes, shard.unit_count, self.segments.geometry.lba_bytes)

    def _may_reclaim(self, segment: int) -> bool:
        """Nothing is reclaimed until every holder of an earlier epoch has re-asserted itself or is fenced."""
        return self.holders.all_current()


def _never(_: int) -> bool:
    return False
