"""Lookups: what a request can resume from, and the lease on it. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import check_groups
from meshfusion.dpu.api.tenant import CHUNK_TENANT
from meshfusion.dpu.store.attending import Attending
from meshfusion.dpu.store.boundary import Boundary, longest_boundary
from meshfusion.dpu.store.checks import PROBE_KIND
from meshfusion.dpu.store.curator import Curator
from meshfusion.dpu.store.holders import Holder
from meshfusion.dpu.store.leases import LeaseTable
from meshfusion.dpu.store.segments import Segments, is_readable


class Reading:
    """``max_pinned_fraction``: of the segments, by leases."""

    def __init__(
        self,
        segments: Segments,
        leases: LeaseTable,
        curator: Curator,
        attending: Attending,
        *,
        max_pinned_fraction: float,
    ) -> None:
        self._segments = segments
        self._leases = leases
        self._curator = curator
        self._attending = attending
        self._max_pinned_fraction = max_pinned_fraction
        self.counters: Counter[str] = Counter()

    def retune(self, *, max_pinned_fraction: float) -> None:
        """Leases that are out stay."""
        self._max_pinned_fraction = max_pinned_fraction

    def match(self, now_s: float, request: api.MatchRequest, found: Mapping[bytes, api.ChunkRecord]) -> api.MatchReply:
        check_groups(request.groups)
        holder = self._attending.served(now_s, request.holder_id, None)

        def find(group: api.GroupKeys, i: int) -> api.ChunkRecord | None:
            record = found.get(group.keys[i])
            return record if record is not None and self._is_servable(record, group, i, holder, request) else None

        pinned_max = int(self._max_pinned_fraction * self._segments.geometry.segment_count)
        boundary = longest_boundary(request.groups, find, self._segments, pinned_max)
        if holder.record.engine_kind != PROBE_KIND:  # its lookups always hit, and say nothing of engines
            self._count(request, boundary)
        self._curator.asked(now_s, request.holder_id, holder.record.identity, request, boundary.chunk_count)
        if not boundary.chunk_count:
            return api.MatchReply("", 0, ())
        for segment in boundary.segments:
            self._segments.used(segment, now_s)
        self._curator.used(boundary.segments)
        lease = self._leases.grant(now_s, request.holder_id, request.request_id, boundary.segments)
        return api.MatchReply(lease.lease_id, boundary.chunk_count, boundary.chunks)

    def _count(self, request: api.MatchRequest, boundary: Boundary) -> None:
        self.counters["match_requests"] += 1
        self.counters["match_keys"] += sum(len(group.keys) - group.keys.count(b"") for group in request.groups)
        self.counters["match_shortened_by_pins"] += boundary.is_shortened
        self.counters["matched_chunks"] += len(boundary.chunks)
        self.counters["leases_granted"] += boundary.chunk_count > 0

    def _is_servable(
        self, record: api.ChunkRecord, group: api.GroupKeys, i: int, holder: Holder, request: api.MatchRequest
    ) -> bool:
        servable = (
            record.key == group.keys[i]
            and record.identity == holder.record.identity
            and record.tenant == CHUNK_TENANT
            and record.group == group.group
            and record.position_tokens == i * request.chunk_tokens
            and record.token_count == request.chunk_tokens
        )
        if not servable:
            self.counters["match_refused_mismatch"] += 1
            return False
        return is_readable(self._segments, record)
