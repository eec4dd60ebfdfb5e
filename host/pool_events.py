"""What the pool client is asked for and what it answers: the values that cross from its threads to the scheduler's.

They are made on the client's threads in the form the scheduler's thread needs, so that it has nothing to do for each
chunk: columns to slice and pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.tracing import NO_HEADERS, Headers


class StoredGroup(NamedTuple):
    """What the pool has of one KV group, as far as the boundary needs it: the group's chunks from ``first_chunk`` on,
    of which the blocks from ``first_block`` on are needed, both counted from the start of the request.

    A column each: ``keys`` and ``extents`` have an entry for each chunk, the latter of its first shard.
    ``unit_lbas`` and ``unit_digests`` have a column for each shard of the group's chunks, with an entry for each block.
    """

    first_chunk: int
    first_block: int
    keys: tuple[bytes, ...] = ()
    extents: tuple[api.Extent, ...] = ()
    unit_lbas: tuple[tuple[int, ...], ...] = ()
    unit_digests: tuple[tuple[bytes, ...], ...] = ()


class StoredBoundary(NamedTuple):
    """The longest boundary at which a request can resume: after ``chunk_count`` chunks. ``groups``: all KV groups of
    the engine, in its order."""

    chunk_count: int = 0
    groups: tuple[StoredGroup, ...] = ()


NOTHING_STORED = StoredBoundary()

ALONE = 0
"""The bundle of chunks that become visible whatever becomes of others."""


class ReserveWish(NamedTuple):
    """Places for the chunks of a run. A column each: ``groups`` and ``indexes`` say which they are (a chunk's number in
    its group, from the start of the request). Their keys are made from ``keys_of`` on the client's thread, not on the
    scheduler's; None: they cannot be made.

    ``identity``: what ``keys_of`` builds on. A place under another identity would keep the key from its owners.
    ``trace``: what asking for them belongs to.
    """

    run_id: int
    request_id: str
    identity: bytes
    groups: tuple[int, ...]
    indexes: tuple[int, ...]
    keys_of: Callable[[], tuple[bytes, ...] | None]
    trace: Headers = NO_HEADERS

    @property
    def chunk_count(self) -> int:
        return len(self.indexes)


class GrantedRun(NamedTuple):
    """What may be written now, under whom: the columns have an entry for each granted chunk, ``indexes`` says which
    chunks of the run (from 0) they are. ``extents`` has an entry for each shard, those of a chunk side by side: the
    fields of an :class:`Extent`, since plain tuples cross to the workers' processes fast. ``bundles``: chunks with the
    same one become visible together or not at all, but for :data:`ALONE`."""

    holder_id: str
    epoch: int
    identity: bytes
    indexes: tuple[int, ...]
    keys: tuple[bytes, ...]
    grant_ids: tuple[str, ...]
    extents: tuple[tuple[int, int, int, int, int], ...]
    bundles: tuple[int, ...]


RankDigests = tuple[tuple[bytes, ...] | None, ...]
"""What one rank wrote of a granted run: for each granted chunk the digests of its units. Empty where the chunk's shards
are for others to write, None where the write failed."""


class Matched(NamedTuple):
    """Answer to :meth:`PoolClient.match`; no lease and nothing stored for a miss, whatever the reason."""

    request_id: str
    attempt: int
    lease_id: str
    stored: StoredBoundary


class Reserved(NamedTuple):
    """Answer to :meth:`PoolClient.reserve`, one for each wish. ``outcomes`` counts the run's chunks; ``granted`` is
    None when there is nothing to write; ``not_now``: chunks (from 0) that got no place, and are worth asking for when
    they are computed again."""

    run_id: int
    outcomes: Mapping[api.ReserveOutcome, int]
    not_now: tuple[int, ...]
    granted: GrantedRun | None


class ReserveFailed(NamedTuple):
    """The service could not be asked about this run."""

    run_id: int


class Committed(NamedTuple):
    """Answer to :meth:`PoolClient.settle`, for the chunks that were to become visible: those that are, by their keys,
    and those of which that is not known."""

    visible_keys: tuple[bytes, ...]
    refused_keys: tuple[bytes, ...]


class Dropped(NamedTuple):
    """The service is being told to forget this chunk: what it holds failed its proof."""

    key: bytes


class LeasesLost(NamedTuple):
    lease_ids: tuple[str, ...]


class Attached(NamedTuple):
    """A new attachment: workers must switch to it before anything is saved."""

    attachment: api.Attachment


@dataclass(frozen=True, slots=True)
class AttachmentLost:
    """The service is away, or knows us no more: leases are void. Stays inside the client: lookups are then misses."""


Event = Matched | Reserved | ReserveFailed | Committed | Dropped | LeasesLost | Attached
