"""Taking a pool: its locks, the proof of its index, its drives, and an epoch of one's own to serve it in."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.budgets import Budgets
from meshfusion.dpu.drive_keys import DriveKeys
from meshfusion.dpu.drive_owners import DriveOwners, OpenReservable, open_block_reservable, service_id
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.index import Index
from meshfusion.dpu.index_files import open_index
from meshfusion.dpu.index_proof import IndexProof
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import PoolLayout, note_exported
from meshfusion.dpu.pool_drives import PoolDrives, find_drives
from meshfusion.dpu.pool_medium import ShelfMedium
from meshfusion.dpu.pool_shelf import OpenDrives
from meshfusion.dpu.pool_tenants import admit_tenants
from meshfusion.dpu.pool_tending import Policy, make_curator
from meshfusion.dpu.store.checks import refuse_other_exports
from meshfusion.dpu.store.store import Store, StoreOptions
from meshfusion.jbof.shelf import Shelf

logger = logging.getLogger("meshfusion.pool")

# (the pool, where it lies) -> the keeper, not started yet
MakeExports = Callable[[uuid.UUID, PoolLayout], ExportKeeper]


@dataclass(frozen=True, slots=True)
class PoolOptions(StoreOptions):
    """Store options plus ``heartbeat_s``: how often holders must be heard from; ``policy``: what decides which chunks
    are written and reclaimed; ``drive_writes_per_day``: most that is written to a drive in any 24 hours, as a multiple
    of its capacity, None for no bound."""

    heartbeat_s: float = 5.0
    policy: Policy = Policy.LEARNED
    drive_writes_per_day: float | None = None


@dataclass(frozen=True, slots=True)
class Taking:
    """How a pool is taken. ``first_look_s``: the pool may be served so long after the begin of its index' scan; None:
    only when that is over. ``may_take_over``: drives that another machine's service owns are taken from it.
    ``tenants``: whose engines may use it. ``drive_keys``: of the service, for all its pools."""

    options: PoolOptions
    clock: Callable[[], float] = time.monotonic
    make_exports: MakeExports | None = None
    first_look_s: float | None = None
    may_take_over: bool = False
    open_reservable: OpenReservable = open_block_reservable
    tenants: frozenset[str] = frozenset({DEFAULT_TENANT})
    drive_keys: DriveKeys = field(default_factory=DriveKeys)


@dataclass(frozen=True, slots=True)
class TakenPool:
    """A pool that is this process' own, in an epoch of its own; nobody is served yet, and no thread runs."""

    layout: PoolLayout
    pool_uuid: str
    tenants: frozenset[str]
    options: PoolOptions
    clock: Callable[[], float]
    owner: OwnerLock
    owners: DriveOwners
    proof: IndexProof
    index: Index
    exports: ExportKeeper | None
    drives: OpenDrives
    medium: ShelfMedium
    budgets: Budgets
    shelf: Shelf
    store: Store


def take_pool(layout: PoolLayout, taking: Taking, opened: contextlib.ExitStack) -> TakenPool:
    """``opened``: gives everything back, until the caller has taken that over.

    Raises PoolBusyError, FormatError or MediaError, each with a way out, what ``make_exports`` raises, and ConfigError
    when hosts may still reach the data through other exports than these.
    """
    found = find_drives(layout)
    owner = OwnerLock.take(layout, found.paths)
    opened.callback(owner.release)
    proof, index = _open_index(layout, found, opened, taking.first_look_s)
    if found.label_problems:
        logger.warning("%s; the other copy is used", "; ".join(found.label_problems))
    drives = OpenDrives.open(found)
    opened.callback(drives.close)
    owners = DriveOwners(
        service_id(layout), taking.open_reservable, may_take_over=taking.may_take_over, keys=taking.drive_keys
    )
    opened.callback(owners.abandon)
    make_exports = taking.make_exports
    exports = None if make_exports is None else make_exports(uuid.UUID(found.pool_uuid), layout)
    former = index.holder_records()
    if exports is not None:
        refuse_other_exports(former, exports.name)
    segments = index.segment_records()
    drives = drives.owned(owners.take)
    drives.check(segments, index.epoch(), layout.directory)
    admit_tenants(layout, taking.tenants, is_new=index.epoch() == 0)
    epoch = index.next_epoch()
    medium, drives = drives.begin_epoch(epoch)
    if exports is not None:
        note_exported(layout, exports.name)
    options, now_s = taking.options, taking.clock()
    budgets = Budgets(options.drive_writes_per_day, index.budgets_left())
    shelf = drives.shelf(segments, budgets, now_s)
    store = Store(
        shelf,
        options,
        epoch=epoch,
        former_holders=former,
        exported_as="" if exports is None else exports.name,
        curator=make_curator(options.policy, shelf),
        tenants=taking.tenants,
        now_s=now_s,
    )
    return TakenPool(
        layout=layout,
        pool_uuid=found.pool_uuid,
        tenants=taking.tenants,
        options=options,
        clock=taking.clock,
        owner=owner,
        owners=owners,
        proof=proof,
        index=index,
        exports=exports,
        drives=drives,
        medium=medium,
        budgets=budgets,
        shelf=shelf,
        store=store,
    )


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
