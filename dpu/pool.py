"""An open pool: the store's surroundings. Time, the index, the owner lock and threads live here.

``Pool`` implements :class:`~meshfusion.dpu.api.types.ChunkService` in process; the gRPC server wraps it. Matching reads
the index beside the writer (LMDB snapshots), so a commit's sync never holds up a lookup.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import create_liveness, forget_liveness, take_liveness_away
from meshfusion.dpu.budgets import Budgets
from meshfusion.dpu.chunk_mover import ChunkMover
from meshfusion.dpu.drive_admin import ServedDriveAdmin
from meshfusion.dpu.drive_health import read_health
from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.drive_owners import DriveOwners, OpenReservable, open_block_reservable, service_id
from meshfusion.dpu.drives_keeper import DrivesKeeper
from meshfusion.dpu.export.keeper import ExportKeeper, Holders
from meshfusion.dpu.index import Index, IndexTotals
from meshfusion.dpu.index_files import open_index
from meshfusion.dpu.index_proof import FIRST_LOOK_S, IndexProof
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_create import create_pool
from meshfusion.dpu.pool_dir import LIVENESS_SUFFIX, PoolLayout, note_exported
from meshfusion.dpu.pool_drives import PoolDrives, find_drives
from meshfusion.dpu.pool_inspect import CheckReport, check_pool, inspect_pool
from meshfusion.dpu.pool_shelf import OpenDrives
from meshfusion.dpu.pool_status import list_chunks, status_of
from meshfusion.dpu.pool_tending import ADOPTED_CHUNKS, Policy, make_curator, unadopted
from meshfusion.dpu.pool_writer import TransactionWriter
from meshfusion.dpu.running_drives import DriveOptions, RunningDrives
from meshfusion.dpu.store.checks import refuse_other_exports, refuse_unserved
from meshfusion.dpu.store.effects import NoteBudget
from meshfusion.dpu.store.steps import Reply, Step
from meshfusion.dpu.store.store import Store, StoreOptions
from meshfusion.dpu.tidier import Tidier
from meshfusion.jbof.errors import FormatError, MeshFusionError, UnsupportedError

logger = logging.getLogger("meshfusion.pool")

TICK_S = 1.0
UNCONFIRMED = (
    "an earlier service exported this pool to hosts that may still write, and only its target can say when they are "
    "gone: until the pool is served with these exports again, nothing is reclaimed"
)


@dataclass(frozen=True, slots=True)
class PoolOptions(StoreOptions):
    """Store options plus ``heartbeat_s``: how often holders must be heard from; ``policy``: what decides which chunks
    are written and reclaimed; ``drive_writes_per_day``: most that is written to a drive in any 24 hours, as a multiple
    of its capacity, None for no bound."""

    heartbeat_s: float = 5.0
    policy: Policy = Policy.LEARNED
    drive_writes_per_day: float | None = None


# (whom it serves, the pool, where it lies) -> the keeper, not started yet
MakeExports = Callable[[Holders, uuid.UUID, PoolLayout], ExportKeeper]


class Pool:
    """One pool, owned by this process until :meth:`close`."""

    def __init__(
        self,
        layout: PoolLayout,
        pool_uuid: str,
        options: PoolOptions,
        owner: OwnerLock,
        index: Index,
        drives: OpenDrives,
        proof: IndexProof,
        clock: Callable[[], float],
        exports: MakeExports | None,
        damaged: Callable[[FormatError], None] | None,
        drive_options: DriveOptions,
        owners: DriveOwners,
    ) -> None:
        self._layout = layout
        self.pool_uuid = pool_uuid
        self._options = options
        self._owner = owner
        self._owners = owners
        self._index = index
        self._proof = proof
        self._clock = clock
        former = index.holder_records()
        self._exports = None if exports is None else exports(self, uuid.UUID(pool_uuid), layout)
        exported_as = "" if self._exports is None else self._exports.name
        if self._exports is not None:
            refuse_other_exports(former, exported_as)
        segments = index.segment_records()
        drives = drives.owned(owners.take)
        drives.check(segments, index.epoch(), layout.directory)
        epoch = index.next_epoch()
        self._medium, opened = drives.begin_epoch(epoch)
        if self._exports is not None:
            note_exported(layout, exported_as)
        budgets = Budgets(options.drive_writes_per_day, index.budgets_left())
        shelf = opened.shelf(segments, budgets, clock())
        self._store = Store(
            shelf,
            options,
            epoch=epoch,
            former_holders=former,
            exported_as=exported_as,
            curator=make_curator(options.policy, shelf),
            now_s=clock(),
        )
        self._unadopted = unadopted(segments)
        self._mutex = threading.Lock()
        if proof.totals is not None:
            self._looked_through(proof.totals)
        elif damaged is not None:
            self._store.counters["index_scans_under_way"] = 1
            proof.watch(self._looked_through, damaged)
        listed = read_drive_list(layout.directory)
        self._drives = RunningDrives(
            layout,
            owner,
            opened,
            listed.drives if listed is not None else (),
            self._medium,
            shelf,
            self._store,
            owners=owners,
            budgets=budgets,
            epoch=epoch,
            options=drive_options,
            mutex=self._mutex,
            clock=clock,
        )
        changes = threading.Lock()
        self._keeper = DrivesKeeper(
            self._drives,
            index,
            mutex=self._mutex,
            changes=changes,
            submit=self._submit,
            wait=self._wait,
            clock=clock,
            read_health=read_health,
            rng=random.Random(),
        )
        self.drive_admin = ServedDriveAdmin(
            self._drives,
            index,
            mutex=self._mutex,
            changes=changes,
            clock=clock,
            look_again=self._keeper.wake,
        )
        self._ending: dict[int, str] = {}  # ticket of a fence or a farewell -> holder
        self._writer = TransactionWriter(index, self._medium, self._settle)
        self._tidier = Tidier(
            self._store,
            index,
            ChunkMover(opened.drives[0].drive.label),
            drives=self._drives.files,
            mutex=self._mutex,
            submit=self._submit,
            wait=self._wait,
            clock=clock,
        )
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick_loop, name="meshfusion-tick", daemon=True)
        self._forget_unlisted()
        self._probe_holders(clock())
        self._ticker.start()
        self._tidier.start()
        self._keeper.start()
        if self._exports is not None:
            self._exports.start()
        elif self._store.holders.to_serve():
            logger.warning("%s", UNCONFIRMED)

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
    ) -> Pool:
        """Own the pool at ``path``. ``exports`` makes the keeper of its exports: without one, data is reached locally.
        ``damaged``: the pool may be served before its index is looked through, ``first_look_s`` after the scan's begin;
        it is told, from a thread, when the scan then finds that the process must end. Without it the whole comes first.

        ``may_take_over``: drives that another machine's service owns are taken from it: it is dead, or to be cut off.

        Raises PoolBusyError, FormatError or MediaError, each with a way out, what ``exports`` raises, and ConfigError
        when hosts may still reach the data through other exports than these.
        """
        layout = PoolLayout(path.absolute())
        found = find_drives(layout)
        with contextlib.ExitStack() as opened:
            owner = OwnerLock.take(layout, found.paths)
            opened.callback(owner.release)
            proof, index = _open_index(layout, found, opened, first_look_s if damaged is not None else None)
            if found.label_problems:
                logger.warning("%s; the other copy is used", "; ".join(found.label_problems))
            drives = OpenDrives.open(found)
            opened.callback(drives.close)
            owners = DriveOwners(service_id(layout), open_reservable, may_take_over=may_take_over)
            opened.callback(owners.abandon)
            pool = cls(
                layout,
                found.pool_uuid,
                options or PoolOptions(),
                owner,
                index,
                drives,
                proof,
                clock,
                exports,
                damaged,
                drive_options or DriveOptions(),
                owners,
            )
            opened.pop_all()
        return pool

    # ---- ChunkService --------------------------------------------------------------------------------------------

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        refuse_unserved(request)  # before its incarnation becomes the name of a file
        is_local = request.access is api.Access.LOCAL
        if not is_local and self._exports is None:
            raise UnsupportedError(
                "this service exports nothing over NVMe-oF", next_step="add exports to the service's configuration"
            )
        end_s = time.monotonic() + deadline_s
        if self._exports is not None and not is_local:
            self._exports.check(deadline_s=deadline_s)
        liveness = self._layout.liveness(request.incarnation) if is_local else None
        with self._mutex:
            # The file before the durable listing: a listed holder whose file is missing could never be called gone.
            holders = self._store.holders
            is_new = not holders.knows(request.incarnation) and not holders.is_fenced(request.incarnation)
            if is_new and liveness is not None:
                create_liveness(liveness)
            elif is_new and self._exports is not None:
                self._exports.prepare(request.incarnation)
            step = self._store.attach(self._clock(), request)
            self._submit(step)
        holder_id = self._wait(step, max(0.0, end_s - time.monotonic()))
        export = None if is_local else self._admit(holder_id, max(0.0, end_s - time.monotonic()))
        with self._mutex:
            self._drives.told(holder_id)
            version, namespaces = self._drives.version, self._drives.namespaces(is_local=is_local)
        return api.Attachment(
            pool_uuid=self.pool_uuid,
            holder_id=holder_id,
            epoch=self._store.epoch,
            namespaces=namespaces,
            liveness_path=str(liveness or ""),
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
            reply = self._store.heartbeat(self._clock(), request)
            return replace(reply, drives_version=self._drives.version)

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        found = self._index.get_many((request.key,)).get(request.key)
        with self._mutex:
            step = self._store.drop(self._clock(), request, found)
            self._submit(step)
            self._drives.suspect(request.extent)
        logger.warning("chunk %s dropped: %r", request.key.hex(), request.reason)
        return self._wait(step, deadline_s)

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        """Believed only when the holder's liveness lock is free; else it is probed like any silent holder. One that
        reaches a target is cut off, and forgotten when that is confirmed."""
        with self._mutex:  # so that the holder cannot attach anew between its lock and its end
            holder = self._store.holders.get(request.holder_id)
            if holder is None:
                return
            if not holder.is_local:
                self._condemn(request.holder_id)
                return
            if not take_liveness_away(self._layout.liveness(request.holder_id)):
                logger.warning("holder %s detached while a process of it lives; it is watched", request.holder_id)
                return
            step = self._store.detach(self._clock(), request)
            self._ending[step.ticket] = request.holder_id
            self._submit(step)
        self._wait(step, deadline_s)

    def status(self, *, deadline_s: float) -> api.PoolStatus:
        with self._mutex:
            problem = self._exports_problem()
            return status_of(
                self._store,
                self._index,
                self.pool_uuid,
                self._layout.directory,
                self._clock(),
                other_counts=self._medium.counts + Counter(dict(self._drives.counters)),
                exports_problem=problem,
            )

    def list_chunks(self, request: api.ListRequest, *, deadline_s: float) -> api.ListReply:
        return list_chunks(self._index, request)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> api.ChunkRecord | None:
        return self._index.get_many((key,)).get(key)

    def announce_service(self, address: str) -> None:
        """Let whoever finds the pool in use learn where it is served."""
        self._owner.announce_service(address)

    def close(self) -> None:
        """Stop, give the pool up. Idempotent. While a target may still be at what it was asked, the pool stays owned by
        this process: a late change must not meet another owner's."""
        if self._stop.is_set():
            return
        self._stop.set()
        self.drive_admin.close()
        self._keeper.close()
        self._tidier.close()
        is_quiet = self._exports is None or self._exports.close()
        self._ticker.join()
        self._proof.close()
        self._writer.close()
        self._note_budgets()
        self._owners.close()
        self._drives.close()
        self._index.close()
        if is_quiet:
            self._owner.release()
        else:
            logger.error("the target has not answered: the pool is another's to open when this process has ended")

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for the keeper of exports -------------------------------------------------------------------------------

    def holders_to_serve(self) -> tuple[str, ...]:
        with self._mutex:
            return self._store.holders.to_serve()

    def holders_to_cut_off(self) -> tuple[str, ...]:
        with self._mutex:
            return self._store.holders.to_cut_off()

    def holder_is_cut_off(self, incarnation: str) -> None:
        with self._mutex:
            step = self._store.holder_is_gone(self._clock(), incarnation)
            if step.effects:
                self._ending[step.ticket] = incarnation
            self._submit(step)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _note_budgets(self) -> None:
        """What came back to them since the last opening, too. Best effort: without it a restart begins with less."""
        left = self._store.segments.budgets_left(self._clock())
        with contextlib.suppress(MeshFusionError, OSError):
            self._index.apply(NoteBudget(number, left_bytes) for number, left_bytes in left.items())

    def _admit(self, holder_id: str, deadline_s: float) -> api.Export:
        """The holder is listed durably; it learns of its access only when that is there."""
        assert self._exports is not None
        try:
            export = self._exports.admit(holder_id, deadline_s=deadline_s)
        except MeshFusionError:
            with self._mutex:
                self._condemn(holder_id)
            raise
        with self._mutex:
            self._store.holders.answered(self._clock(), holder_id)
        return export

    def _condemn(self, holder_id: str) -> None:
        """Under the mutex."""
        self._store.holders.condemn(holder_id)
        if self._exports is not None:
            self._exports.wake()

    def _exports_problem(self) -> str:
        if self._exports is not None:
            return self._exports.problem
        is_reached = any(not holder.is_local for holder in self._store.holders)
        return UNCONFIRMED if is_reached else ""

    def _looked_through(self, totals: IndexTotals) -> None:
        with self._mutex:
            self._store.counters["index_entries_damaged"] = totals.damaged_count
            del self._store.counters["index_scans_under_way"]

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
                    self._forget(ending)
            else:
                self._store.failed(self._clock(), ticket, f"{error.message}; {error.next_step}")
                pauses = not self._drives.take_moved_away()
                if not pauses:
                    self._store.saves_go_elsewhere()
        if error is not None:
            logger.error("index transaction failed, saves %s: %s", "pause" if pauses else "go elsewhere", error)

    def _tick_loop(self) -> None:
        while not self._stop.wait(TICK_S):
            for do in (self._tick, self._probe_holders, self._tend):
                try:
                    do(self._clock())
                except Exception:  # without ticks nothing would lapse, and nobody would be fenced, from then on
                    logger.exception("a part of the pool's tick failed")

    def _tick(self, now_s: float) -> None:
        with self._mutex:
            self._store.tick(now_s)
            self._submit(self._store.summarize(now_s))
            if self._exports is not None and self._store.holders.to_cut_off():
                self._exports.wake()

    def _tend(self, now_s: float) -> None:
        """Lookups come in between."""
        adopted = 0
        while self._unadopted and adopted < ADOPTED_CHUNKS:
            record = self._unadopted.pop()
            chunks = self._index.chunks_in(record) or ()
            adopted += len(chunks) + ADOPTED_CHUNKS // 64  # an empty one takes its time, too
            with self._mutex:
                self._store.adopt(now_s, record, chunks)
        has_more = True
        while has_more and not self._stop.is_set():
            with self._mutex:
                has_more = self._store.tend(now_s)

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
        if self._exports is not None:
            self._exports.forget_all_but(holder.record.holder_id for holder in self._store.holders)

    def _forget(self, holder_id: str) -> None:
        """Its end is durable."""
        forget_liveness(self._layout.liveness(holder_id))
        if self._exports is not None:
            self._exports.forget(holder_id)


def _open_index(
    layout: PoolLayout, found: PoolDrives, opened: contextlib.ExitStack, first_look_s: float | None
) -> tuple[IndexProof, Index]:
    """``first_look_s`` None: it must be proven whole. So it must where the index does not know its totals."""
    place = (layout.index, found.pool_uuid, found.capacity_bytes)
    if first_look_s is not None:
        proof = IndexProof.begun(*place, first_look_s=first_look_s)
        opened.callback(proof.close)
        index = open_index(*place, payload_bytes=proof.payload_bytes)
        if proof.totals is not None or index.has_totals:
            opened.callback(index.close)
            return proof, index
        index.close()
        proof.close()
    proof = IndexProof.whole(*place)
    index = open_index(*place, payload_bytes=proof.payload_bytes)
    opened.callback(index.close)
    return proof, index


__all__ = ["CheckReport", "Pool", "PoolOptions", "check_pool", "create_pool", "inspect_pool", "list_chunks"]
