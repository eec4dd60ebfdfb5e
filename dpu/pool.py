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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.drive_keys import DriveKeys
from meshfusion.dpu.drive_owners import OpenReservable, open_block_reservable
from meshfusion.dpu.index_proof import FIRST_LOOK_S
from meshfusion.dpu.pool_create import create_pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_inspect import CheckReport, check_pool, inspect_pool
from meshfusion.dpu.pool_opening import MakeExports, PoolOptions, Taking, take_pool
from meshfusion.dpu.pool_parts import PoolParts, wire
from meshfusion.dpu.pool_status import list_chunks, status_of
from meshfusion.dpu.running_drives import DriveOptions
from meshfusion.dpu.store.checks import refuse_unserved
from meshfusion.jbof.errors import FormatError, MeshFusionError

logger = logging.getLogger("meshfusion.pool")


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
    ) -> Pool:
        """Own the pool at ``path``. ``exports`` makes the keeper of its exports: without one, data is reached locally.
        ``damaged``: the pool may be served before its index is looked through, ``first_look_s`` after the scan's begin;
        it is told, from a thread, when the scan then finds that the process must end. Without it the whole comes first.

        ``may_take_over``: drives that another machine's service owns are taken from it: it is dead, or to be cut off.
        ``tenants``: whose engines may use it, and so see what it holds. ``drive_keys``: the service's, where it has
        other pools, too.

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
            parts = wire(taken, drive_options or DriveOptions(), damaged)
            parts.start()
            pool = cls(parts)
            opened.pop_all()
        return pool

    # ---- ChunkService --------------------------------------------------------------------------------------------

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        refuse_unserved(request, self._parts.taken.tenants)  # before its incarnation becomes the name of a file
        is_local = request.access is api.Access.LOCAL
        holder_id, export = self._holders.attach(request, deadline_s=deadline_s)
        with self._mutex:
            self._drives.told(holder_id)
            version, namespaces = self._drives.version, self._drives.namespaces(is_local=is_local)
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
        found = self._index.get_many(key for group in request.groups for key in group.keys if key)
        with self._mutex:
            return self._store.match(self._clock(), request, self._drives.known_to(request.holder_id, found))

    def release(self, request: api.ReleaseRequest, *, deadline_s: float) -> None:
        with self._mutex:
            self._store.release(self._clock(), request)

    def reserve(self, request: api.ReserveRequest, *, deadline_s: float) -> api.ReserveReply:
        stored = self._index.get_many(item.key for item in request.items)
        with self._mutex:
            step = self._store.reserve(self._clock(), request, stored)
            self._transactions.submit(step)
        try:
            return self._transactions.wait(step, deadline_s)
        except MeshFusionError:  # the holder never learns of its grants: nothing can be in flight under them
            grant_ids = tuple(result.grant_id for result in step.reply.results if result.grant_id)
            self.abort(api.AbortRequest(request.holder_id, request.epoch, grant_ids), deadline_s=deadline_s)
            raise

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
            return replace(reply, drives_version=self._drives.version)

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        found = self._index.get_many((request.key,)).get(request.key)
        with self._mutex:
            step = self._store.drop(self._clock(), request, found)
            self._transactions.submit(step)
            self._drives.suspect(request.extent)
        logger.warning("chunk %s dropped: %r", request.key.hex(), request.reason)
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
            )

    def list_chunks(self, request: api.ListRequest, *, deadline_s: float) -> api.ListReply:
        return list_chunks(self._index, request)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> api.ChunkRecord | None:
        return self._index.get_many((key,)).get(key)

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


__all__ = ["CheckReport", "Pool", "PoolOptions", "check_pool", "create_pool", "inspect_pool", "list_chunks"]
