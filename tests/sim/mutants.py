"""Planted bugs. Each breaks one rule of the store in the way a mistake would; the simulation must find every one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.attending import Attending
from meshfusion.dpu.store.grants import GrantState
from meshfusion.dpu.store.holders import HolderTable
from meshfusion.dpu.store.reading import Reading
from meshfusion.dpu.store.segments import is_readable
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.store.store import Store
from meshfusion.dpu.store.tidying import Move, Place, Tidying
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentRecord, SegmentTable
from meshfusion.jbof.shelf import Shelf, ShelfDrive
from tests.sim.service import Rules


class SkipsGeneration(SegmentTable):
    def open_next(self, now_s: float, may_reclaim: Callable[[int], bool]) -> SegmentRecord | None:
        record = super().open_next(now_s, may_reclaim)
        if record is not None and record.generation > 1:
            self._segments[record.segment].generation -= 1
            return replace(record, generation=record.generation - 1)
        return record


class _IgnoresPins(SegmentTable):
    """Forgets one kind of pin while it looks for a victim, and so gets past the assertion too."""

    pins_ignored = ""

    def open_next(self, now_s: float, may_reclaim: Callable[[int], bool]) -> SegmentRecord | None:
        pins = [getattr(segment, self.pins_ignored) for segment in self._segments.values()]
        for segment in self._segments.values():
            setattr(segment, self.pins_ignored, 0)
        record = super().open_next(now_s, may_reclaim)
        for segment, count in zip(self._segments.values(), pins, strict=True):
            setattr(segment, self.pins_ignored, count)
        return record


class IgnoresReadPins(_IgnoresPins):
    pins_ignored = "read_pins"


class IgnoresWritePins(_IgnoresPins):
    pins_ignored = "write_pins"


class LowersGenerationAfterFailure(SegmentTable):
    def open_failed(self, record: SegmentRecord) -> None:
        super().open_failed(record)
        self._segments[record.segment].generation -= 1


class FreesOnTimeout(Store):
    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        for grant in self.grants:
            if grant.state is GrantState.EXPIRED:
                self.grants.resolve(grant)


class CommitsAfterExpiry(Store):
    def commit(self, now_s: float, request: api.CommitRequest) -> Step[api.CommitReply]:
        for item in request.items:
            grant = self.grants.get(request.holder_id, item.grant_id)
            if grant is not None and grant.state is GrantState.EXPIRED:
                grant.state = GrantState.LIVE
            if grant is not None:
                grant.expires_s = now_s + 1
        return super().commit(now_s, request)


class _ReclaimsAlways(Attending):
    def may_reclaim(self, segment: int) -> bool:
        return True


class IgnoresFormerHolders(Store):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attending.__class__ = _ReclaimsAlways


class ReadmitsFenced(Store):
    def attach(self, now_s: float, request: api.AttachRequest) -> Step[str]:
        self.holders._fenced.discard(request.incarnation)
        return super().attach(now_s, request)


class FreesBeforeFenceIsDurable(Store):
    def holder_is_gone(self, now_s: float, holder_id: str) -> Step[None]:
        step = super().holder_is_gone(now_s, holder_id)
        self._attending.forget(holder_id)
        return step


class AdmitsUnlisted(Store):
    """A holder that is not listed durably would not be waited for after a restart."""

    def attach(self, now_s: float, request: api.AttachRequest) -> Step[str]:
        step = super().attach(now_s, request)
        holder = self.holders.get(step.reply)
        assert holder is not None
        holder.admission = 0
        return Step(step.reply, step.effects, step.ticket) if step.effects else Step(step.reply)

    def failed(self, now_s: float, ticket: int, reason: str) -> None:
        self._transactions._pending[ticket].admitted.clear()
        super().failed(now_s, ticket, reason)


class _ServesAll(Reading):
    def _is_servable(self, record: api.ChunkRecord, *args: Any) -> bool:
        return is_readable(self._segments, record)


class IgnoresIdentity(Store):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading.__class__ = _ServesAll


class IgnoresPosition(Store):
    def match(self, now_s: float, request: api.MatchRequest, found: Mapping[bytes, api.ChunkRecord]) -> api.MatchReply:
        moved = {
            key: replace(found[key], position_tokens=i * request.chunk_tokens)
            for group in request.groups
            for i, key in enumerate(group.keys)
            if key in found
        }
        reply = super().match(now_s, request, moved)
        return replace(reply, chunks=tuple(found[chunk.key] for chunk in reply.chunks))


class IgnoresOneGroup(Store):
    def match(self, now_s: float, request: api.MatchRequest, found: Mapping[bytes, api.ChunkRecord]) -> api.MatchReply:
        return super().match(now_s, replace(request, groups=request.groups[:1]), found)


class NeedsOneLess(Store):
    """Takes the first chunk that a group needs for the last one that it does not."""

    def match(self, now_s: float, request: api.MatchRequest, found: Mapping[bytes, api.ChunkRecord]) -> api.MatchReply:
        groups = tuple(
            replace(group, first_needed=tuple(min(i + 1, first + 1) for i, first in enumerate(group.first_needed)))
            for group in request.groups
        )
        return super().match(now_s, replace(request, groups=groups), found)


class LeasesOneGroup(Store):
    """Only what the first group needs."""

    def match(self, now_s: float, request: api.MatchRequest, found: Mapping[bytes, api.ChunkRecord]) -> api.MatchReply:
        reply = super().match(now_s, request, found)
        first = {s.extent.segment for c in reply.chunks if c.group == reply.chunks[0].group for s in c.shards}
        for lease in self.leases:
            if lease.lease_id == reply.lease_id:
                for segment in set(lease.segments) - first:
                    self.segments.unpin_read(segment)
                lease.segments = tuple(first)
        return reply


class CommitsPartOfABundle(Store):
    def commit(self, now_s: float, request: api.CommitRequest) -> Step[api.CommitReply]:
        """Says that all of a bundle is refused, and commits those that are not."""
        items = tuple(replace(item, bundle=0) for item in request.items)
        step = super().commit(now_s, replace(request, items=items))
        flags = list(zip(request.items, step.reply.committed, strict=True))
        broken = {item.bundle for item, is_committed in flags if not is_committed} - {0}
        committed = tuple(is_committed and item.bundle not in broken for item, is_committed in flags)
        return replace(step, reply=api.CommitReply(committed))


class IgnoresGeneration(SegmentTable):
    """Trusts what a reader saw in the index before a segment was opened again."""

    def is_readable(self, segment: int, generation: int) -> bool:
        return True


class RepliesBeforeOpening(Store):
    """A second reserve does not wait for the opening that its extents stand on."""

    def reserve(self, *args: Any) -> Step[api.ReserveReply]:
        return replace(super().reserve(*args), after=0)


class KeepsGrantsOfFailedOpening(Store):
    def failed(self, now_s: float, ticket: int, reason: str) -> None:
        kept = [(grant, grant.extents) for grant in self.grants]
        for grant, _ in kept:
            grant.extents = ()
        super().failed(now_s, ticket, reason)
        for grant, extents in kept:
            grant.extents = extents


class _OnlyForgetsNames(Attending):
    def forget(self, holder_id: str) -> None:
        self._holders.remove(holder_id)


class LeaksFenced(Store):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attending.__class__ = _OnlyForgetsNames


class FreesDoubtful(Store):
    """Takes a write in doubt for one that failed."""

    def abort(self, now_s: float, request: api.AbortRequest) -> None:
        both = request.grant_ids + request.doubtful_grant_ids
        super().abort(now_s, replace(request, grant_ids=both, doubtful_grant_ids=()))


class _ProbesEveryone(HolderTable):
    def to_probe(self, now_s: float) -> tuple[str, ...]:
        return tuple(h.record.holder_id for h in self if not h.fencing and (not h.current or self.is_silent(h, now_s)))


class TakesLockForFence(Store):
    """A host of the target holds no liveness lock: that it can be taken says nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.holders.__class__ = _ProbesEveryone

    def holder_is_gone(self, now_s: float, holder_id: str) -> Step[None]:
        holder = self.holders.get(holder_id)
        if holder is not None:
            holder.condemned = True
        return super().holder_is_gone(now_s, holder_id)


