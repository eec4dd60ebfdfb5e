"""What the pool client is asked for and what it answers: the values that cross from its threads to the scheduler's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.dpu.api import types as api


@dataclass(frozen=True, slots=True)
class ReserveWish:
    """A chunk to reserve; its key is made from ``key_of`` on the client's thread, not on the scheduler's.

    ``identity``: what ``key_of`` builds on. A place under another identity would keep the key from its owners.
    """

    save_id: int
    identity: bytes
    key_of: Callable[[], bytes | None]
    position_tokens: int
    token_count: int
    shard: api.ShardSize


@dataclass(frozen=True, slots=True)
class Matched:
    """Answer to :meth:`PoolClient.match`; no lease and no chunks for a miss, whatever the reason."""

    request_id: str
    attempt: int
    lease_id: str
    chunks: tuple[api.ChunkRecord, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to :meth:`PoolClient.reserve`. ``results`` is None when the service could not be asked."""

    save_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    results: tuple[api.ReserveResult, ...] | None
    holder_id: str
    epoch: int
    identity: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    committed_count: int
    refused_count: int


@dataclass(frozen=True, slots=True)
class LeasesLost:
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attached:
    """A new attachment: workers must switch to it before anything is saved."""

    attachment: api.Attachment


Event = Matched | Reserved | Committed | LeasesLost | Attached
