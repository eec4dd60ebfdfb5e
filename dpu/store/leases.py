"""Read leases: a reader's pin on the segments its chunks lie in.

Leases may lapse by time alone: a reader that comes too late reads bytes whose digest does not match (rule 4), so a
lapsed lease costs a recompute, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshfusion.dpu.store.segments import Segments


@dataclass(slots=True)
class Lease:
    lease_id: str
    holder_id: str
    request_id: str
    segments: tuple[int, ...]
    granted_s: float
    expires_s: float


class LeaseTable:
    """All live leases. Every lease pins each of its segments once."""

    def __init__(self, segments: Segments, *, epoch: int, ttl_s: float) -> None:
        self._segments = segments
        self._epoch = epoch  # part of every id: a late message from an earlier epoch must not name a lease of this one
        self._ttl_s = ttl_s
        self._leases: dict[str, Lease] = {}  # in the order in which they were granted
        self._of_holder: dict[str, dict[str, Lease]] = {}  # none for a holder without leases
        self._next = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def count_of(self, holder_id: str) -> int:
        return len(self._of_holder.get(holder_id, ()))

    def oldest_s(self, now_s: float) -> float:
        """How long ago the oldest lease was granted, however often it was renewed since; 0 while there is none."""
        oldest = next(iter(self._leases.values()), None)
        return 0.0 if oldest is None else max(0.0, now_s - oldest.granted_s)

    @property
    def pinned_bytes(self) -> int:
        """Space that cannot be reclaimed because of leases: that of every pinned segment, counted once."""
        return self._segments.read_pinned_count * self._segments.geometry.segment_bytes

    def grant(self, now_s: float, holder_id: str, request_id: str, segments: Iterable[int]) -> Lease:
        self._next += 1
        lease = Lease(
            lease_id=f"{holder_id[:8]}-{self._epoch}-{self._next}",
            holder_id=holder_id,
            request_id=request_id,
            segments=tuple(sorted(set(segments))),
            granted_s=now_s,
            expires_s=now_s + self._ttl_s,
        )
        for segment in lease.segments:
            self._segments.pin_read(segment)
        self._leases[lease.lease_id] = lease
        self._of_holder.setdefault(holder_id, {})[lease.lease_id] = lease
        return lease

    def release(self, holder_id: str, lease_id: str) -> bool:
        """Idempotent: an unknown, lapsed or foreign lease is left alone."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder_id != holder_id:
            return False
        self._drop(lease)
        return True

    def renew(self, now_s: float, holder_id: str, lease_ids: Iterable[str]) -> tuple[str, ...]:
        """Extend the holder's leases; returns the ones that are gone."""
        lost = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.holder_id != holder_id:
                lost.append(lease_id)
            else:
                lease.expires_s = now_s + self._ttl_s
        return tuple(lost)

    def expire(self, now_s: float) -> int:
        expired = [lease for lease in self._leases.values() if lease.expires_s <= now_s]
        for lease in expired:
            self._drop(lease)
        return len(expired)

    def drop_holder(self, holder_id: str) -> int:
        dropped = tuple(self._of_holder.get(holder_id, {}).values())
        for lease in dropped:
            self._drop(lease)
        return len(dropped)

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        held = self._of_holder[lease.holder_id]
        del held[lease.lease_id]
        if not held:
            del self._of_holder[lease.holder_id]
        for segment in lease.segments:
            self._segments.unpin_read(segment)
