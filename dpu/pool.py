"""An open pool. Time, the index, the owner lock and threads live around its store.

``Pool`` implements :class:`~meshfusion.dpu.api.types.ChunkService` in process; the gRPC server wraps it. Matching reads
the index beside the writer (LMDB snapshots), so a commit's sync never holds up a lookup. How a pool is taken is in
:mod:`meshfusion.dpu.pool_opening`, what else goes on in it while it is served in :mod:`meshfusion.dpu.pool_parts`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.service_types import KeyChange
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.drain import Held
from meshfusion.dpu.drive_keys import DriveKeys
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.drive_owners import OpenReservable, open_block_reservable
from meshfusion.dpu.index_proof import FIRST_LOOK_S
from meshfusion.dpu.line_limit import LineLimit, quoted
from meshfusion.dpu.pool_create import create_pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_inspect import CheckReport, check_pool, inspect_pool
from meshfusion.dpu.pool_opening import MakeExports, PoolOptions, Taking, take_pool
from meshfusion.dpu.pool_parts import PoolParts, wire
from meshfusion.dpu.pool_status import list_chunks, status_of
from meshfusion.dpu.progress import Progress
from meshfusion.dpu.reserve_parts import in_parts, joined, part_of
from meshfusion.dpu.segment_map import SegmentMapper, SegmentView
from meshfusion.dpu.store.checks import refuse_unserved
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.tuning import Tuning
from meshfusion.jbof.drives.system.luks import CRYPTSETUP, Luks
from meshfusion.jbof.errors import FormatError, MeshFusionError
from meshfusion.jbof.pool_addresses import drive_of_namespace

logger = logging.getLogger("meshfusion.pool")


DAMAGE_LINES_PER_MINUTE: Final = 20  # of the log; the counters dropped_reports and dropped_chunks have them all


class Pool:
    """One pool, owned by this process until :meth:`close`."""

    def __init__(self, parts: PoolParts) -> None:
        """``parts``: started, and the pool's from now on."""
        self._parts = parts
        taken = parts.taken
        self.pool_uuid = taken.pool_uuid
        self.drive_admin = parts.drive_admin
        self._options, self._clock = taken.options, taken.clock
        self._store, self._index, self._mutex = taken.store, taken.index, parts.mutex
        self._holders, self._drives, self._transactions = parts.holders, parts.drives, parts.transactions
        self._damage_lines = LineLimit(DAMAGE_LINES_PER_MINUTE)
        self.segment_view: SegmentView = SegmentMapper(taken.shelf, taken.store.grants, mutex=parts.mutex)
        self._is_closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        options: PoolOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        exports: MakeExports | None = None,
        damaged: Callable[[FormatError], None] | None = None,
        first_look_s: float = FIRST_LOOK_S,
        drive_options: DriveOptions | None = None,
        may_take_over: bool = False,
        open_reservable: OpenReservable = open_block_reservable,
        tenants: frozenset[str] = frozenset({DEFAULT_TENANT}),
        drive_keys: DriveKeys | None = None,
        luks: Luks = CRYPTSETUP,
    ) -> Pool:
        """Own the pool at ``path``. ``exports`` makes the keeper of its exports: without one, data is reached locally.
        ``damaged``: the pool may be served before its index is looked through, ``first_look_s`` after the scan's begin;
        it is told, from a thread, when the scan then finds that the process must end. Without it the whole comes first.

        ``may_take_over``: drives that another machine's service owns are taken from it: it is dead, or to be cut off.
        ``tenants``: whose engines may use it, and so see what it holds. ``drive_keys``: the service's, where it has
        other pools, too. ``luks``: encrypts drives that are added to an encrypted pool, whose slices are open.

        Raises PoolBusyError, FormatError or MediaError, each with a way out, what ``exports`` raises, and ConfigError
        when hosts may still reach the data through other exports than these, and when it holds what is of others.
        """
        taking = Taking(
            options or PoolOptions(),
            clock=clock,
            make_exports=exports,
            first_look_s=first_look_s if damaged is not None else None,
            may_take_over=may_take_over,
            open_reservable=open_reservable,
            tenants=tenants,
            drive_keys=drive_keys or DriveKeys(),
        )
        with contextlib.ExitStack() as opened:
            taken = take_pool(PoolLayout(path.absolute()), taking, opened)
            parts = wire(taken, drive_options or DriveOptions(), damaged, luks)
            opened.pop_all()  # the parts give it back, after their threads have ended
        try:
            parts.start()
        except BaseException:
            parts.close()
            raise
        return cls(parts)

    # ---- ChunkService --------------------------------------------------------------------------------------------

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        refuse_unserved(request, self._parts.taken.tenants)  # before its incarnation becomes the name of a file
        is_local = request.access is api.Access.LOCAL
        with self._mutex:  # before: what has come since then, the holder is to ask for
            version, namespaces = self._drives.reach.version, self._drives.namespaces(is_local=is_local)
        numbers = [drive_of_namespace(namespace.nsid) for namespace in namespaces]
        holder_id, export = self._holders.attach(request, numbers, deadline_s=deadline_s)
        with self._mutex:
            self._drives.reach.told(holder_id, version, numbers)
        return api.Attachment(
            pool_uuid=self.pool_uuid,
            holder_id=holder_id,
            epoch=self._store.epoch,
            namespaces=namespaces,
            liveness_path=str(self._parts.taken.layout.liveness(request.incarnation)) if is_local else "",
            lease_ttl_s=self._options.lease_ttl_s,
            grant_ttl_s=self._options.grant_ttl_s,
            heartbeat_s=self._options.heartbeat_s,
            export=export,
            drives_version=version,
        )

    def match(self, request: api.MatchRequest, *, deadline_s: float) -> api.MatchReply:
        found = self._index.stored([key for group in request.groups for key in group.keys if key])
        with self._mutex:
            return self._store.match(self._clock(), request, self._drives.known_to(request.holder_id, found))

    def release(self, request: api.ReleaseRequest, *, deadline_s: float) -> None:
        with self._mutex:
            self._store.release(self._clock(), request)

    def reserve(self, request: api.ReserveRequest, *, deadline_s: float) -> api.ReserveReply:
        """Lookups come between its parts. When one of them fails, all are given back."""
        end_s = time.monotonic() + deadline_s
        stored = self._index.get_many(item.key for item in request.items)
        parts = in_parts(request.items)
        steps: list[Step[api.ReserveReply]] = []
        try:
            for indices in parts:
                with self._mutex:
                    drives = self._drives.reach.places_of(request.holder_id)
                    step = self._store.reserve(self._clock(), part_of(request, indices), stored, drives)
                    self._transactions.submit(step)
                steps.append(step)
                time.sleep(0)  # a mutex is not handed on by being released: whoever waits has to run
            replies = [self._transactions.wait(step, max(0.0, end_s - time.monotonic())) for step in steps]
        except MeshFusionError:  # the holder never learns of its grants: nothing can be in flight under them
            results = (result for step in steps for result in step.reply.results)
            grant_ids = tuple(result.grant_id for result in results if result.grant_id)
            self.abort(api.AbortRequest(request.holder_id, request.epoch, grant_ids), deadline_s=deadline_s)
            raise
        return joined(parts, replies)

    def commit(self, request: api.CommitRequest, *, deadline_s: float) -> api.CommitReply:
        with self._mutex:
            step = self._store.commit(self._clock(), request)
            self._transactions.submit(step)
        return self._transactions.wait(step, deadline_s)

    def abort(self, request: api.AbortRequest, *, deadline_s: float) -> None:
        with self._mutex:
            self._store.abort(self._clock(), request)

    def heartbeat(self, request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        with self._mutex:
            reply = self._store.heartbeat(self._clock(), request)
            if request.reached is not None:
                self._drives.reach.says(request.holder_id, request.reached)
            version = self._drives.reach.version
        return replace(reply, drives_version=version, host_key=self._holders.new_key(request))

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        found = self._index.get_many((request.key,)).get(request.key)
        with self._mutex:
            step = self._store.drop(self._clock(), request, found)
            self._transactions.submit(step)
            self._drives.suspect(request.extent)
            passed_over = self._damage_lines.take(self._clock())
        if passed_over is not None:
            logger.warning("%s", _damage_line(request, passed_over, is_known=step.reply))
        return self._transactions.wait(step, deadline_s)

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        """Believed only when the holder's liveness lock is free; else it is probed like any silent holder. One that
        reaches a target is cut off, and forgotten when that is confirmed."""
        self._holders.detach(request, deadline_s=deadline_s)

    def status(self, *, deadline_s: float) -> api.PoolStatus:
        with self._mutex:
            return status_of(
                self._store,
                self._index,
                self.pool_uuid,
                self._parts.taken.layout.directory,
                self._clock(),
                other_counts=self._parts.taken.medium.counts + Counter(dict(self._drives.counters)),
                exports_problem=self._holders.exports_problem,
                transactions_pending=self._transactions.pending_count,
            )

    def list_chunks(self, request: api.ListRequest, *, deadline_s: float) -> api.ListReply:
        return list_chunks(self._index, request)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> api.ChunkRecord | None:
        return self._index.get_many((key,)).get(key)

    def replace_keys(self, holder_id: str, *, deadline_s: float) -> Mapping[str, KeyChange]:
        """Of this host, or with "" of all that reach the exports. Raises
        :class:`~meshfusion.jbof.errors.ServiceError` for one that does not."""
        return self._holders.replace_keys(holder_id, deadline_s=deadline_s)

    def held(self) -> Held:
        """What others have open here."""
        with self._mutex:
            return Held(writes=self._store.grants.awaited_count, leases=len(self._store.leases))

    def retune(self, tuning: Tuning) -> None:
        """From now on. Raises ConfigError for a budget of writes that no segment fits into: nothing has changed."""
        with self._mutex:
            self._drives.retune(
                self._clock(),
                drive_writes_per_day=tuning.drive_writes_per_day,
                check_interval_s=tuning.check_interval_s,
                drain_s=tuning.drain_s,
            )
            self._store.retune(
                max_pinned_fraction=tuning.max_pinned_fraction,
                quarantine_max_fraction=tuning.quarantine_max_fraction,
                free_fraction=tuning.free_fraction,
            )
        self._parts.drives_keeper.wake()

    def progress(self, *, patience_s: float) -> Progress | None:
        """How far the index' writer has come; None when the pool's lock cannot be had in that time."""
        if not self._mutex.acquire(timeout=patience_s):
            return None
        try:
            return self._transactions.progress
        finally:
            self._mutex.release()

    def has_holder(self, holder_id: str) -> bool:
        """Was it admitted, and is not known to be gone yet? From any thread, without waiting."""
        return self._store.holders.knows(holder_id)

    def announce_service(self, address: str, name: str = "") -> None:
        """Let whoever finds the pool in use learn where it is served, and by which name of several."""
        self._parts.taken.owner.announce_service(address, name)

    def close(self) -> None:
        """Stop, give the pool up; see :meth:`~meshfusion.dpu.pool_parts.PoolParts.close`. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._parts.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _damage_line(request: api.DropRequest, passed_over: int, *, is_known: bool) -> str:
    what = "is forgotten" if is_known else "is not there any more, or was written anew: nothing is forgotten"
    more = f"; {passed_over} reports before it were not logged" if passed_over else ""
    return f"chunk {request.key.hex()} was reported as damaged, {quoted(request.reason)}, and {what}{more}"


__all__ = ["CheckReport", "Pool", "PoolOptions", "check_pool", "create_pool", "inspect_pool", "list_chunks"]