class OpensOnDrivesThatAreOnlyRead(Shelf):
    def __init__(self, drives: Iterable[ShelfDrive], last_opened_seq: int = 0) -> None:
        super().__init__((replace(drive, takes_segments=True) for drive in drives), last_opened_seq)


class WritesOnAfterAStop(Shelf):
    """What is open on a drive that takes no more segments stays open, and more are opened."""

    def stand(self, number: int, *, takes_segments: bool, is_offered: bool) -> None:
        super().stand(number, takes_segments=is_offered, is_offered=is_offered)


class OffersWhatIsGone(Shelf):
    def is_readable(self, segment: int, generation: int) -> bool:
        drive = self._drives.get(drive_of_segment(segment))
        return drive is not None and drive.segments.is_readable(segment, generation)


class CommitsWhatALostDriveWasGranted(Store):
    """Its holder has flushed, and does not know that the drive was gone in between."""

    def drive_is_gone(self, number: int) -> None:
        pass


class GivesUpUnderReaders(SegmentTable):
    def may_give_up(self, record: SegmentRecord) -> bool:
        return self._segments[record.segment].generation == record.generation

    def give_up(self, index: int) -> SegmentRecord:
        segment = self._segments[index]
        pins, segment.read_pins = segment.read_pins, 0
        record = super().give_up(index)
        segment.read_pins = pins
        return record


