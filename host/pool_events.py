"""What the pool client is asked for and what it answers: the values that cross from its threads to the scheduler's.

They are made on the client's threads in the form the scheduler's thread needs, so that it has nothing to do for each
chunk: columns to slice and pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.dpu.api import types as api


class StoredPrefix(NamedTuple):
    """The leading chunks of one request that the pool has. A column each: ``keys`` and ``extents`` have an entry for
    each chunk, ``unit_lbas`` and ``unit_digests`` for each unit (block)."""

    keys: tuple[bytes, ...] = ()
    extents: tuple[api.Extent, ...] = ()
    unit_lbas: tuple[int, ...] = ()
    unit_digests: tuple[bytes, ...] = ()

    @property
    def chunk_count(self) -> int:
        return len(self.keys)


NOTHING_STORED = StoredPrefix()


class ReserveWish(NamedTuple):
    """Places for a run of consecutive chunks, the first at ``position_tokens``. Their keys are made from ``keys_of`` on
    the client's thread, not on the scheduler's; None: they cannot be made.

    ``identity``: what ``keys_of`` builds on. A place under another identity would keep the key from its owners.
    """

    run_id: int
    identity: bytes
    position_tokens: int
    chunk_count: int
    keys_of: Callable[[], tuple[bytes, ...] | None]


class GrantedRun(NamedTuple):
    """What may be written now, under whom: the columns have an entry for each granted chunk, ``indexes`` says which
    chunks of the run (from 0) they are; ``extents`` has the fields of each :class:`Extent`, since plain tuples cross to
    the worker's process fast."""

    holder_id: str
    epoch: int
    identity: bytes
    indexes: tuple[int, ...]
    keys: tuple[bytes, ...]
    grant_ids: tuple[str, ...]
    extents: tuple[tuple[int, int, int, int, int], ...]


class Matched(NamedTuple):
    """Answer to :meth:`PoolClient.match`; no lease and nothing stored for a miss, whatever the reason."""

    request_id: str
    attempt: int
    lease_id: str
    stored: StoredPrefix


class Reserved(NamedTuple):
    """Answer to :meth:`PoolClient.reserve`, one for each wish. ``outcomes`` counts the run's chunks; ``granted`` is
    None when there is nothing to write; ``no_space``: chunks (from 0) worth asking for again."""

    run_id: int
    outcomes: Mapping[api.ReserveOutcome, int]
    no_space: tuple[int, ...]
    granted: GrantedRun | None


class ReserveFailed(NamedTuple):
    """The service could not be asked about this run."""

    run_id: int


class Committed(NamedTuple):
    committed_count: int
    refused_count: int


class LeasesLost(NamedTuple):
    lease_ids: tuple[str, ...]


class Attached(NamedTuple):
    """A new attachment: workers must switch to it before anything is saved."""

    attachment: api.Attachment


@dataclass(frozen=True, slots=True)
class AttachmentLost:
    """The service is away, or knows us no more: leases are void. Stays inside the client: lookups are then misses."""


Event = Matched | Reserved | ReserveFailed | Committed | LeasesLost | Attached
