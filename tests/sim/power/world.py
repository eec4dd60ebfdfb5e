"""The real store, its writer and the format on drives that lose power at every write of a random history: all at once,
or one of them while the others live on.

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
from meshfusion.dpu.pool_medium import PoolMedium, ShelfMedium
from meshfusion.dpu.pool_writer import apply_effects
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.store.store import Store, StoreOptions
from meshfusion.dpu.store.stored_chunks import StoredChunks
from meshfusion.jbof.format import LBA_BYTES, ChunkHeader, encode_chunk_header, shard_lba_count
from meshfusion.jbof.pool_addresses import pool_lba, split_pool_lba
from meshfusion.jbof.segments import SegmentTable
from meshfusion.jbof.shelf import Shelf, ShelfDrive
from tests.sim.power.drive import Drive, Faults
from tests.sim.power.recovery import (
    POOL_UUID,
    Expected,
    ModelIndex,
    bytes_of,
    check_normal,
    check_rebuilt,
    digest_of,
    geometry_of,
    label_of,
    rebuilt_index,
)

OPTIONS = StoreOptions(max_pinned_fraction=0.4, quarantine_max_fraction=0.9)
KEYS = 24
SHARD_COUNTS = (1, 2)  # of chunks, by their keys
IDENTITY = b"I" * 32
CHUNK_TOKENS = 16
AGAIN_SHARE = 0.3  # of the reserves, for a chunk that was given up
AWAY_SHARE = 0.2  # of the cuts, where there are several drives


@dataclass(frozen=True)
class Rules:
    """What runs; mutants replace parts of it. ``flushes``: does a holder, before it commits? ``flushes_all``: every
    drive that it wrote to?"""

    segments: type[SegmentTable] = SegmentTable
    medium: type[PoolMedium] = PoolMedium
    shelf_medium: type[ShelfMedium] = ShelfMedium
    drive: type[Drive] = Drive
    flushes: bool = True
    flushes_all: bool = True


@dataclass
class Work:
    """A grant and what is still to be written under it. ``digests``: of each shard; ``blocks``: by pool LBA;
    ``unflushed``: the drives that it was written to since they were flushed."""

    grant_id: str
    key: bytes
    digests: tuple[tuple[bytes, ...], ...]
    blocks: dict[int, bytes]
    through: bool  # every write with FUA
    unflushed: set[int] = field(default_factory=set)


@dataclass
class World:
    rng: random.Random
    rules: Rules = field(default_factory=Rules)
    faults: Faults = field(default_factory=Faults)
    drive_count: int = 1
    cuts_per_write: int = 1

    def __post_init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.geometries = {number: geometry_of(number, self.drive_count) for number in range(self.drive_count)}
        self.drives = {number: self._new_drive(number) for number in self.geometries}
        self.index = ModelIndex()
        self.written: dict[bytes, set[bytes]] = {}
        self.handed_out: dict[int, int] = {}
        self.served_epoch = 0
        self.aborted: list[bytes] = []
        self.now_s = 0.0
        self.lives = 0
        self.start()

    def _new_drive(self, number: int) -> Drive:
        lba_count = self.geometries[number].end_lba(self.geometries[number].segments[-1])
        frees, promises = self.rng.random() < 0.6, self.rng.random() < 0.3
        return self.rules.drive(self.rng, lba_count, frees, promises, self.faults)

    @property
    def is_sound(self) -> bool:
        return self.faults == Faults()

    # ---- the service's life --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.lives += 1
        self.index.epoch += 1
        media = {}
        for number, drive in self.drives.items():
            drive.on_write = self.cut
            geometry = self.geometries[number]
            media[number] = self.rules.medium(drive, label_of(geometry), geometry, self.index.epoch)
            media[number].write_owner()
        self.medium = self.rules.shelf_medium(media)
        self.served_epoch = self.index.epoch
        self.store = Store(
            self._shelf(),
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

    def _shelf(self) -> Shelf:
        records = tuple(self.index.segments.values())
        last_seq = max((record.opened_seq for record in records), default=0)
        tables = (
            self.rules.segments(geometry, (record for record in records if record.segment in geometry.segments))
            for geometry in self.geometries.values()
        )
        return Shelf(map(ShelfDrive, tables), last_seq)

    def settle(self, step: Step[Any]) -> Any:
        """Its effects become durable, as the pool's writer does it; then its reply leaves."""
        if step.effects:
            apply_effects(step.effects, self.index, self.medium)
            self.cut()
            self.store.durable(step.ticket)
        return step.reply

    def restart(self) -> None:
        """Killed, or without power, which may be that of one drive; the index survives, or does not."""
        kind = self.rng.choice(("kill", "cut"))
        if kind == "cut":
            self.drives = self._after_cut()
        for drive in self.drives.values():
            drive.on_write = lambda: None
        if self.rng.random() < 0.5:
            sound = self.is_sound
            self.index = self._rebuilt(self.drives) if sound else rebuilt_index(self.drives, self.drive_count)[0]
            self.seen["lives after a rebuild"] += 1
        self.seen[f"restarts after a {kind}"] += 1
        self.start()

    # ---- the power goes ------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Here the power could go: what would be found?"""
        for _ in range(self.cuts_per_write):
            self.seen["cuts"] += 1
            check_normal(self._after_cut(), self.index, self._expected(), self.seen)
            self._rebuilt(self._after_cut())
            if self.drive_count > 1 and self.rng.random() < AWAY_SHARE:
                self._rebuilt_without_one()

    def _after_cut(self) -> dict[int, Drive]:
        """The power of all drives goes, or that of one; what the others have in their caches can still be read."""
        alone = self.rng.choice((None, *self.drives)) if self.drive_count > 1 else None
        self.seen["cuts of one drive"] += alone is not None
        return {
            number: drive.after_cut(self.rng) if alone in (None, number) else drive.copy()
            for number, drive in self.drives.items()
        }

    def _rebuilt_without_one(self) -> None:
        drives = self._after_cut()
        del drives[self.rng.choice(list(drives))]
        self._rebuilt(drives)
        self.seen["rebuilds without a drive"] += 1

    def _rebuilt(self, drives: dict[int, Drive]) -> ModelIndex:
        return check_rebuilt(drives, self.index, self._expected(), self.seen)

    def _expected(self) -> Expected:
        return Expected(self.written, self.handed_out, self.served_epoch, self.is_sound, self.drive_count)

    # ---- what a holder does --------------------------------------------------------------------------------------

    def reserve(self) -> None:
        again = self.aborted if self.rng.random() < AGAIN_SHARE else []
        key = self.rng.choice(again or [_key(self.rng.randrange(KEYS))])
        sizes = tuple(
            api.ShardSize(rank, LBA_BYTES * self.rng.choice((1, 1, 2)), self.rng.choice((1, 1, 2, 3)))
            for rank in range(SHARD_COUNTS[key[0] % len(SHARD_COUNTS)])
        )
        item = api.ReserveItem(key, 0, key[0] * CHUNK_TOKENS, CHUNK_TOKENS, sizes)
        request = api.ReserveRequest(self.holder_id, self.store.epoch, (item,))
        reply: api.ReserveReply = self.settle(self.store.reserve(self.now_s, request, self.index.chunks))
        (result,) = reply.results
        self.seen[f"reserve {result.outcome.value}"] += 1
        if result.outcome is not api.ReserveOutcome.GRANTED:
            return
        for extent in result.extents:
            self.handed_out[extent.segment] = max(self.handed_out.get(extent.segment, 0), extent.generation)
        self.seen["chunks on several drives"] += len({extent.namespace for extent in result.extents}) > 1
        self.works.append(self._work(result.grant_id, item, result.extents))

    def _work(self, grant_id: str, item: api.ReserveItem, extents: tuple[api.Extent, ...]) -> Work:
        tag = self.rng.randbytes(16)
        digests: list[tuple[bytes, ...]] = []
        blocks: dict[int, bytes] = {}
        written = b""
        for size, extent in zip(item.shards, extents, strict=True):
            units = [bytes([size.rank, i]) * 8 + tag * (size.unit_bytes // 16 - 1) for i in range(size.unit_count)]
            digests.append(tuple(map(digest_of, units)))
            data = encode_chunk_header(_header(item, size, extent, extents[0], digests[-1])) + b"".join(units)
            assert len(data) == shard_lba_count(size.unit_bytes, size.unit_count) * LBA_BYTES
            first = pool_lba(extent.namespace, extent.lba)
            blocks |= {first + i: data[i * LBA_BYTES : (i + 1) * LBA_BYTES] for i in range(extent.lba_count)}
            written += b"".join(units)
        self.written.setdefault(item.key, set()).add(written)
        return Work(grant_id, item.key, tuple(digests), blocks, through=self.rng.random() < 0.3)

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
        namespace, lba = split_pool_lba(first)
        if work.through:
            self.drives[namespace - 1].write_through(lba, data)
        else:
            self.drives[namespace - 1].write_blocks(lba, data)
            work.unflushed.add(namespace - 1)

    def commit(self) -> None:
        """One that is written; sometimes one that is not, as a holder gives it back."""
        if not self.works:
            return
        work = self.rng.choice(self.works)
        if work.blocks:
            if self.rng.random() < 0.25:
                self.abort(work)
            return
        if self.rules.flushes:
            for number in sorted(work.unflushed)[: None if self.rules.flushes_all else 1]:
                self.drives[number].flush()
                for other in self.works:
                    other.unflushed.discard(number)
        self.works.remove(work)
        items = (api.CommitItem(work.grant_id, work.digests),)
        request = api.CommitRequest(self.holder_id, self.store.epoch, items)
        reply: api.CommitReply = self.settle(self.store.commit(self.now_s, request))
        self.seen["commits"] += reply.committed == (True,)

    def abort(self, work: Work) -> None:
        self.works.remove(work)
        self.aborted.append(work.key)
        self.store.abort(self.now_s, api.AbortRequest(self.holder_id, self.store.epoch, (work.grant_id,)))
        self.seen["aborts"] += 1

    def match(self) -> None:
        i = self.rng.randrange(KEYS)
        group = api.GroupKeys(0, tuple(_key(j) for j in range(i + 1)), tuple(range(i + 1)))
        request = api.MatchRequest(self.holder_id, "r", CHUNK_TOKENS, (group,))
        reply = self.store.match(self.now_s, request, StoredChunks.of(self.index.chunks))
        for chunk in reply.chunks:
            units = bytes_of(self.drives, chunk)
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


def _header(
    item: api.ReserveItem, size: api.ShardSize, extent: api.Extent, first: api.Extent, digests: tuple[bytes, ...]
) -> ChunkHeader:
    """``first``: where the chunk's first shard goes."""
    is_one = len(item.shards) == 1
    return ChunkHeader(
        pool_uuid=POOL_UUID,
        identity=IDENTITY,
        key=item.key,
        tenant="default",
        group=0,
        rank=size.rank,
        shard_count=len(item.shards),
        position_tokens=item.position_tokens,
        token_count=CHUNK_TOKENS,
        segment=extent.segment,
        generation=extent.generation,
        lba=extent.lba,
        unit_bytes=size.unit_bytes,
        unit_digests=digests,
        first_lba=0 if is_one else pool_lba(first.namespace, first.lba),
        first_generation=0 if is_one else first.generation,
    )


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