class _Unpinned(Tidying):
    def plan(self, chunks: Iterable[api.ChunkRecord], place: Place) -> tuple[Move, ...]:
        moves = super().plan(chunks, place)
        for move in moves:
            super()._unpin(move)
        return moves

    def _unpin(self, move: Move) -> None:
        pass

    def pins(self) -> Counter[int]:
        return Counter()


class DoesNotPinNewPlaces(Store):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tidying.__class__ = _Unpinned


MUTANTS_WITH_DRIVES: dict[str, Rules] = {
    "writes on a drive that may not be written any more": Rules(shelf=WritesOnAfterAStop),
    "offers what lies on a drive that is gone": Rules(shelf=OffersWhatIsGone),
    "commits what was granted on a drive before it was gone": Rules(store=CommitsWhatALostDriveWasGranted),
    "opens segments on drives that are only read": Rules(shelf=OpensOnDrivesThatAreOnlyRead),
    "takes a free lock for a target's fence": Rules(store=TakesLockForFence),
    "ignores write pins": Rules(segments=IgnoresWritePins),
    "skips the generation": Rules(segments=SkipsGeneration),
}
MUTANTS: dict[str, Rules] = {
    "skips the generation": Rules(segments=SkipsGeneration),
    "ignores read pins": Rules(segments=IgnoresReadPins),
    "ignores write pins": Rules(segments=IgnoresWritePins),
    "lowers a generation after a failure": Rules(segments=LowersGenerationAfterFailure),
    "frees on timeout": Rules(store=FreesOnTimeout),
    "commits after expiry": Rules(store=CommitsAfterExpiry),
    "ignores former holders": Rules(store=IgnoresFormerHolders),
    "readmits fenced holders": Rules(store=ReadmitsFenced),
    "frees before the fence is durable": Rules(store=FreesBeforeFenceIsDurable),
    "admits unlisted holders": Rules(store=AdmitsUnlisted),
    "ignores identity": Rules(store=IgnoresIdentity),
    "ignores position": Rules(store=IgnoresPosition),
    "ignores all groups but one": Rules(store=IgnoresOneGroup),
    "needs one chunk less": Rules(store=NeedsOneLess),
    "leases what one group needs": Rules(store=LeasesOneGroup),
    "commits a part of a bundle": Rules(store=CommitsPartOfABundle),
    "tears a transaction": Rules(tears_transactions=True),
    "ignores generations": Rules(segments=IgnoresGeneration),
    "replies before the opening is durable": Rules(store=RepliesBeforeOpening),
    "keeps grants of a failed opening": Rules(store=KeepsGrantsOfFailedOpening),
    "leaks fenced holders' pins": Rules(store=LeaksFenced),
    "frees the place of a doubtful write": Rules(store=FreesDoubtful),
    "takes a free lock for a target's fence": Rules(store=TakesLockForFence),
    "gives a segment up under readers": Rules(segments=GivesUpUnderReaders),
    "does not pin the places that chunks are moved to": Rules(store=DoesNotPinNewPlaces),
    "names a chunk's new place before the flush": Rules(flushes_moves=False),
    "publishes before durable": Rules(shows_queued=True),
    "begins with a full budget after a restart": Rules(notes_budgets=False),
    "keeps chunks of a reopened segment": Rules(forgets_on_open=False),
}
