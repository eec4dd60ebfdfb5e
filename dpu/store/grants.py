"""Write grants: reservations of extents, and what is known of the writes under them.

A grant pins its segments until its fate is known: committed, aborted by its holder (which promises that no write is
outstanding), or its holder fenced. Time alone only makes it *expired*: its commit is refused and another writer may
try the same chunk, but its space stays quarantined, because a silent writer may still hit it (rule 3).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshfusion.dpu.api.types import Extent, ReserveItem
from meshfusion.dpu.store.segments import Segments


class GrantState(enum.Enum):
    LIVE = "live"
    COMMITTING = "committing"  # its index entry is being made durable
    EXPIRED = "expired"
    DOUBTFUL = "doubtful"  # its holder cannot tell what became of its writes: only a fence ends it


_QUARANTINED = (GrantState.EXPIRED, GrantState.DOUBTFUL)


@dataclass(slots=True)
class Grant:
    grant_id: str
    holder_id: str
    item: ReserveItem
    extents: tuple[Extent, ...]
    expires_s: float
    state: GrantState = GrantState.LIVE


class GrantTable:
    """All grants whose fate is not known yet."""

    def __init__(self, segments: Segments, *, epoch: int, ttl_s: float) -> None:
        self._segments = segments
        self._epoch = epoch  # part of every id: a late message from an earlier epoch must not name a grant of this one
        self._ttl_s = ttl_s
        self._grants: dict[str, Grant] = {}  # in the order in which they were given
        self._of_holder: dict[str, dict[str, Grant]] = {}  # none for a holder without grants
        self._writer_of: dict[bytes, str] = {}
        self._quarantined: Counter[int] = Counter()  # segment -> extents in it; looked at for every chunk
        self._next = 0

    def __len__(self) -> int:
        return len(self._grants)

    def __iter__(self) -> Iterator[Grant]:
        return iter(tuple(self._grants.values()))

    def count_of(self, holder_id: str) -> int:
        return len(self._of_holder.get(holder_id, ()))

    def oldest_s(self, now_s: float) -> float:
        """How long ago the oldest grant was given, which is for a fixed time; 0 while there is none."""
        oldest = next(iter(self._grants.values()), None)
        return 0.0 if oldest is None else max(0.0, now_s - (oldest.expires_s - self._ttl_s))

    def get(self, holder_id: str, grant_id: str) -> Grant | None:
        grant = self._grants.get(grant_id)
        return grant if grant is not None and grant.holder_id == holder_id else None

    def has_writer(self, key: bytes) -> bool:
        """Is a live grant out for this chunk? Then a second writer has nothing to do."""
        return key in self._writer_of

    def add(self, now_s: float, holder_id: str, item: ReserveItem, extents: tuple[Extent, ...]) -> Grant:
        assert item.key not in self._writer_of
        self._next += 1
        grant = Grant(f"{holder_id[:8]}-{self._epoch}-g{self._next}", holder_id, item, extents, now_s + self._ttl_s)
        for extent in extents:
            self._segments.pin_write(extent.segment)
        self._grants[grant.grant_id] = grant
        self._of_holder.setdefault(holder_id, {})[grant.grant_id] = grant
        self._writer_of[item.key] = grant.grant_id
        return grant

    def resolve(self, grant: Grant) -> None:
        """The fate of every write under this grant is known: its segments are free of it."""
        del self._grants[grant.grant_id]
        held = self._of_holder[grant.holder_id]
        del held[grant.grant_id]
        if not held:
            del self._of_holder[grant.holder_id]
        if grant.state in _QUARANTINED:
            for extent in grant.extents:
                self._quarantined[extent.segment] -= 1
                if not self._quarantined[extent.segment]:
                    del self._quarantined[extent.segment]
        self._forget_writer(grant)
        for extent in grant.extents:
            self._segments.unpin_write(extent.segment)

    def expire(self, now_s: float) -> int:
        late = [g for g in self._grants.values() if g.state is GrantState.LIVE and g.expires_s <= now_s]
        for grant in late:
            self._quarantine(grant, GrantState.EXPIRED)
        return len(late)

    def expire_in(self, is_lost: Callable[[int], bool]) -> int:
        """Those with a shard in such a segment are not to be committed any more; how many."""
        lost = [
            grant
            for grant in self._grants.values()
            if grant.state is GrantState.LIVE and any(is_lost(extent.segment) for extent in grant.extents)
        ]
        for grant in lost:
            self._quarantine(grant, GrantState.EXPIRED)
        return len(lost)

    def doubt(self, grant: Grant) -> None:
        """A write under it may still land, and nothing that its holder says later changes that."""
        assert grant.state is not GrantState.COMMITTING
        self._quarantine(grant, GrantState.DOUBTFUL)

    def of_holder(self, holder_id: str) -> tuple[Grant, ...]:
        return tuple(self._of_holder.get(holder_id, {}).values())

    @property
    def awaited_count(self) -> int:
        """Those that may yet be committed."""
        return sum(grant.state not in _QUARANTINED for grant in self._grants.values())

    @property
    def quarantined_segment_count(self) -> int:
        return len(self._quarantined)

    def is_quarantined(self, segment: int) -> bool:
        """May a write of unknown fate still land in it?"""
        return segment in self._quarantined

    def _quarantine(self, grant: Grant, state: GrantState) -> None:
        if grant.state not in _QUARANTINED:
            self._quarantined.update(extent.segment for extent in grant.extents)
        grant.state = state
        self._forget_writer(grant)

    def _forget_writer(self, grant: Grant) -> None:
        if self._writer_of.get(grant.item.key) == grant.grant_id:
            del self._writer_of[grant.item.key]
