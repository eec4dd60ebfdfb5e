"""One worker incarnation: what it asks, what it writes, and when its writes land."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from meshfusion.dpu.api import types as api
from meshfusion.jbof.format import shard_lba_count
from meshfusion.jbof.pool_addresses import drive_of_segment, pool_lba
from tests.sim.dialects import Dialect
from tests.sim.medium import Token

HOST_COUNT = 4  # of a machine
UNIT_BYTES = 4096
SMALLEST_LBA_COUNT = 2  # of a chunk of one unit, with its header
CHUNK_TOKENS = 16
CHUNKS = 6  # of the one prompt that all engines serve
# The KV groups of the models: everything; the last two chunks; a state after every second chunk; what is local to
# stretches of two chunks, of which the second is of no use to any boundary.
FULL, WINDOW, STATE, LOCAL = range(4)
MODELS = (
    *((FULL,),) * 3,
    *((FULL, WINDOW),) * 2,
    (WINDOW, FULL),
    (FULL, WINDOW, STATE),
    (STATE,),
    (LOCAL, WINDOW),
)
IDENTITIES = (b"A" * api.IDENTITY_BYTES, b"B" * api.IDENTITY_BYTES)


@dataclass
class Work:
    """A grant as its holder sees it. ``planned``: blocks (pool LBAs) not submitted yet; ``in_flight``: landing at any
    time."""

    grant_id: str
    item: api.ReserveItem = field(repr=False)
    extents: tuple[api.Extent, ...]
    expires_s: float
    epoch: int
    planned: list[tuple[int, Token]] = field(repr=False)
    in_flight: list[tuple[int, Token]] = field(default_factory=list, repr=False)
    is_started: bool = False
    lands_from_s: float = 0.0  # a drive may take its time
    is_doubtful: bool = False  # its holder cannot tell what became of it
    is_failed: bool = False  # a write of it came back with an error, and its holder knows
    is_given_back: bool = False  # its holder has said what became of it
    to_replay: list[tuple[int, Token]] = field(default_factory=list, repr=False)  # by its initiator, if it reconnects

    @property
    def is_written(self) -> bool:
        return not (self.planned or self.in_flight or self.is_doubtful or self.is_failed)

    @property
    def drives(self) -> frozenset[int]:
        return frozenset(drive_of_segment(extent.segment) for extent in self.extents)


@dataclass
class Host:
    """``lock_held``: its liveness lock, with local access. ``leaving``: it takes no new work and drains.
    ``machine``: where it runs with local access, or whose target it uses."""

    holder_id: str
    identity: bytes
    access: api.Access
    dialect: Dialect = Dialect.OURS
    machine: str = ""
    epoch: int = 0
    lock_held: bool = False
    is_attached: bool = False
    is_alive: bool = True
    is_leaving: bool = False
    silent_s: float = 0.0  # for how long, this time
    silent_until_s: float = 0.0
    works: list[Work] = field(default_factory=list)
    leases: dict[str, tuple[api.ChunkRecord, ...]] = field(default_factory=dict)
    read: list[api.ChunkRecord] = field(default_factory=list)  # the last ones, whatever became of them
    asked: int = 0  # requests on their way
    asks_for_drives: bool = True  # else it is of an earlier version
    is_asking: bool = False  # for them
    told_version: int = 0  # of the drives that it was told of last
    told: frozenset[int] = frozenset()
    named: dict[int, int] = field(default_factory=dict)  # each drive that it was told of, as it was then
    proven: dict[int, int] = field(default_factory=dict)  # the same, of those that it has opened over its target
    reached: api.Reached | None = None  # as it says
    has_said: bool = False  # so, and the service has heard it

    @property
    def in_flight(self) -> list[Work]:
        return [work for work in self.works if work.in_flight]

    @property
    def is_drained(self) -> bool:
        return not any(work.in_flight or work.to_replay for work in self.works)

    def die(self) -> None:
        """The kernel ends its writes and frees its lock. What a target has received, it may write all the same."""
        self.is_alive = self.lock_held = self.is_attached = False
        self.works = [] if self.access is api.Access.LOCAL else self.in_flight
        for work in self.works:
            work.planned.clear()
            work.to_replay.clear()
        self.leases.clear()

    def submit_writes(self, work: Work, lands_from_s: float) -> None:
        work.is_started = True
        work.lands_from_s = lands_from_s
        work.in_flight.extend(work.planned)
        work.planned.clear()


def make_work(host: Host, item: api.ReserveItem, result: api.ReserveResult, expires_s: float) -> Work:
    planned = [
        (
            pool_lba(extent.namespace, extent.lba) + offset,
            Token(
                item.key,
                host.identity,
                item.position_tokens,
                extent.segment,
                extent.generation,
                result.grant_id,
                offset,
            ),
        )
        for extent in result.extents
        for offset in range(extent.lba_count)
    ]
    return Work(result.grant_id, item, result.extents, expires_s, host.epoch, planned)


def key(group: int, i: int) -> bytes:
    return bytes([group, i]) * 16


def is_stored(group: int, i: int) -> bool:
    """Is a chunk of any use to a boundary after it?"""
    return group != LOCAL or i % 2 == 0


def needed(group: int, boundary: int) -> range:
    """The chunks that must be there to resume at a boundary."""
    first = {FULL: 0, WINDOW: max(0, boundary - 2), STATE: boundary - 1, LOCAL: boundary // 2 * 2}[group]
    return range(first, boundary)


def random_lookup(rng: random.Random) -> tuple[api.GroupKeys, ...]:
    count = rng.randint(1, CHUNKS)
    return tuple(
        api.GroupKeys(
            group,
            tuple(key(group, i) if is_stored(group, i) else b"" for i in range(count)),
            tuple(needed(group, boundary).start for boundary in range(1, count + 1)),
        )
        for group in rng.choice(MODELS)
    )


def random_items(rng: random.Random) -> tuple[api.ReserveItem, ...]:
    """What all groups of a model keep of a few chunks in a row; no states but after every second chunk."""
    first = min(rng.randrange(CHUNKS), rng.randrange(CHUNKS))  # the first of a prompt are asked for most
    groups = rng.choice(MODELS)
    places = [(group, i) for i in range(first, min(first + rng.randint(1, 2), CHUNKS)) for group in groups]
    return tuple(
        _random_item(rng, group, i)
        for group, i in places
        if is_stored(group, i) and not (group == STATE and i % 2 == 0)
    )


def _random_item(rng: random.Random, group: int, i: int) -> api.ReserveItem:
    """Mostly at the key's own position; sometimes elsewhere, as after a hash collision."""
    position = i if rng.random() < 0.95 else rng.randrange(CHUNKS)
    size = api.ShardSize(rank=0, unit_bytes=UNIT_BYTES, unit_count=rng.choice((1, 1, 1, 2, 4, 11)))
    return api.ReserveItem(key(group, i), group, position * CHUNK_TOKENS, CHUNK_TOKENS, (size,))


def item_of_size(key: bytes, lba_count: int) -> api.ReserveItem:
    size = api.ShardSize(rank=0, unit_bytes=UNIT_BYTES, unit_count=lba_count - 1)
    assert shard_lba_count(size.unit_bytes, size.unit_count) == lba_count
    return api.ReserveItem(key, 0, 0, CHUNK_TOKENS, (size,))


def attach_request(host: Host) -> api.AttachRequest:
    return api.AttachRequest(
        incarnation=host.holder_id,
        engine_kind="vllm",
        engine_version="0",
        host="sim",
        pid=1,
        identity=host.identity,
        rank_count=1,
        access=host.access,
        api_version=host.dialect.api_version,
    )


def commit_item(work: Work, bundle: int) -> api.CommitItem:
    return api.CommitItem(work.grant_id, tuple((b"digest--",) * s.unit_count for s in work.item.shards), bundle)
