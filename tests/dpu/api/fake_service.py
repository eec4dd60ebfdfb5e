"""A chunk service in memory: enough behaviour to see every call cross the wire. Also runs as a process."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from typing import Any

from meshfusion.dpu.api import types as t
from meshfusion.jbof.errors import StaleHolderError


def make_chunk(number: int, *, identity: bytes = b"\x11" * 32, unit_count: int = 4) -> t.ChunkRecord:
    extent = t.Extent(namespace=1, segment=number, lba=number * 64, lba_count=33, generation=7)
    digests = tuple((number * 1000 + unit).to_bytes(8, "little") for unit in range(unit_count))
    shard = t.Shard(0, extent, payload_lba_offset=1, unit_lba_count=8, unit_bytes=32_768, unit_digests=digests)
    key = number.to_bytes(32, "big")
    return t.ChunkRecord(key, identity, "default", 0, number * 64, 64, (shard,))


def make_status(**changes: Any) -> t.PoolStatus:
    holder = t.HolderStatus("h-1", "vllm", "0.32.0", "box", 4242, 2, 1, 0.25, "live")
    status = t.PoolStatus(
        pool_uuid="3f6c0c1e-0000-4000-8000-000000000001",
        path="/var/lib/meshfusion/pool",
        format_version=1,
        epoch=3,
        lba_bytes=4096,
        segment_bytes=64 << 20,
        segment_count=64,
        segments_free=60,
        segments_open=1,
        segments_sealed=3,
        segments_reclaiming=0,
        segments_quarantined=1,
        capacity_bytes=4 << 30,
        committed_chunk_count=12,
        committed_payload_bytes=12 << 20,
        pinned_bytes=1 << 20,
        lease_count=2,
        grant_count=1,
        saves_stopped_reason="",
        holders=(holder,),
        counters=(("hits", 5), ("commits", 12)),
    )
    return dataclasses.replace(status, **changes)


class FakeChunkService:
    """``calls`` records what arrived; ``failure`` is raised by every call; ``delay_s`` makes every call slow."""

    def __init__(self, chunks: tuple[t.ChunkRecord, ...] = ()) -> None:
        self.chunks = {chunk.key: chunk for chunk in chunks}
        self.calls: list[tuple[str, object]] = []
        self.deadlines_s: list[float] = []
        self.failure: Exception | None = None
        self.delay_s = 0.0
        self.started = threading.Event()
        self.holders: set[str] = set()
        self.current_status = make_status()

    def _enter(self, name: str, request: object, deadline_s: float) -> None:
        self.calls.append((name, request))
        self.deadlines_s.append(deadline_s)
        self.started.set()
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure

    def _check_holder(self, holder_id: str) -> None:
        if holder_id not in self.holders:
            raise StaleHolderError(f"holder {holder_id} is unknown", next_step="Attach again.")

    def attach(self, request: t.AttachRequest, *, deadline_s: float) -> t.Attachment:
        self._enter("attach", request, deadline_s)
        holder_id = f"h-{len(self.holders) + 1}"
        self.holders.add(holder_id)
        namespace = t.Namespace(1, "/var/lib/meshfusion/pool/data", 4096, 1 << 20)
        return t.Attachment("pool-uuid", holder_id, 3, (namespace,), "/run/live/h", 30.0, 60.0, 5.0)

    def match(self, request: t.MatchRequest, *, deadline_s: float) -> t.MatchReply:
        self._enter("match", request, deadline_s)
        self._check_holder(request.holder_id)
        found = []
        for key in request.groups[0].keys:
            if key not in self.chunks:
                break
            found.append(self.chunks[key])
        return t.MatchReply("lease-1" if found else "", len(found), tuple(found))

    def release(self, request: t.ReleaseRequest, *, deadline_s: float) -> None:
        self._enter("release", request, deadline_s)

    def reserve(self, request: t.ReserveRequest, *, deadline_s: float) -> t.ReserveReply:
        self._enter("reserve", request, deadline_s)
        outcomes = list(t.ReserveOutcome)
        results = []
        for index, item in enumerate(request.items):
            outcome = outcomes[index % len(outcomes)]
            if outcome is t.ReserveOutcome.GRANTED:
                extents = tuple(t.Extent(1, 2, 64 * index, 33, 9) for _ in item.shards)
                results.append(t.ReserveResult(outcome, f"grant-{index}", extents))
            else:
                results.append(t.ReserveResult(outcome))
        return t.ReserveReply(tuple(results))

    def commit(self, request: t.CommitRequest, *, deadline_s: float) -> t.CommitReply:
        self._enter("commit", request, deadline_s)
        return t.CommitReply(tuple(item.grant_id != "grant-expired" for item in request.items))

    def abort(self, request: t.AbortRequest, *, deadline_s: float) -> None:
        self._enter("abort", request, deadline_s)

    def heartbeat(self, request: t.HeartbeatRequest, *, deadline_s: float) -> t.HeartbeatReply:
        self._enter("heartbeat", request, deadline_s)
        return t.HeartbeatReply(request.lease_ids[1:])

    def drop(self, request: t.DropRequest, *, deadline_s: float) -> bool:
        self._enter("drop", request, deadline_s)
        return self.chunks.pop(request.key, None) is not None

    def detach(self, request: t.DetachRequest, *, deadline_s: float) -> None:
        self._enter("detach", request, deadline_s)
        self.holders.discard(request.holder_id)

    def status(self, *, deadline_s: float) -> t.PoolStatus:
        self._enter("status", None, deadline_s)
        return self.current_status

    def list_chunks(self, request: t.ListRequest, *, deadline_s: float) -> t.ListReply:
        self._enter("list_chunks", request, deadline_s)
        later = [c for key, c in sorted(self.chunks.items()) if key > request.after_key]
        wanted = [c for c in later if not request.identity or c.identity == request.identity]
        page = wanted[: request.limit]
        return t.ListReply(tuple(page), page[-1].key if len(wanted) > len(page) else b"")

    def get_chunk(self, key: bytes, *, deadline_s: float) -> t.ChunkRecord | None:
        self._enter("get_chunk", key, deadline_s)
        return self.chunks.get(key)

    def close(self) -> None:
        self.calls.append(("close", None))


def main(address: str) -> None:
    """Serve until SIGTERM; prints one line when ready."""
    from meshfusion.dpu.api.server import serve

    server = serve(FakeChunkService((make_chunk(1),)), address)
    print(f"ready {server.address}", flush=True)
    signal.sigwait({signal.SIGTERM})
    server.stop(1.0)


if __name__ == "__main__":
    # Blocked before gRPC starts its threads, so that the signal reaches sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main(sys.argv[1])
