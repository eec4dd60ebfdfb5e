"""What an open pool tells people: its status, and its chunks page by page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from meshfusion.dpu.api import types as api
from meshfusion.dpu.index import Index
from meshfusion.dpu.store.store import Store
from meshfusion.jbof.format import FORMAT_VERSION


def status_of(
    store: Store,
    index: Index,
    pool_uuid: str,
    directory: Path,
    now_s: float,
    *,
    other_counts: Counter[str],
    exports_problem: str,
    transactions_pending: int,
) -> api.PoolStatus:
    """Under the pool's mutex, the index too: a chunk then always shows as granted, as committed or as both."""
    geometry, counts = store.segments.geometry, store.segments.counts()
    stopped = Counter(saves_stopped_ms=round(1000 * store.saves.stopped_s(now_s)))
    return api.PoolStatus(
        pool_uuid=pool_uuid,
        path=str(directory),
        format_version=FORMAT_VERSION,
        epoch=store.epoch,
        lba_bytes=geometry.lba_bytes,
        segment_bytes=geometry.segment_bytes,
        segment_count=geometry.segment_count,
        segments_free=counts.free,
        segments_open=counts.open + counts.opening,
        segments_sealed=counts.sealed,
        segments_reclaiming=0,
        segments_quarantined=store.quarantined_segment_count(),
        capacity_bytes=geometry.segment_bytes * geometry.segment_count,
        committed_chunk_count=index.chunk_count(),
        committed_payload_bytes=index.payload_bytes,
        pinned_bytes=store.leases.pinned_bytes,
        lease_count=len(store.leases),
        grant_count=len(store.grants),
        saves_stopped_reason=store.saves_stopped_reason(now_s),
        holders=store.holder_statuses(now_s),
        counters=tuple(sorted((store.counts + other_counts + stopped).items())),
        exports_problem=exports_problem,
        oldest_grant_s=store.grants.oldest_s(now_s),
        oldest_lease_s=store.leases.oldest_s(now_s),
        transactions_pending=transactions_pending,
    )


def list_chunks(index: Index, request: api.ListRequest) -> api.ListReply:
    """One page of chunks; shared by the open pool and by read-only inspection."""
    wanted: list[api.ChunkRecord] = []
    after = request.after_key
    while len(wanted) <= request.limit:
        page = index.chunks_after(after, 256)
        wanted.extend(c for c in page if not request.identity or c.identity == request.identity)
        if len(page) < 256:
            break
        after = page[-1].key
    page_chunks = tuple(wanted[: request.limit])
    more = len(wanted) > request.limit
    return api.ListReply(page_chunks, page_chunks[-1].key if more and page_chunks else b"")
