"""The drives of a pool that is served: what is open, how each is used, and what hosts are shown.

Everything here is called under the pool's mutex and does no I/O, but where it is said. Its thread is
:mod:`meshfusion.dpu.drives_keeper`, what operators ask is in :mod:`meshfusion.dpu.drive_admin`, which engines know
which drives in :mod:`meshfusion.dpu.drive_reach`, and how the service's own commands do in
:mod:`meshfusion.dpu.drive_commands`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.budgets import Budgets
from meshfusion.dpu.drive_answers import AnsweringMedium, PoolAnswers
from meshfusion.dpu.drive_commands import OwnCommands
from meshfusion.dpu.drive_list import ListedDrive
from meshfusion.dpu.drive_lives import DriveLives, Told
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.drive_owners import DriveOwners
from meshfusion.dpu.drive_problems import DriveProblems
from meshfusion.dpu.drive_reach import DriveReach
from meshfusion.dpu.drive_records import DriveRecords
from meshfusion.dpu.drive_status import status_of
from meshfusion.dpu.export.drive_showing import DriveShowing, DrivesNow
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import PoolDrive
from meshfusion.dpu.pool_medium import FileMedium, PoolMedium, ShelfMedium
from meshfusion.dpu.pool_shelf import OpenDrive, OpenDrives
from meshfusion.dpu.store.store import Store
from meshfusion.jbof.drives.health import Health
from meshfusion.jbof.drives.identity import label_identity
from meshfusion.jbof.drives.life_words import (
    Checked,
    CheckFailed,
    CommandFailed,
    Event,
    HealthRead,
)
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.pool_addresses import drive_of_segment, namespace_of
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.segments import SegmentRecord, SegmentTable
from meshfusion.jbof.shelf import DriveWear, Shelf, ShelfDrive

MOST_SUSPECTS: Final = 256  # blocks of a drive: while it hangs there are no looks, and engines go on telling


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
        self.reach = DriveReach(store.holders)
        self.showing = DriveShowing()
        self.problems = DriveProblems()
        self.commands = OwnCommands(self, mutex, clock)
        self.answers = PoolAnswers(options.answer_deadline_s, self.commands.answers_again)
        self.suspects: dict[int, set[int]] = {}  # blocks that an engine could not read, by drive
        self._mutex = mutex
        self._clock = clock
        self._open = {one.drive.number: one for one in opened.drives}
        self._paths = {one.drive.number: (one.drive.path, one.drive.label.drive_uuid) for one in opened.drives}
        self._names: dict[int, str] = {}  # of those that are not here
        self._records = DriveRecords()
        self._places: dict[int, Path] = {}  # of those that were here, as a target is told
        self._leaving: set[int] = set()
        self._withdrawn: set[int] = set()  # of these, what is not to be shown to hosts any more
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
            self._places[one.drive.number] = one.drive.path.resolve()
        for number in self._paths:
            self.showing.begin(number, self._places.get(number))
        medium.report_to(self.commands.failed, self.commands.worked)

    # ---- for the pool --------------------------------------------------------------------------------------------

    def namespaces(self, *, is_local: bool) -> tuple[api.Namespace, ...]:
        """Those that can be reached: on this machine, or through the target."""
        reached = {
            number
            for number in self._open
            if self.lives.use(number).is_offered and (is_local or self.showing.is_shown(number))
        }
        offered = [one for number, one in sorted(self._open.items()) if number in reached]
        return tuple(_namespace(one.drive, is_local=is_local) for one in offered or self._open.values())

    def known_to(self, holder_id: str, found: Mapping[bytes, api.ChunkRecord]) -> Mapping[bytes, api.ChunkRecord]:
        """Of what is stored, what lies on drives that the holder reaches, and perhaps on some that are not offered."""
        offered = frozenset(filter(self.shelf.is_offered, self.shelf.numbers))
        return self.reach.known_to(holder_id, found, offered)

    def files(self) -> dict[int, FileMedium]:
        """Those that are here, by namespace."""
        with self._mutex:
            return {namespace_of(number): one.file for number, one in self._open.items()}

    def suspect(self, extent: api.Extent) -> None:
        """An engine says that what lies there is not what was written, or cannot be read: the next look reads it."""
        number = drive_of_segment(extent.segment)
        if number in self._open and len(self.suspects.get(number, ())) < MOST_SUSPECTS:
            self.suspects.setdefault(number, set()).add(extent.lba)

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
        self.apply()
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
            self.showing.stand(number, self._places[number] if self._is_to_be_shown(number) else None)
        for number in self.lives.numbers - self.shelf.numbers:
            self.showing.stand(number, None)

    def _is_to_be_opened(self, number: int) -> None:
        self.reach.has_come(number)
        if self.reach.has_engines_here:
            self.lives.is_to_be_made_known(number)

    # ---- for the keeper of exports -------------------------------------------------------------------------------

    def _is_to_be_shown(self, number: int) -> bool:
        """To hosts. Of a drive that is leaving, who uses it goes on until it is withdrawn."""
        return self.lives.use(number).is_offered and number not in self._withdrawn

    def drives_to_show(self) -> DrivesNow:
        """Not under the mutex, as the next."""
        with self._mutex:
            return self.showing.now()

    def drive_is_taken_out(self, number: int) -> None:
        with self._mutex:
            if self.showing.taken_out(number) and self.shelf.is_offered(number):
                self._is_to_be_opened(number)  # hosts that have seen it before do not know it as it is now

    def has_health(
        self, now_s: float, number: int, health: Health, endurance_bytes: int, domain: tuple[str, ...]
    ) -> None:
        self._records.has_health(now_s, number, health, endurance_bytes)
        self.saw(now_s, number, HealthRead(health))
        wear = DriveWear(min(health.percentage_used, 255), health.written_bytes, endurance_bytes)
        if number in self.shelf.numbers:
            self.shelf.wear(number, wear, domain)

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
        self._places[number] = one.drive.path.resolve()
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

    def withdraw(self, number: int, *, is_so: bool) -> None:
        """A drive that is leaving, and that nobody uses: hosts lose it. It is out when :attr:`showing` says so."""
        (self._withdrawn.add if is_so else self._withdrawn.discard)(number)
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
        self._withdrawn.discard(number)
        del self._paths[number]
        self._unindexed.discard(number)
        self._places.pop(number, None)
        self.reach.has_left(number)
        self.showing.end(number)
        self._records.forget(number)
        self.problems.left(number)
        self.answers.left(number)
        self._names.pop(number, None)
        self.suspects.pop(number, None)
        one = self._open.pop(number, None)
        return None if one is None else one.file

    def status(self, number: int) -> DriveStatus:
        path, _ = self._paths[number]
        return status_of(
            number,
            path,
            self._open.get(number),
            self.lives.news(number),
            self._records,
            name=self._names.get(number, ""),
            problem=self.problems.of(number),
            budget_left_bytes=self.shelf.budgets_left(self._clock()).get(number, -1),
        )


def _namespace(drive: PoolDrive, *, is_local: bool) -> api.Namespace:
    return api.Namespace(
        nsid=namespace_of(drive.number),
        path=str(drive.path.absolute()) if is_local else "",
        lba_bytes=drive.label.lba_bytes,
        lba_count=drive.label.end_lba,
    )
