"""A segment is made ready to be given up: what is worth it is written again elsewhere, and then all of it is forgotten.

So a few segments are free ahead of need: a save does not wait until thousands of chunks have left the index, and the
drive learns early which of its blocks are free. One segment at a time::

    begin            the segment that is worth least is held, so that nobody else reclaims it
    plan             its chunks that are worth it get places, pinned as by a writer, in segments that were free
    (copied, proven by their digests, and flushed)
    moved            the index names the new places, of those chunks that are still where they were
    give_up          unless somebody else reads it: its generation grows, nothing of it counts any more, it is free

Whatever fails on the way leaves the segment as it was, and costs the places until their segments are given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from meshfusion.dpu.api.types import ChunkRecord, Extent
from meshfusion.dpu.store.segments import Segments
from meshfusion.jbof.segments import SegmentRecord

REWRITE_SHARE = 0.1
"""Bytes that may be written again for each one that was saved: an application write amplification of 1.10 at most."""

Place = Callable[[Sequence[int]], tuple[Extent, ...] | None]
"""Extents of so many blocks each, in segments that were free; None when there is no room for all of them."""


@dataclass(frozen=True, slots=True)
class Move:
    """Of a chunk, all its shards: from where the index has it to where ``after`` says."""

    before: ChunkRecord
    after: ChunkRecord

    @property
    def payload_bytes(self) -> int:
        return sum(shard.payload_bytes for shard in self.before.shards)


class Tidying:
    """At most one segment is being tidied."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.segment: SegmentRecord | None = None
        self._moves: tuple[Move, ...] = ()
        self._lost: set[bytes] = set()  # keys of moves whose new places went away meanwhile
        self._settling: dict[int, tuple[Move, ...]] = {}  # by ticket
        self._saved_bytes = 0
        self.counters: Counter[str] = Counter()

    @property
    def allowed_bytes(self) -> int:
        """That may be written again now."""
        return max(0, int(REWRITE_SHARE * self._saved_bytes) - self.counters["rewritten_bytes"])

    def saved(self, length_bytes: int) -> None:
        self._saved_bytes += length_bytes

    def begin(self, record: SegmentRecord) -> None:
        assert self.segment is None, f"{self.segment} is being tidied"
        self._segments.hold(record.segment)
        self.segment = record

    def plan(self, chunks: Iterable[ChunkRecord], place: Place) -> tuple[Move, ...]:
        """Places for these chunks of the segment, as far as there are any."""
        assert self.segment is not None
        assert not self._moves
        moves = []
        for chunk in chunks:
            extents = place([shard.extent.lba_count for shard in chunk.shards])
            if extents is None:
                break
            assert all(extent.segment != self.segment.segment for extent in extents), "moved within its segment"
            for extent in extents:
                self._segments.pin_write(extent.segment)
            shards = [replace(shard, extent=extent) for shard, extent in zip(chunk.shards, extents, strict=True)]
            moves.append(Move(chunk, replace(chunk, shards=tuple(shards))))
        self._moves = tuple(moves)
        return self._moves

    def forget_openings(self, records: Iterable[SegmentRecord]) -> None:
        """These segments were not opened: no move leads there."""
        failed = {(record.segment, record.generation) for record in records}
        kept = []
        for move in self._moves:
            if any((s.extent.segment, s.extent.generation) in failed for s in move.after.shards):
                self._unpin(move)
            else:
                kept.append(move)
        self._moves = tuple(kept)

    def lose(self, is_lost: Callable[[int], bool]) -> None:
        """Such segments went away, and may come back: whether what was written there is in them then, nobody knows."""
        self._lost.update(
            move.before.key for move in self._moves if any(is_lost(shard.extent.segment) for shard in move.after.shards)
        )

    def moved(self, ticket: int, keys: Collection[bytes]) -> tuple[Move, ...]:
        """Those with these keys were written and flushed, the others were not, and are over. Returns what is to be made
        durable with this ticket."""
        written = tuple(move for move in self._moves if move.before.key in keys and move.before.key not in self._lost)
        for move in self._moves:
            if move not in written:
                self._unpin(move)
                self.counters["rewrites_failed"] += 1
        self._moves = ()
        self._lost.clear()
        if written:
            self._settling[ticket] = written
        return written

    def settled(self, ticket: int, *, worked: bool) -> tuple[Move, ...]:
        """Those of this ticket that are in the index now; none if it did not work."""
        moves = self._settling.pop(ticket, ())
        for move in moves:
            self._unpin(move)
            if worked:
                self.counters["rewritten_chunks"] += 1
                self.counters["rewritten_bytes"] += move.payload_bytes
        return moves if worked else ()

    def end(self) -> SegmentRecord:
        """It is held no more. Returns which it was."""
        assert self.segment is not None
        assert not self._moves, "moves were planned, and nothing was said of them"
        record, self.segment = self.segment, None
        self._segments.let_go(record.segment)
        return record

    def pins(self) -> Counter[int]:
        """Of a writer, by segment."""
        moves = [*self._moves, *(move for moves in self._settling.values() for move in moves)]
        return Counter(shard.extent.segment for move in moves for shard in move.after.shards)

    def _unpin(self, move: Move) -> None:
        for shard in move.after.shards:
            self._segments.unpin_write(shard.extent.segment)
