"""Models of the medium and of the index: what has reached them, what a power loss may take, what may never happen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from meshfusion.dpu.api.types import ChunkRecord, Extent
from meshfusion.dpu.store.effects import (
    DeleteChunk,
    DeleteHolder,
    Effect,
    HolderRecord,
    MoveChunk,
    NoteBudget,
    OpenSegment,
    PutChunk,
    PutHolder,
    SummarizeSegment,
)
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentRecord


class Violation(AssertionError):
    """A rule of the design was broken."""


def must(condition: bool, rule: str, *details: object) -> None:
    if not condition:
        raise Violation(f"{rule}: {details}")


class Token(NamedTuple):
    """What one logical block holds: enough to tell every write from every other."""

    key: bytes
    identity: bytes
    position_tokens: int
    segment: int
    generation: int
    grant_id: str
    offset: int


class Medium:
    """Logical blocks of all drives, by their pool LBAs, behind volatile write caches."""

    def __init__(self) -> None:
        self.durable: dict[int, Token] = {}
        self._cached: dict[int, Token] = {}

    def read(self, lba: int) -> Token | None:
        return self._cached.get(lba) or self.durable.get(lba)

    def write(self, lba: int, token: Token) -> None:
        """Rules 2 and 3: a block is written by one grant per generation, and never again by an older one."""
        before = self.read(lba)
        if before is not None:
            must(before.generation <= token.generation, "a late write hit space in new use", before, token)
            same = before.grant_id == token.grant_id
            must(before.generation < token.generation or same, "an extent changed under its generation", before, token)
        self._cached[lba] = token

    def flush(self, absent: Collection[int] = ()) -> None:
        """But for drives that are not there."""
        there = {lba: token for lba, token in self._cached.items() if drive_of_segment(token.segment) not in absent}
        self.durable.update(there)
        for lba in there:
            del self._cached[lba]

    def pull(self, drive: int, rng: random.Random) -> None:
        """As :meth:`lose_power`, of one drive."""
        cached = [lba for lba, token in self._cached.items() if drive_of_segment(token.segment) == drive]
        for lba in cached:
            token = self._cached.pop(lba)
            if rng.random() < 0.5:
                self.durable[lba] = token

    def lose_power(self, rng: random.Random) -> None:
        """Of the writes that nobody flushed, any may be there and any may be gone."""
        self.durable.update((lba, token) for lba, token in self._cached.items() if rng.random() < 0.5)
        self._cached.clear()


class IndexModel:
    """The durable index, as plain dicts."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, ChunkRecord] = {}
        self.segments: dict[int, SegmentRecord] = {}
        self.holders: dict[str, HolderRecord] = {}
        self.budgets: dict[int, int] = {}
        self.opened: Counter[int] = Counter()  # segments, by drive
        self.epoch = 0
        self.was_durable: set[tuple[bytes, Extent]] = set()
        self.forgets_on_open = True  # a mutant turns it off

    def rebuilt(self, epoch: int) -> IndexModel:
        """Made anew from the medium, which tells of no holders: nobody may be left who writes. What was written in the
        last day, it does not tell either. That the medium tells the rest is what ``tests/sim/power`` is about."""
        new = IndexModel()
        new.chunks, new.segments = dict(self.chunks), dict(self.segments)
        new.budgets = dict.fromkeys(self.budgets, 0)
        new.opened, new.was_durable = Counter(self.opened), set(self.was_durable)
        new.epoch, new.forgets_on_open = epoch, self.forgets_on_open
        return new

    def apply(self, effects: Iterable[Effect]) -> None:
        effects = tuple(effects)
        counted = {effect.drive_number for effect in effects if isinstance(effect, NoteBudget)}
        for effect in effects:
            if isinstance(effect, OpenSegment):  # giving one up counts against no budget
                self.opened.update({drive_of_segment(effect.record.segment)} & counted)
            match effect:
                case PutChunk(record):
                    self._put_chunk(record)
                case MoveChunk(before, after):
                    if self.chunks.get(before.key) == before:
                        self._put_chunk(after)
                case DeleteChunk(key, extent):
                    found = self.chunks.get(key)
                    if found is not None and any(shard.extent == extent for shard in found.shards):
                        del self.chunks[key]
                case OpenSegment(record):
                    self._open(record)
                case SummarizeSegment(record):
                    if self.generation(record.segment) == record.generation:
                        self.segments[record.segment] = record
                case NoteBudget(drive_number, left_bytes):
                    self.budgets[drive_number] = left_bytes
                case PutHolder(record):
                    self.holders[record.holder_id] = record
                case DeleteHolder(holder_id):
                    self.holders.pop(holder_id, None)

    def forget_drive(self, number: int) -> None:
        """It has left the pool."""

        def is_its(segment: int) -> bool:
            return drive_of_segment(segment) == number

        self.chunks = {
            key: chunk
            for key, chunk in self.chunks.items()
            if not any(is_its(shard.extent.segment) for shard in chunk.shards)
        }
        self.segments = {segment: record for segment, record in self.segments.items() if not is_its(segment)}
        self.budgets.pop(number, None)

    def generation(self, segment: int) -> int:
        return self.segments[segment].generation if segment in self.segments else 0

    def _put_chunk(self, record: ChunkRecord) -> None:
        self.chunks[record.key] = record
        for shard in record.shards:
            extent = shard.extent
            must(extent.generation == self.generation(extent.segment), "a chunk of another generation", record)
            self.was_durable.add((record.key, extent))
            for other in self.chunks.values():
                for theirs in other.shards:
                    apart = (
                        other is record
                        or theirs.extent.namespace != extent.namespace
                        or theirs.extent.lba >= extent.lba + extent.lba_count
                        or extent.lba >= theirs.extent.lba + theirs.extent.lba_count
                    )
                    must(apart, "two chunks overlap", record, other)

    def _open(self, record: SegmentRecord) -> None:
        must(record.generation > self.generation(record.segment), "a generation did not grow", record)
        self.segments[record.segment] = record
        if self.forgets_on_open:
            self.chunks = {
                key: chunk
                for key, chunk in self.chunks.items()
                if all(shard.extent.segment != record.segment for shard in chunk.shards)
            }
        for chunk in self.chunks.values():
            for shard in chunk.shards:
                must(shard.extent.segment != record.segment, "chunks outlived their segment", chunk, record)
