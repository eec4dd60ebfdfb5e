"""The store's surroundings in the simulation: what :class:`meshfusion.dpu.pool.Pool` is in the real service."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.drive_reach import DriveReach
from meshfusion.dpu.export.desired import Export
from meshfusion.dpu.export.drive_showing import DriveShowing
from meshfusion.dpu.export.keeper import FencingTarget
from meshfusion.dpu.store.effects import Effect, OpenSegment, PutChunk
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.store.store import Store, StoreOptions
from meshfusion.dpu.store.stored_chunks import StoredChunks
from meshfusion.jbof.policy.write_budget import WriteBudget
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentGeometry, SegmentTable
from meshfusion.jbof.shelf import Shelf, ShelfDrive
from tests.sim.medium import IndexModel
from tests.sim.owners import Take, take
from tests.sim.target import NvmetOfModel, SpdkOfModel, TargetModel
from tests.sim.whims import Whims

# One drive, or the same number of segments on three.
SHELVES = {
    1: (SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=14, segment_count=6),),
    3: tuple(SegmentGeometry(4096, 256, 14, 2, drive_number) for drive_number in range(3)),
}
SEGMENT_COUNT = 6
MAX_EXTENT_LBA_COUNT = SHELVES[1][0].max_extent_lba_count
CAPACITY_BYTES = SHELVES[1][0].capacity_bytes
BUDGET_SEGMENTS = 4 * SEGMENT_COUNT  # a drive's in 24 hours, where it has a budget
OPTIONS = StoreOptions(max_pinned_fraction=0.34, quarantine_max_fraction=0.5)


@dataclass(frozen=True)
class Rules:
    """What runs; mutants replace parts of it. ``shows_queued``: does the index show what is not durable yet?
    ``tears_transactions``: does the index show one effect of a transaction before the others?
    ``notes_budgets``: does a new life of the service know what was left of them? ``flushes_moves``: are
    chunks that were written again flushed before the index names the new place? ``remembers_fences``: does a new life
    of the service know who was fenced? ``spdk``, ``nvmet``: what fences hosts of a target. ``take``: how a machine
    comes to own the drive; ``aborts_when_preempted``: is what the one before had under way there over then?
    ``checks_epoch``: is an index that is behind the drive made anew? ``reach``: what knows which drives hosts reach.
    ``waits_for_target``: does a drive leave only when the target has confirmed that nobody reaches it?"""

    store: type[Store] = Store
    segments: type[SegmentTable] = SegmentTable
    shelf: type[Shelf] = Shelf
    shows_queued: bool = False
    forgets_on_open: bool = True
    tears_transactions: bool = False
    notes_budgets: bool = True
    flushes_moves: bool = True
    remembers_fences: bool = True
    spdk: Callable[[TargetModel, Export], FencingTarget] = SpdkOfModel
    nvmet: Callable[[TargetModel, Export], FencingTarget] = NvmetOfModel
    take: Take = take
    aborts_when_preempted: bool = True
    checks_epoch: bool = True
    reach: type[DriveReach] = DriveReach
    waits_for_target: bool = True


def place_of(number: int) -> Path:
    return Path(f"/drive{number}")


@dataclass
class _Waiting:
    step: Step[Any]
    on_reply: Callable[[Any], None]
    on_failure: Callable[[], None]


class Service:
    """One life of the service, from start to crash. ``drives``: those that are here, and whether they take segments."""

    def __init__(
        self,
        rules: Rules,
        index: IndexModel,
        drives: Mapping[SegmentGeometry, bool],
        now_s: float,
        on_opening: Callable[[Service, int], None],
        may_write: Callable[[], bool],
        *,
        whims: random.Random,
        refusal_rate: float,
        has_budgets: bool,
        all_numbers: Iterable[int] = (),
    ) -> None:
        self._has_budgets = has_budgets
        self._rules = rules
        self.drives = dict(drives)
        self.gone: set[int] = set()  # drives that are not offered any more
        self.leaving: set[int] = set()  # the same, until they are removed
        self.withdrawn: set[int] = set()  # of these, what hosts are not shown any more
        self.index = index
        self._on_opening, self._may_write = on_opening, may_write
        self.segment_numbers = [segment for geometry in drives for segment in geometry.segments]
        index.epoch += 1
        self.shelf = rules.shelf(
            (
                ShelfDrive(
                    rules.segments(
                        geometry,
                        [r for i, r in index.segments.items() if drive_of_segment(i) == geometry.drive_number],
                    ),
                    takes_segments,
                    budget=self._budget(geometry, now_s) if has_budgets else None,
                )
                for geometry, takes_segments in drives.items()
            ),
            max((record.opened_seq for record in index.segments.values()), default=0),
        )
        self.whims = Whims(whims, refusal_rate, self.shelf, self.segment_numbers)
        self.store = rules.store(
            self.shelf,
            replace(OPTIONS, free_fraction=1 / max(geometry.segment_count for geometry in drives)),
            epoch=index.epoch,
            former_holders=[h for h in index.holders.values() if rules.remembers_fences or not h.fenced],
            curator=self.whims,
            now_s=now_s,
        )
        self.reach = rules.reach(self.store.holders)
        self.showing = DriveShowing()
        for number in sorted(all_numbers):
            is_here = any(geometry.drive_number == number for geometry in drives)
            self.showing.begin(number, place_of(number) if is_here else None)
        self._queue: deque[tuple[int, tuple[Effect, ...]]] = deque()
        self._settled = 0
        self._failed: set[int] = set()
        self._waiting: list[_Waiting] = []

    def _budget(self, geometry: SegmentGeometry, now_s: float) -> WriteBudget:
        left = self.index.budgets.get(geometry.drive_number) if self._rules.notes_budgets else None
        return WriteBudget(BUDGET_SEGMENTS * geometry.segment_bytes, now_s, left)

    def use(self, drive: SegmentGeometry) -> None:
        """As what is known of it says: what :class:`~meshfusion.dpu.running_drives.RunningDrives` does."""
        number = drive.drive_number
        was_offered, is_offered = self.shelf.is_offered(number), number not in self.gone | self.leaving
        if is_offered and not was_offered:
            self.reach.has_come(number)
        self.shelf.stand(number, takes_segments=is_offered and self.drives[drive], is_offered=is_offered)
        if was_offered and not is_offered:
            self.store.drive_is_gone(number)
        self.showing.stand(number, None if number in self.gone | self.withdrawn else place_of(number))

    def add(self, drive: SegmentGeometry, now_s: float) -> None:
        """A new one."""
        budget = self._budget(drive, now_s) if self._has_budgets else None
        table = self._rules.segments(drive, ())
        self.shelf.add(ShelfDrive(table, takes_segments=False, is_offered=False, budget=budget))
        self.segment_numbers += drive.segments
        self.drives[drive] = True
        self.use(drive)

    def remove(self, drive: SegmentGeometry) -> None:
        """For good: nobody uses it."""
        number = drive.drive_number
        self.shelf.remove(number)
        self.store.drive_has_left(number)
        self.reach.has_left(number)
        self.showing.end(number)
        for kind in (self.gone, self.leaving, self.withdrawn):
            kind.discard(number)
        del self.drives[drive]
        for segment in drive.segments:
            self.segment_numbers.remove(segment)

    def forget_some(self, number: int) -> None:
        """The drive is being emptied, whatever it is used for besides."""
        for record in self.shelf.held(number)[:1]:
            shards = ((chunk, shard) for chunk in self.index.chunks.values() for shard in chunk.shards)
            held = {chunk.key: chunk for chunk, shard in shards if shard.extent.segment == record.segment}
            self.submit(self.store.forget(record.segment, held.values()), lambda _: None)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def look_up(self, keys: Iterable[bytes]) -> Mapping[bytes, api.ChunkRecord]:
        """As the index gives it to lookups."""
        found = {key: self.index.chunks[key] for key in keys if key in self.index.chunks}
        if self._rules.shows_queued:
            queued = (e.record for _, effects in self._queue for e in effects if isinstance(e, PutChunk))
            found.update((record.key, record) for record in queued if record.key in keys)
        return StoredChunks.of(found)

    def submit(
        self, step: Step[Any], on_reply: Callable[[Any], None], on_failure: Callable[[], None] = lambda: None
    ) -> None:
        for effect in step.effects:
            if isinstance(effect, OpenSegment):
                self._on_opening(self, effect.record.segment)
        if step.effects:
            self._queue.append((step.ticket, step.effects))
        self._waiting.append(_Waiting(step, on_reply, on_failure))
        self._answer()

    def sync(self, now_s: float, rng: random.Random, *, failing: bool) -> None:
        """The next transactions become durable, in order, or one of them fails."""
        for _ in range(min(len(self._queue), rng.randint(1, 3))):
            ticket, effects = self._queue.popleft()
            if self._rules.tears_transactions and len(effects) > 1:
                self._queue.appendleft((ticket, effects[1:]))
                self.index.apply(effects[:1])
                continue
            self._settled = ticket
            is_kept_out = not self._may_write() and any(isinstance(effect, OpenSegment) for effect in effects)
            if failing or is_kept_out:
                self._failed.add(ticket)
                if is_kept_out or rng.random() < 0.3:  # an error was reported, yet it reached the index
                    self.index.apply(effects)
                self.store.failed(now_s, ticket, "the medium reported an error")
            else:
                self.index.apply(effects)
                self.store.durable(ticket)
            self._answer()

    def give_up_one(self, rng: random.Random) -> None:
        """A caller's deadline passes while it waits."""
        if self._waiting:
            self._waiting.pop(rng.randrange(len(self._waiting))).on_failure()

    def crash(self, rng: random.Random) -> None:
        """Transactions in flight may have made it, in order, or not; no caller gets an answer."""
        for _ in range(rng.randint(0, len(self._queue))):
            self.index.apply(self._queue.popleft()[1])

    def _answer(self) -> None:
        ready = [w for w in self._waiting if max(w.step.ticket, w.step.after) <= self._settled]
        self._waiting = [w for w in self._waiting if max(w.step.ticket, w.step.after) > self._settled]
        for waiting in ready:
            if self._failed.isdisjoint((waiting.step.ticket, waiting.step.after)):
                waiting.on_reply(waiting.step.reply)
            else:
                waiting.on_failure()
