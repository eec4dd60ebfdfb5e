"""The drives of a pool that is served: what is open, how each is used, and which engines know which.

Everything here is called under the pool's mutex and does no I/O, but where it is said. Its thread is
:mod:`meshfusion.dpu.drives_keeper`, what operators ask is in :mod:`meshfusion.dpu.drive_admin`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.budgets import Budgets
from meshfusion.dpu.drive_answers import AnsweringMedium, HangingDriveError, PoolAnswers
from meshfusion.dpu.drive_list import ListedDrive
from meshfusion.dpu.drive_lives import DriveLives, Told
from meshfusion.dpu.drive_look import fault_of
from meshfusion.dpu.drive_owners import DriveOwners
from meshfusion.dpu.drive_problems import DriveProblems
from meshfusion.dpu.drive_records import DriveRecords
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import PoolDrive
from meshfusion.dpu.pool_medium import FileMedium, PoolMedium, ShelfMedium
from meshfusion.dpu.pool_shelf import OpenDrive, OpenDrives
from meshfusion.dpu.store.store import Store
from meshfusion.jbof.drives.health import Health
from meshfusion.jbof.drives.identity import label_identity
from meshfusion.jbof.drives.life import LifeLimits
from meshfusion.jbof.drives.life_words import (
    Checked,
    CheckFailed,
    CommandFailed,
    Event,
    HealthRead,
    State,
    Written,
)
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.pool_addresses import drive_of_segment, namespace_of
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.segments import SegmentRecord, SegmentTable
from meshfusion.jbof.shelf import DriveWear, Shelf, ShelfDrive

logger = logging.getLogger("meshfusion.drives")


NO_ANSWER: Final = "it does not answer"
MOST_SUSPECTS: Final = 256  # blocks of a drive: while it hangs there are no looks, and engines go on telling


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """``check_interval_s``: how often each drive is looked at. ``probation_s``: how long one that came back must stay
    before it is used. ``drain_s``: in so long a drive is emptied. ``window_s``: latencies of so long are compared.
    ``look_deadline_s``: a look that takes longer is a command that failed. ``answer_deadline_s``: a drive that leaves a
    write of the service's own unanswered for so long is written to only when it has answered."""

    check_interval_s: float = 5.0
    probation_s: float = 30.0
    drain_s: float = 600.0
    window_s: float = 30.0
    health_interval_s: float = 60.0
    look_deadline_s: float = 10.0
    answer_deadline_s: float = 10.0

    @property
    def limits(self) -> LifeLimits:
        return LifeLimits(probation_s=self.probation_s, max_probation_s=max(self.probation_s, 3600.0))


@dataclass(frozen=True, slots=True)
class Sought:
    """A drive of the pool, here or not. ``open``: None while it was never here."""

    number: int
    path: Path
    uuid: bytes
    open: OpenDrive | None


