"""An open pool: the store's surroundings. Time, the index, the owner lock and threads live here.

``Pool`` implements :class:`~meshfusion.dpu.api.types.ChunkService` in process; the gRPC server wraps it. Matching reads
the index beside the writer (LMDB snapshots), so a commit's sync never holds up a lookup.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import create_liveness, forget_liveness, take_liveness_away
from meshfusion.dpu.index import Index, IndexTotals
from meshfusion.dpu.index_files import open_index, scan_in_child
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import LIVENESS_SUFFIX, PoolLayout, create_pool, geometry_of, read_label_copies
from meshfusion.dpu.pool_inspect import CheckReport, check_pool, inspect_pool
from meshfusion.dpu.pool_writer import TransactionWriter
from meshfusion.dpu.store.checks import refuse_unserved
from meshfusion.dpu.store.store import NAMESPACE, Reply, Step, Store, StoreOptions
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.format import FORMAT_VERSION, Label
from meshfusion.jbof.segments import SegmentTable

logger = logging.getLogger("meshfusion.pool")

TICK_S = 1.0
INDEX_SCAN_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class PoolOptions(StoreOptions):
    """Store options plus ``heartbeat_s``: how often holders must be heard from."""

    heartbeat_s: float = 5.0


class Pool:
    """One pool, owned by this process until :meth:`close`."""

    def __init__(
        self,
        layout: PoolLayout,
        label: Label,
        options: PoolOptions,
        owner: OwnerLock,
        index: Index,
        totals: IndexTotals,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._label = label
        self._options = options
        self._owner = owner
        self._index = index
        self._clock = clock
        epoch = index.next_epoch()
        self._store = Store(
            SegmentTable(geometry_of(label), index.segment_records()),
            options,
            epoch=epoch,
            former_holders=index.holder_records(),
            now_s=clock(),
        )
        self._store.counters["index_entries_damaged"] = totals.damaged_count
        self._mutex = threading.Lock()
        self._ending: dict[int, str] = {}  # ticket of a fence or a farewell -> holder
        self._writer = TransactionWriter(index, self._settle)
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick_loop, name="meshfusion-tick", daemon=True)
        self._forget_unlisted()
        self._probe_holders(clock())
        self._ticker.start()

    @classmethod
    def open(
        cls, path: Path, options: PoolOptions | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> Pool:
        """Own the pool at ``path``. Raises PoolBusyError, FormatError or MediaError, each with a way out."""
        layout = PoolLayout(path.absolute())
        label, label_problems = read_label_copies(layout)
        owner = OwnerLock.take(layout)
        try:
            pool_uuid = str(uuid.UUID(bytes=label.pool_uuid))
            capacity_bytes = geometry_of(label).capacity_bytes
            totals = scan_in_child(layout.index, pool_uuid, capacity_bytes, deadline_s=INDEX_SCAN_DEADLINE_S)
            index = open_index(layout.index, pool_uuid, capacity_bytes, payload_bytes=totals.payload_bytes)
            if label_problems:
                logger.warning("%s; the other copy is used", "; ".join(label_problems))
            try:
                return cls(layout, label, options or PoolOptions(), owner, index, totals, clock)
            except BaseException:
                index.close()
                raise
        except BaseException:
            owner.release()
            raise

    # ---- ChunkService --------------------------------------------------------------------------------------------

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        refuse_unserved(request)  # before its incarnation becomes the name of a file
        liveness = self._layout.liveness(request.incarnation)
        with self._mutex:
            # The file before the durable listing: a listed holder whose file is missing could never be called gone.
            if not self._store.holders.knows(request.incarnation) and not self._store.holders.is_fenced(
                request.incarnation
            ):
                create_liveness(liveness)
            step = self._store.attach(self._clock(), request)
            self._submit(step)
        holder_id = self._wait(step, deadline_s)
        geometry = geometry_of(self._label)
        namespace = api.Namespace(
            nsid=NAMESPACE,
            path=str(self._layout.data.absolute()),
            lba_bytes=geometry.lba_bytes,
            lba_count=geometry.data_start_lba + geometry.segment_count * geometry.segment_lba_count,
        )
        return api.Attachment(
            pool_uuid=self.pool_uuid,
            holder_id=holder_id,
            epoch=self._store.epoch,
            namespaces=(namespace,),
            liveness_path=str(liveness),
            lease_ttl_s=self._options.lease_ttl_s,
            grant_ttl_s=self._options.grant_ttl_s,
            heartbeat_s=self._options.heartbeat_s,
        )

    def match(self, request: api.MatchRequest, *, deadline_s: float) -> api.MatchReply:
        found = self._index.get_many(request.keys)
        with self._mutex:
            return self._store.match(self._clock(), request, found)

    def release(self, request: api.ReleaseRequest, *, deadline_s: float) -> None:
        with self._mutex:
            self._store.release(self._clock(), request)

    def reserve(self, request: api.ReserveRequest, *, deadline_s: float) -> api.ReserveReply:
        stored = self._index.get_many(item.key for item in request.items)
        with self._mutex:
            step = self._store.reserve(self._clock(), request, stored)
            self._submit(step)
        try:
            return self._wait(step, deadline_s)
        except MeshFusionError:  # the holder never learns of its grants: nothing can be in flight under them
            grant_ids = tuple(result.grant_id for result in step.reply.results if result.grant_id)
            self.abort(api.AbortRequest(request.holder_id, request.epoch, grant_ids), deadline_s=deadline_s)
            raise

    def commit(self, request: api.CommitRequest, *, deadline_s: float) -> api.CommitReply:
        with self._mutex:
            step = self._store.commit(self._clock(), request)
            self._submit(step)
        return self._wait(step, deadline_s)

    def abort(self, request: api.AbortRequest, *, deadline_s: float) -> None:
        with self._mutex:
            self._store.abort(self._clock(), request)

    def heartbeat(self, request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        with self._mutex:
            return self._store.heartbeat(self._clock(), request)

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        found = self._index.get_many((request.key,)).get(request.key)
        with self._mutex:
            step = self._store.drop(self._clock(), request, found)
            self._submit(step)
        logger.warning("chunk %s dropped: %r", request.key.hex(), request.reason)
        return self._wait(step, deadline_s)

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        """Believed only when the holder's liveness lock is free; else it is probed like any silent holder."""
        with self._mutex:  # so that the holder cannot attach anew between its lock and its end
            if not self._store.holders.knows(request.holder_id):
                return
            if not take_liveness_away(self._layout.liveness(request.holder_id)):
                logger.warning("holder %s detached while a process of it lives; it is watched", request.holder_id)
                return
            step = self._store.detach(self._clock(), request)
            self._ending[step.ticket] = request.holder_id
            self._submit(step)
        self._wait(step, deadline_s)

    def status(self, *, deadline_s: float) -> api.PoolStatus:
        with self._mutex:  # the index too: a chunk then always shows as granted, as committed or as both
            return self._status(self._index.chunk_count(), self._index.payload_bytes)

    def list_chunks(self, request: api.ListRequest, *, deadline_s: float) -> api.ListReply:
        return list_chunks(self._index, request)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> api.ChunkRecord | None:
        return self._index.get_many((key,)).get(key)

    def announce_service(self, address: str) -> None:
        """Let whoever finds the pool in use learn where it is served."""
        self._owner.announce_service(address)

    def close(self) -> None:
        """Stop, give the pool up. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._ticker.join()
        self._writer.close()
        self._index.close()
        self._owner.release()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pool_uuid(self) -> str:
        return str(uuid.UUID(bytes=self._label.pool_uuid))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _submit(self, step: Step[object]) -> None:
        """Under the mutex, so that tickets reach the writer in order."""
        if step.effects:
            self._writer.submit(step.ticket, step.effects)

    def _wait(self, step: Step[Reply], deadline_s: float) -> Reply:
        """The reply, once everything it stands on is durable."""
        for ticket in (step.ticket, step.after):  # the later one first: the second wait then returns at once
            if ticket:
                self._writer.wait(ticket, deadline_s)
        return step.reply

    def _settle(self, ticket: int, error: MeshFusionError | None) -> None:
        """Called by the writer, in ticket order, before waiters are woken."""
        with self._mutex:
            ending = self._ending.pop(ticket, None)
            if error is None:
                self._store.durable(ticket)
                if ending is not None:
                    forget_liveness(self._layout.liveness(ending))
            else:
                self._store.failed(self._clock(), ticket, error.message)
        if error is not None:
            logger.error("index transaction failed, saves pause: %s", error)

    def _tick_loop(self) -> None:
        while not self._stop.wait(TICK_S):
            now_s = self._clock()
            with self._mutex:
                self._store.tick(now_s)
            self._probe_holders(now_s)

    def _probe_holders(self, now_s: float) -> None:
        with self._mutex:  # so that no holder attaches anew between its lock and its fence
            for holder_id in self._store.holders.to_probe(now_s):
                if take_liveness_away(self._layout.liveness(holder_id)):
                    logger.info("holder %s is gone: fenced", holder_id)
                    step = self._store.holder_is_gone(now_s, holder_id)
                    self._ending[step.ticket] = holder_id
                    self._submit(step)

    def _forget_unlisted(self) -> None:
        """Liveness files of holders that left or were fenced just before an earlier owner of the pool ended."""
        for path in self._layout.holders.glob(f"*{LIVENESS_SUFFIX}"):
            if not self._store.holders.knows(path.name.removesuffix(LIVENESS_SUFFIX)):
                forget_liveness(path)

    def _status(self, chunk_count: int, payload_bytes: int) -> api.PoolStatus:
        store, geometry = self._store, geometry_of(self._label)
        counts = store.segments.counts()
        return api.PoolStatus(
            pool_uuid=self.pool_uuid,
            path=str(self._layout.directory),
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
            capacity_bytes=geometry.capacity_bytes,
            committed_chunk_count=chunk_count,
            committed_payload_bytes=payload_bytes,
            pinned_bytes=store.leases.pinned_bytes,
            lease_count=len(store.leases),
            grant_count=len(store.grants),
            saves_stopped_reason=store.saves_stopped_reason(self._clock()),
            holders=store.holder_statuses(self._clock()),
            counters=tuple(sorted(store.counters.items())),
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


__all__ = ["CheckReport", "Pool", "PoolOptions", "check_pool", "create_pool", "inspect_pool", "list_chunks"]
