"""The real store, its writer and the format on a drive that loses power at every write of a random history.

One service and its holders, who all die with it. The history goes on undisturbed while every write of it is looked at
as if the power went there; now and then it really does, and the service starts again with its index or without.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool_medium import PoolMedium
from meshfusion.dpu.pool_writer import apply_effects
from meshfusion.dpu.store.store import Step, Store, StoreOptions
from meshfusion.jbof.format import LBA_BYTES, ChunkHeader, encode_chunk_header, shard_lba_count
from meshfusion.jbof.segments import SegmentTable
from tests.sim.power.drive import Drive, Faults
from tests.sim.power.recovery import (
    GEOMETRY,
    LABEL,
    Expected,
    ModelIndex,
    bytes_of,
    check_normal,
    check_rebuilt,
    digest_of,
    rebuilt_index,
)

OPTIONS = StoreOptions(max_pinned_fraction=0.4, quarantine_max_fraction=0.9)
KEYS = 24
IDENTITY = b"I" * 32
CHUNK_TOKENS = 16


@dataclass(frozen=True)
class Rules:
    """What runs; mutants replace parts of it. ``flushes``: does a holder, before it commits?"""

    segments: type[SegmentTable] = SegmentTable
    medium: type[PoolMedium] = PoolMedium
    drive: type[Drive] = Drive
    flushes: bool = True


@dataclass
class Work:
    """A grant and what is still to be written under it."""

    grant_id: str
    key: bytes
    extent: api.Extent
    digests: tuple[bytes, ...]
    blocks: dict[int, bytes]
    through: bool  # every write with FUA
    is_flushed: bool = True


@dataclass
class World:
    rng: random.Random
    rules: Rules = field(default_factory=Rules)
    faults: Faults = field(default_factory=Faults)
    cuts_per_write: int = 1

    def __post_init__(self) -> None:
        self.seen: Counter[str] = Counter()
        lba_count = GEOMETRY.end_lba(GEOMETRY.segment_count - 1)
        frees, promises = self.rng.random() < 0.6, self.rng.random() < 0.3
        self.drive = self.rules.drive(self.rng, lba_count, frees, promises, self.faults)
        self.index = ModelIndex()
        self.written: dict[bytes, set[bytes]] = {}
        self.handed_out: dict[int, int] = {}
        self.served_epoch = 0
        self.now_s = 0.0
        self.lives = 0
        self.start()

    @property
    def is_sound(self) -> bool:
        return self.faults == Faults()

    # ---- the service's life --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.lives += 1
        self.index.epoch += 1
        self.drive.on_write = self.cut
        self.medium = self.rules.medium(self.drive, LABEL, GEOMETRY, self.index.epoch)
        self.medium.write_owner()
        self.served_epoch = self.index.epoch
        self.store = Store(
            self.rules.segments(GEOMETRY, self.index.segments.values()),
            OPTIONS,
            epoch=self.index.epoch,
            former_holders=tuple(self.index.holders.values()),
            now_s=self.now_s,
        )
        self.works: list[Work] = []
        self.leases: list[str] = []
        for holder_id in self.store.holders.to_probe(self.now_s):  # all dead
            self.settle(self.store.holder_is_gone(self.now_s, holder_id))
        self.holder_id = f"worker-{self.lives}"
        self.settle(self.store.attach(self.now_s, _attach_request(self.holder_id)))

    def settle(self, step: Step[Any]) -> Any:
        """Its effects become durable, as the pool's writer does it; then its reply leaves."""
        if step.effects:
            apply_effects(step.effects, self.index, self.medium)
            self.cut()
            self.store.durable(step.ticket)
        return step.reply

    def restart(self) -> None:
        """Killed, or without power; the index survives, or does not."""
        kind = self.rng.choice(("kill", "cut"))
        if kind == "cut":
            self.drive = self.drive.after_cut(self.rng)
        self.drive.on_write = lambda: None
        if self.rng.random() < 0.5:
            self.index = rebuilt_index(self.drive)[0] if not self.is_sound else self._rebuilt(self.drive)
            self.seen["lives after a rebuild"] += 1
        self.seen[f"restarts after a {kind}"] += 1
        self.start()

    # ---- the power goes ------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Here the power could go: what would be found?"""
        for _ in range(self.cuts_per_write):
            self.seen["cuts"] += 1
            check_normal(self.drive.after_cut(self.rng), self.index, self._expected(), self.seen)
            self._rebuilt(self.drive.after_cut(self.rng))

    def _rebuilt(self, drive: Drive) -> ModelIndex:
        return check_rebuilt(drive, self.index, self._expected(), self.seen)

    def _expected(self) -> Expected:
        return Expected(self.written, self.handed_out, self.served_epoch, self.is_sound)

    # ---- what a holder does --------------------------------------------------------------------------------------

    def reserve(self) -> None:
        key = _key(self.rng.randrange(KEYS))
        size = api.ShardSize(0, LBA_BYTES * self.rng.choice((1, 1, 2)), self.rng.choice((1, 1, 2, 3)))
        item = api.ReserveItem(key, 0, key[0] * CHUNK_TOKENS, CHUNK_TOKENS, (size,))
        request = api.ReserveRequest(self.holder_id, self.store.epoch, (item,))
        reply: api.ReserveReply = self.settle(self.store.reserve(self.now_s, request, self.index.chunks))
        (result,) = reply.results
        self.seen[f"reserve {result.outcome.value}"] += 1
        if result.outcome is not api.ReserveOutcome.GRANTED:
            return
        (extent,) = result.extents
        self.handed_out[extent.segment] = max(self.handed_out.get(extent.segment, 0), extent.generation)
        self.works.append(self._work(result.grant_id, item, extent))

    def _work(self, grant_id: str, item: api.ReserveItem, extent: api.Extent) -> Work:
        (size,) = item.shards
        tag = self.rng.randbytes(16)
        units = [bytes([i]) * 16 + tag * (size.unit_bytes // 16 - 1) for i in range(size.unit_count)]
        digests = tuple(map(digest_of, units))
        header = ChunkHeader(
            pool_uuid=LABEL.pool_uuid,
            identity=IDENTITY,
            key=item.key,
            tenant="default",
            group=0,
            rank=0,
            shard_count=1,
            position_tokens=item.position_tokens,
            token_count=CHUNK_TOKENS,
            segment=extent.segment,
            generation=extent.generation,
            lba=extent.lba,
            unit_bytes=size.unit_bytes,
            unit_digests=digests,
        )
        data = encode_chunk_header(header) + b"".join(units)
        assert len(data) == shard_lba_count(size.unit_bytes, size.unit_count) * LBA_BYTES
        blocks = {extent.lba + i: data[i * LBA_BYTES : (i + 1) * LBA_BYTES] for i in range(extent.lba_count)}
        self.written.setdefault(item.key, set()).add(b"".join(units))
        return Work(grant_id, item.key, extent, digests, blocks, through=self.rng.random() < 0.3)

    def write(self) -> None:
        """Some blocks of one chunk, in any order."""
        works = [work for work in self.works if work.blocks]
        if not works:
            return
        work = self.rng.choice(works)
        first = self.rng.choice(list(work.blocks))
        count = self.rng.randint(1, 3)
        run = [lba for lba in range(first, first + count) if lba in work.blocks]
        run = [lba for i, lba in enumerate(run) if lba == first + i]
        data = b"".join(work.blocks.pop(lba) for lba in run)
        if work.through:
            self.drive.write_through(first, data)
        else:
            self.drive.write_blocks(first, data)
            work.is_flushed = False

    def commit(self) -> None:
        """One that is written; sometimes one that is not, as a holder gives it back."""
        if not self.works:
            return
        work = self.rng.choice(self.works)
        if work.blocks:
            if self.rng.random() < 0.25:
                self.abort(work)
            return
        if not work.is_flushed and self.rules.flushes:
            self.drive.flush()
            for other in self.works:
                other.is_flushed = other.is_flushed or not other.blocks
        self.works.remove(work)
        items = (api.CommitItem(work.grant_id, (work.digests,)),)
        request = api.CommitRequest(self.holder_id, self.store.epoch, items)
        reply: api.CommitReply = self.settle(self.store.commit(self.now_s, request))
        self.seen["commits"] += reply.committed == (True,)

    def abort(self, work: Work) -> None:
        self.works.remove(work)
        self.store.abort(self.now_s, api.AbortRequest(self.holder_id, self.store.epoch, (work.grant_id,)))
        self.seen["aborts"] += 1

    def match(self) -> None:
        i = self.rng.randrange(KEYS)
        group = api.GroupKeys(0, tuple(_key(j) for j in range(i + 1)), tuple(range(i + 1)))
        request = api.MatchRequest(self.holder_id, "r", CHUNK_TOKENS, (group,))
        reply = self.store.match(self.now_s, request, self.index.chunks)
        for chunk in reply.chunks:
            units = bytes_of(self.drive, chunk)
            self.seen["loads"] += 1
            if units is None:  # found by its digests: the holder says so
                assert not self.is_sound, chunk
                request_drop = api.DropRequest(self.holder_id, chunk.key, chunk.shards[0].extent, "digest")
                self.settle(self.store.drop(self.now_s, request_drop, self.index.chunks.get(chunk.key)))
                self.seen["dropped for their digests"] += 1
            else:
                assert units in self.written[chunk.key], "another's bytes were served"
        if reply.lease_id:
            self.leases.append(reply.lease_id)

    def release(self) -> None:
        if self.leases:
            lease_id = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.store.release(self.now_s, api.ReleaseRequest(self.holder_id, (lease_id,)))

    def drop(self) -> None:
        if self.index.chunks:
            chunk = self.rng.choice(list(self.index.chunks.values()))
            request = api.DropRequest(self.holder_id, chunk.key, chunk.shards[0].extent, "for no reason")
            self.seen["drops"] += bool(self.settle(self.store.drop(self.now_s, request, chunk)))

    def summarize(self) -> None:
        step = self.store.summarize(self.now_s)
        self.seen["summaries"] += len(step.effects)
        self.settle(step)

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.1, 1.0, 1.0, 20.0))
        self.store.tick(self.now_s)
        heartbeat = api.HeartbeatRequest(self.holder_id, self.store.epoch, tuple(self.leases))
        self.store.heartbeat(self.now_s, heartbeat)


EVENTS: dict[Callable[[World], None], float] = {
    World.reserve: 20,
    World.write: 34,
    World.commit: 22,
    World.match: 5,
    World.release: 6,
    World.drop: 1,
    World.summarize: 5,
    World.pass_time: 2,
    World.restart: 1,
}


def step(world: World) -> None:
    world.rng.choices(list(EVENTS), list(EVENTS.values()))[0](world)


def _key(i: int) -> bytes:
    return bytes([i]) * 32


def _attach_request(holder_id: str) -> api.AttachRequest:
    return api.AttachRequest(
        incarnation=holder_id,
        engine_kind="vllm",
        engine_version="0",
        host="sim",
        pid=1,
        identity=IDENTITY,
        rank_count=1,
    )