class RunningDrives:
    """It owns the files. ``epoch``: this owner's, which is on every drive that could be written."""

    def __init__(
        self,
        layout: PoolLayout,
        owner: OwnerLock,
        opened: OpenDrives,
        listed: Iterable[ListedDrive],
        medium: ShelfMedium,
        shelf: Shelf,
        store: Store,
        *,
        owners: DriveOwners,
        budgets: Budgets,
        epoch: int,
        options: DriveOptions,
        mutex: threading.Lock,
        clock: Callable[[], float],
    ) -> None:
        self.layout, self.owner, self.medium, self.shelf, self.store = layout, owner, medium, shelf, store
        self.owners, self.epoch, self.options = owners, epoch, options
        self._budgets = budgets
        self.lives = DriveLives(options.limits, drain_s=options.drain_s)
        self.version = 0  # of the ways in which drives are reached
        self.problems = DriveProblems()
        self.answers = PoolAnswers(options.answer_deadline_s, self._answers_again)
        self.suspects: dict[int, set[int]] = {}  # blocks that an engine could not read, by drive
        self._mutex = mutex
        self._clock = clock
        self._open = {one.drive.number: one for one in opened.drives}
        self._paths = {one.drive.number: (one.drive.path, one.drive.label.drive_uuid) for one in opened.drives}
        self._names: dict[int, str] = {}  # of those that are not here
        self._records = DriveRecords()
        self._reached_since: dict[int, int] = {}  # drive -> the version that it came with
        self._known: dict[str, int] = {}  # holder -> the version that it was told last
        self._leaving: set[int] = set()
        self._moved_away = False
        for one in opened.drives:
            self.lives.begin(
                one.drive.number,
                label_identity(one.drive.label.drive_uuid),
                is_draining=one.drive.is_draining,
                is_write_protected=not one.takes_segments and not one.drive.is_draining,
            )
        self._unindexed: set[int] = set()
        for drive in listed:
            if drive.number not in self._open:
                if drive.is_unindexed:
                    self._unindexed.add(drive.number)
                    self.problems.found(drive.number, "the index was made anew without it: mfctl pool rebuild-index")
                self._paths[drive.number] = (drive.path, bytes.fromhex(drive.uuid))
                self._names[drive.number] = drive.name
                identity = label_identity(bytes.fromhex(drive.uuid))
                self.lives.begin(drive.number, identity, is_here=False, is_draining=drive.is_draining)
        for one in opened.drives:
            medium.put(one.drive.number, self.media_of(one.drive, one.file))
        medium.report_to(self._command_failed, self._command_worked)

    # ---- for the pool --------------------------------------------------------------------------------------------

    def namespaces(self, *, is_local: bool) -> tuple[api.Namespace, ...]:
        """Those that can be reached; an engine opens them for itself."""
        reached = [one for number, one in sorted(self._open.items()) if self.lives.use(number).is_offered]
        return tuple(_namespace(one.drive, is_local=is_local) for one in reached or self._open.values())

    def files(self) -> dict[int, FileMedium]:
        """Those that are here, by namespace."""
        with self._mutex:
            return {namespace_of(number): one.file for number, one in self._open.items()}

    def told(self, holder_id: str) -> None:
        """The holder knows :meth:`namespaces` as they are now."""
        self._known[holder_id] = self.version
        for gone in [known for known in self._known if not self.store.holders.knows(known)]:
            del self._known[gone]

    def known_to(self, holder_id: str, found: Mapping[bytes, api.ChunkRecord]) -> Mapping[bytes, api.ChunkRecord]:
        """Without what lies on drives that the holder has not heard of: to it, that is a miss. A host of a target opens
        none itself, and is not told."""
        holder = self.store.holders.get(holder_id)
        if holder is None or not holder.is_local:
            return found
        known = self._known.get(holder_id, self.version)
        unheard = {number for number, since in self._reached_since.items() if since > known}
        if not unheard:
            return found
        return {
            key: chunk
            for key, chunk in found.items()
            if not any(drive_of_segment(shard.extent.segment) in unheard for shard in chunk.shards)
        }

    def engines_know_all(self, now_s: float) -> bool:
        """Those that open drives themselves. One that has fallen silent is not waited for: it is cut off, or it fails
        to write where it cannot."""
        holders = [holder for holder in self.store.holders if holder.is_local and holder.current]
        asked = [holder for holder in holders if self.store.holders.state(holder, now_s) == "live"]
        return all(self._known.get(holder.record.holder_id, 0) >= self.version for holder in asked)

    def suspect(self, extent: api.Extent) -> None:
        """An engine says that what lies there is not what was written, or cannot be read: the next look reads it."""
        number = drive_of_segment(extent.segment)
        if number in self._open and len(self.suspects.get(number, ())) < MOST_SUSPECTS:
            self.suspects.setdefault(number, set()).add(extent.lba)

    def take_moved_away(self) -> bool:
        """Has a command failed on a drive since the last call, while others take what would have gone there?"""
        moved, self._moved_away = self._moved_away, False
        return moved

    @property
    def counters(self) -> tuple[tuple[str, int], ...]:
        """For the pool's status; none for a pool of one drive that is as it should be."""
        uses = [self.lives.use(number) for number in self.lives.numbers]
        counts = {
            "drives": len(uses) if len(uses) > 1 else 0,
            "drives_away": sum(not use.is_offered for use in uses),
            "drives_only_read": sum(use.is_offered and not use.takes_segments for use in uses),
            "drive_alarms": self.problems.alarm_count,
        }
        return tuple((name, count) for name, count in counts.items() if count)

    def close(self) -> None:
        for one in self._open.values():
            one.file.close()

    # ---- what was seen -------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the pool's drives, wherever they are."""
        return tuple(sorted(self._paths))

    def sought(self) -> tuple[Sought, ...]:
        """But for drives that the index knows nothing of: their segments would count as never used (rule 2)."""
        return tuple(
            Sought(number, path, uuid, self._open.get(number))
            for number, (path, uuid) in sorted(self._paths.items())
            if number not in self._unindexed
        )

    def sought_as(self, number: int) -> Sought | None:
        return next((sought for sought in self.sought() if sought.number == number), None)

    def is_sought(self, number: int, path: Path, uuid: bytes) -> Sought:
        """A drive that has just become one of the pool's: it is not here before it was checked."""
        self._paths[number] = (path, uuid)
        self.lives.begin(number, label_identity(uuid), is_here=False)
        return Sought(number, path, uuid, None)

    def saw(self, now_s: float, number: int, event: Event, problem: str = "") -> Told:
        """And what follows for how the drive is used."""
        if isinstance(event, CommandFailed):
            self._records.failed(number)
        told = self.lives.saw(now_s, number, event)
        if told.is_to_be_checked or isinstance(event, Checked):
            self.problems.end(number)  # it was of the time before it came back
        if problem:
            self.problems.found(number, problem)
        self.heed(number, told)
        self.apply()
        return told

    def is_refused(self, now_s: float, number: int, error: MeshFusionError) -> None:
        """A drive that is back, and not used for this."""
        told = self.saw(now_s, number, CheckFailed(), error.message)
        self.problems.refused(number, error, is_told=bool(told.alarms))

    def took(self, number: int, latencies_s: Sequence[float]) -> None:
        """Reads of single blocks, in a look that went well."""
        self.lives.took(number, latencies_s)
        self._records.took(number, latencies_s)

    def heed(self, number: int, told: Told) -> None:
        for alarm in told.alarms:
            self.problems.tell(number, alarm)

    def apply(self) -> None:
        """Drives are used as their lives say."""
        late = self.answers.late
        for number in self.lives.numbers:
            self.lives.hangs(number, is_so=number in late)
        for number in self.shelf.numbers:
            was_offered = self.shelf.is_offered(number)
            is_offered = self.lives.use(number).is_offered and number not in self._leaving
            if is_offered and not was_offered:
                self._is_to_be_opened(number)
            takes_segments = is_offered and self.lives.use(number).takes_segments
            self.shelf.stand(number, takes_segments=takes_segments, is_offered=is_offered)
            if was_offered and not is_offered:
                self.store.drive_is_gone(number)

    def _is_to_be_opened(self, number: int) -> None:
        """By every engine, anew: it may lie elsewhere now, and those that came meanwhile have never seen it."""
        self.version += 1
        self._reached_since[number] = self.version
        if any(holder.is_local for holder in self.store.holders):
            self.lives.is_to_be_made_known(number)

    def has_health(
        self, now_s: float, number: int, health: Health, endurance_bytes: int, domain: tuple[str, ...]
    ) -> None:
        self._records.has_health(now_s, number, health, endurance_bytes)
        self.saw(now_s, number, HealthRead(health))
        wear = DriveWear(min(health.percentage_used, 255), health.written_bytes, endurance_bytes)
        if number in self.shelf.numbers:
            self.shelf.wear(number, wear, domain)

    def _command_failed(self, number: int, error: MediaError) -> None:
        """One of ours, on the writer's thread: not under the mutex."""
        with self._mutex:
            if number not in self.lives.numbers:
                return
            if isinstance(error, HangingDriveError) and not error.is_news:
                self.apply()  # nothing was asked of it: it has failed once
            else:
                problem = NO_ANSWER if isinstance(error, HangingDriveError) else error.message
                self.saw(self._clock(), number, CommandFailed(fault_of(error)), problem)
            others = (other for other in self.shelf.numbers if other != number)
            self._moved_away |= any(self.lives.use(other).takes_segments for other in others)

    def _command_worked(self, number: int) -> None:
        """One of ours, after one that failed."""
        with self._mutex:
            if number in self.lives.numbers:
                self.saw(self._clock(), number, Written())

    def _answers_again(self, number: int) -> None:
        """On a thread of its own: not under the mutex."""
        logger.warning("drive %d answers again", number)
        with self._mutex:
            if number not in self.lives.numbers:
                return
            if self.lives.news(number).state is State.ONLINE:
                self.problems.end(number)
            self.apply()

    # ---- drives come, are exchanged, and leave -------------------------------------------------------------------

    def media_of(self, drive: PoolDrive, file: FileMedium) -> PoolMedium:
        """For the service's own writes."""
        medium = AnsweringMedium(file, self.answers.of(drive.number))
        return PoolMedium(medium, drive.label, drive.geometry, self.epoch)

    def came(self, one: OpenDrive, records: Iterable[SegmentRecord]) -> FileMedium | None:
        """It is owned, open, and the medium has it. ``records``: those of the drive in the index. Returns the file that
        is not used any more, to be closed."""
        number = one.drive.number
        former = self._open.get(number)
        self._open[number] = one
        self._paths[number] = (one.drive.path, one.drive.label.drive_uuid)
        if number not in self.shelf.numbers:
            its = [record for record in records if record.segment in one.drive.geometry.segments]
            table = SegmentTable(one.drive.geometry, its)
            budget = self._budgets.of(one.drive.geometry, self._clock())
            self.shelf.add(ShelfDrive(table, takes_segments=False, is_offered=False, budget=budget))
        return None if former is None else former.file

    def check_budget(self, geometry: SegmentGeometry) -> None:
        """Raises ConfigError when a drive like that could never be written, and the service not start with it."""
        self._budgets.check(geometry)

    def retune(
        self, now_s: float, *, drive_writes_per_day: float | None, check_interval_s: float, drain_s: float
    ) -> None:
        """From now on. What is left of budgets is kept. Raises as :meth:`check_budget`; nothing has changed then."""
        geometries = {number: self.shelf.geometry_of(number) for number in self.shelf.numbers}
        budgets = Budgets(drive_writes_per_day, {**self._budgets.left_bytes, **self.shelf.budgets_left(now_s)})
        budgets.check(*geometries.values())
        if drive_writes_per_day != self._budgets.drive_writes_per_day:
            self._budgets = budgets
            for number, geometry in geometries.items():
                self.shelf.rebudget(number, budgets.of(geometry, now_s))
        self.options = replace(self.options, check_interval_s=check_interval_s, drain_s=drain_s)
        self.lives.retune(drain_s=drain_s)

    def is_leaving(self, number: int, *, is_so: bool) -> None:
        """Nothing of it is offered any more, so that those who use it become fewer; or it is again."""
        (self._leaving.add if is_so else self._leaving.discard)(number)
        self.apply()

    def is_pinned(self, number: int) -> bool:
        return number in self.shelf.numbers and self.shelf.is_pinned(number)

    def left(self, number: int) -> FileMedium | None:
        """Taken off, for good. Returns its file, to be closed when the medium does not have it any more."""
        if number in self.shelf.numbers:
            self.shelf.remove(number)
            self.store.drive_has_left(number)
        self.lives.end(number)
        self._leaving.discard(number)
        del self._paths[number]
        self._unindexed.discard(number)
        self._reached_since.pop(number, None)
        self._records.forget(number)
        self.problems.left(number)
        self.answers.left(number)
        self._names.pop(number, None)
        self.suspects.pop(number, None)
        self.version += 1
        one = self._open.pop(number, None)
        return None if one is None else one.file

    def status(self, number: int) -> DriveStatus:
        path, _ = self._paths[number]
        one, news, health = self._open.get(number), self.lives.news(number), self._records.health(number)
        return DriveStatus(
            number=number,
            state=news.state.value,
            reasons=news.reasons,
            path=str(path),
            serial=one.drive.label.drive_name if one else self._names.get(number, ""),
            segment_count=one.drive.label.segment_count if one else 0,
            size_bytes=one.drive.geometry.capacity_bytes if one else 0,
            percentage_used=health.percentage_used if health else -1,
            problem=self.problems.of(number),
            months_left=self._records.months_left(number),
            written_bytes=health.written_bytes if health else -1,
            media_errors=health.media_errors if health else -1,
            spare_percent=health.spare_percent if health else -1,
            write_budget_left_bytes=self.shelf.budgets_left(self._clock()).get(number, -1),
            failed_command_count=self._records.fault_count(number),
            read_latency_s=self._records.read_latency_s(number),
        )


def _namespace(drive: PoolDrive, *, is_local: bool) -> api.Namespace:
    return api.Namespace(
        nsid=namespace_of(drive.number),
        path=str(drive.path.absolute()) if is_local else "",
        lba_bytes=drive.label.lba_bytes,
        lba_count=drive.label.end_lba,
    )
