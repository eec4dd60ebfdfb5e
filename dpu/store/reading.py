"""Lookups: what a request can resume from, and the lease on it. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import check_groups
from meshfusion.dpu.api.packed_chunk import PackedChunks
from meshfusion.dpu.api.tenant import CHUNK_TENANT
from meshfusion.dpu.store.attending import Attending
from meshfusion.dpu.store.boundary import Boundary, Find, longest_boundary
from meshfusion.dpu.store.checks import PROBE_KIND
from meshfusion.dpu.store.curator import Curator
from meshfusion.dpu.store.holders import Holder
from meshfusion.dpu.store.leases import LeaseTable
from meshfusion.dpu.store.prefix import whole_prefix
from meshfusion.dpu.store.segments import Segments, is_readable
from meshfusion.dpu.store.stored_chunks import StoredChunks, Wanted


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

        mismatched: set[bytes] = set()

        def find(group: api.GroupKeys, i: int) -> api.ChunkRecord | None:
            record = found.get(group.keys[i])
            if record is None or not self._is_servable(record, group, i, holder, request, mismatched):
                return None
            return record

        pinned_max = int(self._max_pinned_fraction * self._segments.geometry.segment_count)
        boundary = self._at_once(request, holder, found, find, pinned_max)
        if boundary is None:
            boundary = longest_boundary(request.groups, find, self._segments, pinned_max)
        self.counters["match_refused_mismatch"] += len(mismatched)
        if holder.record.engine_kind != PROBE_KIND:  # its lookups always hit, and say nothing of engines
            self._count(request, boundary)
        self._curator.asked(now_s, request.holder_id, holder.record.identity, request, boundary.chunk_count)
        if not boundary.chunk_count:
            return api.MatchReply("", 0, ())
        for segment in boundary.segments:
            self._segments.used(segment, now_s)
        self._curator.used(boundary.segments)
        lease = self._leases.grant(now_s, request.holder_id, request.request_id, boundary.segments)
        return api.MatchReply(lease.lease_id, boundary.chunk_count, _as_found(boundary.chunks, found))

    def _at_once(
        self,
        request: api.MatchRequest,
        holder: Holder,
        found: Mapping[bytes, api.ChunkRecord],
        find: Find,
        pinned_max: int,
    ) -> Boundary | None:
        """The boundary, where all chunks can be looked at together."""
        if not isinstance(found, StoredChunks):
            return None
        identity, tokens, is_readable = holder.record.identity, request.chunk_tokens, self._segments.is_readable

        def sure_prefix(group: api.GroupKeys) -> list[tuple[int, ...]]:
            wanted = Wanted(group.keys, group.group, identity, CHUNK_TENANT, tokens, is_readable)
            return found.sure_prefix(wanted)

        return whole_prefix(request.groups, found, sure_prefix, find, self._segments, pinned_max)

    def _count(self, request: api.MatchRequest, boundary: Boundary) -> None:
        self.counters["match_requests"] += 1
        self.counters["match_keys"] += sum(len(group.keys) - group.keys.count(b"") for group in request.groups)
        self.counters["match_shortened_by_pins"] += boundary.is_shortened
        self.counters["matched_chunks"] += len(boundary.chunks)
        self.counters["leases_granted"] += boundary.chunk_count > 0

    def _is_servable(
        self,
        record: api.ChunkRecord,
        group: api.GroupKeys,
        i: int,
        holder: Holder,
        request: api.MatchRequest,
        mismatched: set[bytes],
    ) -> bool:
        """``mismatched``: the keys under which another chunk is stored than was asked for are added to it."""
        servable = (
            record.key == group.keys[i]
            and record.identity == holder.record.identity
            and record.tenant == CHUNK_TENANT
            and record.group == group.group
            and record.position_tokens == i * request.chunk_tokens
            and record.token_count == request.chunk_tokens
        )
        if not servable:
            mismatched.add(group.keys[i])
            return False
        return is_readable(self._segments, record)


def _as_found(chunks: Sequence[api.ChunkRecord], found: Mapping[bytes, api.ChunkRecord]) -> Sequence[api.ChunkRecord]:
    """As they are stored, where that is known: then nobody has to put them together anew."""
    if isinstance(found, StoredChunks) and not isinstance(chunks, PackedChunks):
        return found.packed(chunk.key for chunk in chunks)
    return chunks
