"""The parts of a served pool, wired together, and the order in which they begin and end."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.chunk_mover import ChunkMover
from meshfusion.dpu.drive_admin import ServedDriveAdmin
from meshfusion.dpu.drive_health import read_health
from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.drives_keeper import DrivesKeeper
from meshfusion.dpu.index import IndexTotals
from meshfusion.dpu.pool_holders import PoolHolders
from meshfusion.dpu.pool_opening import TakenPool
from meshfusion.dpu.pool_tending import Adoption
from meshfusion.dpu.pool_ticker import Ticker
from meshfusion.dpu.pool_transactions import Transactions
from meshfusion.dpu.running_drives import RunningDrives
from meshfusion.dpu.store.effects import NoteBudget
from meshfusion.dpu.tidier import Tidier
from meshfusion.jbof.drives.system.luks import CRYPTSETUP, Luks
from meshfusion.jbof.errors import FormatError, MeshFusionError

logger = logging.getLogger("meshfusion.pool")

CLOSE_S: Final = 20.0
"""What is under way with a drive at the service's end has so long: more than a command that hangs is waited for
(:class:`~meshfusion.dpu.running_drives.DriveOptions`), and all of it together."""


@dataclass(frozen=True, slots=True)
class PoolParts:
    """``mutex``: held by whoever uses the store, the shelf or the running drives."""

    taken: TakenPool
    mutex: threading.Lock
    transactions: Transactions
    holders: PoolHolders
    drives: RunningDrives
    drives_keeper: DrivesKeeper
    drive_admin: ServedDriveAdmin
    tidier: Tidier
    ticker: Ticker

    def start(self) -> None:
        self.holders.forget_unlisted()
        self.holders.probe(self.taken.clock())
        self.ticker.start()
        self.tidier.start()
        self.drives_keeper.start()
        self.holders.start()

    def close(self) -> None:
        """Once, also where :meth:`start` has failed. While a target or a drive may still be at what it was asked, the
        pool stays owned by this process: a late change must not meet another owner's."""
        taken = self.taken
        self.ticker.stop()
        busy = self._busy_after(CLOSE_S)
        is_quiet = self.holders.close()
        self.ticker.join()
        taken.proof.close()
        self.transactions.close()
        self._note_budgets()
        late = self.drives.answers.late
        taken.owners.close(late)
        self.drives.close()
        if not busy:  # else it may be used yet
            taken.index.close()
        silent = [*busy, *([] if is_quiet else ["the target"]), *(f"drive {number}" for number in sorted(late))]
        if not silent:
            taken.owner.release()
        for name in silent:
            logger.error("%s has not answered: the pool is another's to open when this process has ended", name)

    def _busy_after(self, deadline_s: float) -> list[str]:
        """What waits for a drive all the same: nothing new begins there."""
        end_s = time.monotonic() + deadline_s
        closing = {
            "a change of drives": self.drive_admin.close,
            "the watch over the drives": self.drives_keeper.close,
            "a segment that is made ready": self.tidier.close,
        }
        return [what for what, close in closing.items() if not close(max(0.0, end_s - time.monotonic()))]

    def _note_budgets(self) -> None:
        """What came back to them since the last opening, too. Best effort: without it a restart begins with less."""
        left = self.taken.shelf.budgets_left(self.taken.clock())
        with contextlib.suppress(MeshFusionError, OSError):
            self.taken.index.apply(NoteBudget(number, left_bytes) for number, left_bytes in left.items())


def wire(
    taken: TakenPool,
    drive_options: DriveOptions,
    damaged: Callable[[FormatError], None] | None,
    luks: Luks = CRYPTSETUP,
) -> PoolParts:
    """Not started yet. ``damaged``: is told, from a thread, when the scan of the index finds damage. ``luks``: for
    drives that come to an encrypted pool."""
    mutex, clock, store, index = threading.Lock(), taken.clock, taken.store, taken.index
    adoption = Adoption(index.segment_records(), store, taken.shelf, index, mutex)
    _follow_proof(taken, mutex, damaged)
    drives = _running_drives(taken, drive_options, mutex)
    transactions = Transactions(
        store, index, taken.medium, mutex=mutex, clock=clock, take_moved_away=drives.commands.take_moved_away
    )
    holders = PoolHolders(taken.layout, store, transactions, taken.exports, drives, mutex=mutex, clock=clock)
    changes = threading.Lock()
    keeper = DrivesKeeper(
        drives,
        index,
        mutex=mutex,
        changes=changes,
        submit=transactions.submit,
        wait=transactions.wait,
        clock=clock,
        read_health=read_health,
        rng=random.Random(),
    )
    return PoolParts(
        taken=taken,
        mutex=mutex,
        transactions=transactions,
        holders=holders,
        drives=drives,
        drives_keeper=keeper,
        drive_admin=ServedDriveAdmin(
            drives,
            index,
            taken.exports,
            mutex=mutex,
            changes=changes,
            clock=clock,
            look_again=keeper.wake,
            luks=luks,
        ),
        tidier=Tidier(
            store,
            index,
            ChunkMover(taken.drives.drives[0].drive.label),
            drives=drives.files,
            mutex=mutex,
            submit=transactions.submit,
            wait=transactions.wait,
            clock=clock,
        ),
        ticker=Ticker(store, transactions, holders, adoption, mutex=mutex, clock=clock),
    )


def _running_drives(taken: TakenPool, options: DriveOptions, mutex: threading.Lock) -> RunningDrives:
    listed = read_drive_list(taken.layout.directory)
    return RunningDrives(
        taken.layout,
        taken.owner,
        taken.drives,
        listed.drives if listed is not None else (),
        taken.medium,
        taken.shelf,
        taken.store,
        owners=taken.owners,
        budgets=taken.budgets,
        epoch=taken.store.epoch,
        options=options,
        mutex=mutex,
        clock=taken.clock,
    )


def _follow_proof(taken: TakenPool, mutex: threading.Lock, damaged: Callable[[FormatError], None] | None) -> None:
    counters = taken.store.counters

    def looked_through(totals: IndexTotals) -> None:
        with mutex:
            counters["index_entries_damaged"] = totals.damaged_count
            del counters["index_scans_under_way"]

    if taken.proof.totals is not None:
        looked_through(taken.proof.totals)
    elif damaged is not None:
        counters["index_scans_under_way"] = 1
        taken.proof.watch(looked_through, damaged)
