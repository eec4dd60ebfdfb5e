"""Drives a :class:`Store` by hand: applies what it decides to a dict of chunks, when the test says so."""

from __future__ import annotations

from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.effects import (
    DeleteChunk,
    DeleteHolder,
    Effect,
    HolderRecord,
    OpenSegment,
    PutChunk,
    PutHolder,
    SummarizeSegment,
)
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.store.store import Store, StoreOptions
from meshfusion.dpu.store.stored_chunks import StoredChunks
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord, SegmentTable

# Room for ten blocks between the header and the summary of a segment.
GEOMETRY = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=12, segment_count=4)
OPTIONS = StoreOptions(max_pinned_fraction=0.5, quarantine_max_fraction=0.25)
IDENTITY = b"I" * 32
DIGEST = b"8 bytes!"


def key(i: int, group: int = 0) -> bytes:
    return bytes([group, i]) * 16


def item(i: int, *, units: int = 4, position_tokens: int | None = None, group: int = 0) -> api.ReserveItem:
    """Chunk ``i`` of a prompt: ``units`` + 1 logical blocks."""
    at = 16 * i if position_tokens is None else position_tokens
    return api.ReserveItem(key(i, group), group, at, 16, (api.ShardSize(0, 4096, units),))


class Driver:
    def __init__(self, options: StoreOptions = OPTIONS) -> None:
        self.options = options
        self.chunks: dict[bytes, api.ChunkRecord] = {}
        self.segments: dict[int, SegmentRecord] = {}
        self.holders: dict[str, HolderRecord] = {}
        self.epoch = 0
        self.now_s = 0.0
        self.store = self.restart()

    def restart(self) -> Store:
        self.epoch += 1
        table = SegmentTable(GEOMETRY, self.segments.values())
        former = tuple(self.holders.values())
        self.store = Store(table, self.options, epoch=self.epoch, former_holders=former, now_s=self.now_s)
        return self.store

    def settle(self, step: Step[Any]) -> Any:
        """Its transaction becomes durable."""
        if step.effects:
            for effect in step.effects:
                self._apply(effect)
            self.store.durable(step.ticket)
        return step.reply

    def fail(self, step: Step[Any]) -> None:
        self.store.failed(self.now_s, step.ticket, "disk full")

    def attach_step(self, holder_id: str, **changes: Any) -> Step[str]:
        fields: dict[str, Any] = {
            "engine_kind": "vllm",
            "engine_version": "1",
            "host": "h",
            "pid": 7,
            "identity": IDENTITY,
        }
        fields |= {"rank_count": 1} | changes
        return self.store.attach(self.now_s, api.AttachRequest(holder_id, **fields))

    def attach(self, holder_id: str = "one", **changes: Any) -> str:
        self.settle(self.attach_step(holder_id, **changes))
        return holder_id

    def reserve_step(self, holder_id: str, *items: api.ReserveItem) -> Step[api.ReserveReply]:
        return self.store.reserve(self.now_s, api.ReserveRequest(holder_id, self.epoch, items), self.chunks)

    def reserve(self, holder_id: str, *items: api.ReserveItem) -> tuple[api.ReserveResult, ...]:
        reply: api.ReserveReply = self.settle(self.reserve_step(holder_id, *items))
        return reply.results

    def commit_step(self, holder_id: str, *grant_ids: str, units: int = 4, bundle: int = 0) -> Step[api.CommitReply]:
        items = tuple(api.CommitItem(grant_id, ((DIGEST,) * units,), bundle) for grant_id in grant_ids)
        return self.store.commit(self.now_s, api.CommitRequest(holder_id, self.epoch, items))

    def commit(self, holder_id: str, *grant_ids: str, units: int = 4, bundle: int = 0) -> tuple[bool, ...]:
        reply: api.CommitReply = self.settle(self.commit_step(holder_id, *grant_ids, units=units, bundle=bundle))
        return reply.committed

    def put(self, holder_id: str, *items: api.ReserveItem) -> None:
        """Reserve and commit each."""
        for one in items:
            (result,) = self.reserve(holder_id, one)
            assert self.commit(holder_id, result.grant_id, units=one.shards[0].unit_count) == (True,)

    def match(self, holder_id: str, *chunks: int, group: int = 0, chunk_tokens: int = 16) -> api.MatchReply:
        """Of one group that needs everything from the start."""
        asked = api.GroupKeys(group, tuple(key(i) for i in chunks), (0,) * len(chunks))
        return self.match_groups(holder_id, asked, chunk_tokens=chunk_tokens)

    def match_groups(self, holder_id: str, *groups: api.GroupKeys, chunk_tokens: int = 16) -> api.MatchReply:
        found = StoredChunks.of(self.chunks)
        return self.store.match(self.now_s, api.MatchRequest(holder_id, "r", chunk_tokens, groups), found)

    def abort(self, holder_id: str, *grant_ids: str) -> None:
        self.store.abort(self.now_s, api.AbortRequest(holder_id, self.epoch, grant_ids))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.tick(self.now_s)

    def _apply(self, effect: Effect) -> None:
        match effect:
            case PutChunk(record):
                self.chunks[record.key] = record
            case DeleteChunk(chunk_key):
                self.chunks.pop(chunk_key, None)
            case OpenSegment(opened) | SummarizeSegment(opened):
                self.segments[opened.segment] = opened
            case PutHolder(holder):
                self.holders[holder.holder_id] = holder
            case DeleteHolder(holder_id):
                self.holders.pop(holder_id, None)
