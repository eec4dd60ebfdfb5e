"""One worker incarnation: what it asks, what it writes, and when its writes land."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from meshfusion.dpu.api import types as api
from meshfusion.jbof.format import shard_lba_count
from tests.sim.medium import Token

UNIT_BYTES = 4096
CHUNK_TOKENS = 16
KEYS = tuple(bytes([i]) * api.KEY_BYTES for i in range(10))
IDENTITIES = (b"A" * api.IDENTITY_BYTES, b"B" * api.IDENTITY_BYTES)


@dataclass
class Work:
    """A grant as its holder sees it. ``planned``: blocks not submitted yet; ``in_flight``: landing at any time."""

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

    @property
    def is_written(self) -> bool:
        return not self.planned and not self.in_flight and not self.is_doubtful


@dataclass
class Host:
    """``lock_held``: its liveness lock, with local access. ``leaving``: it takes no new work and drains."""

    holder_id: str
    identity: bytes
    access: api.Access
    epoch: int = 0
    lock_held: bool = False
    is_attached: bool = False
    is_alive: bool = True
    is_leaving: bool = False
    silent_until_s: float = 0.0
    works: list[Work] = field(default_factory=list)
    leases: dict[str, tuple[api.ChunkRecord, ...]] = field(default_factory=dict)
    asked: int = 0  # requests on their way

    @property
    def in_flight(self) -> list[Work]:
        return [work for work in self.works if work.in_flight]

    def die(self) -> None:
        """The kernel ends its writes and frees its lock. What a target has received, it may write all the same."""
        self.is_alive = self.lock_held = self.is_attached = False
        self.works = [] if self.access is api.Access.LOCAL else self.in_flight
        for work in self.works:
            work.planned.clear()
        self.leases.clear()

    def submit_writes(self, work: Work, lands_from_s: float) -> None:
        work.is_started = True
        work.lands_from_s = lands_from_s
        work.in_flight.extend(work.planned)
        work.planned.clear()


def make_work(host: Host, item: api.ReserveItem, result: api.ReserveResult, expires_s: float) -> Work:
    planned = [
        (
            extent.lba + offset,
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


def random_item(rng: random.Random) -> api.ReserveItem:
    """Mostly at the key's own position; sometimes elsewhere, as after a hash collision."""
    i = min(rng.randrange(len(KEYS)), rng.randrange(len(KEYS)))  # the first of a prompt are asked for most
    position = i if rng.random() < 0.9 else rng.randrange(len(KEYS))
    size = api.ShardSize(rank=0, unit_bytes=UNIT_BYTES, unit_count=rng.choice((1, 2, 3, 5, 11)))
    return api.ReserveItem(KEYS[i], 0, position * CHUNK_TOKENS, CHUNK_TOKENS, (size,))


def full_segment_item(key: bytes, segment_lba_count: int) -> api.ReserveItem:
    size = api.ShardSize(rank=0, unit_bytes=UNIT_BYTES, unit_count=segment_lba_count - 1)
    assert shard_lba_count(size.unit_bytes, size.unit_count) == segment_lba_count
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
    )


def commit_item(work: Work) -> api.CommitItem:
    return api.CommitItem(work.grant_id, tuple((b"digest--",) * s.unit_count for s in work.item.shards))
