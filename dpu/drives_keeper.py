"""Keeps a served pool's drives under watch, on a thread of its own: looks at each, folds what it sees into their lives,
takes back those that return, and empties those that are to be.

What is decided is decided in :mod:`meshfusion.dpu.drive_lives`; here is when, and with which I/O. Looks run on threads
of their own, since one at a drive that hangs may not hold up those at the others.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from meshfusion.dpu.drive_commands import NO_ANSWER
from meshfusion.dpu.drive_health import ReadHealth, domain_of
from meshfusion.dpu.drive_look import Sighting, look_at
from meshfusion.dpu.drive_return import take_back
from meshfusion.dpu.index import Index
from meshfusion.dpu.running_drives import RunningDrives, Sought
from meshfusion.dpu.store.steps import Step
from meshfusion.jbof.drives.identity import label_identity
from meshfusion.jbof.drives.life_words import (
    Appeared,
    Checked,
    CommandFailed,
    Disappeared,
    Emptied,
    Fault,
    Tick,
)
from meshfusion.jbof.epoch_record import last_epoch
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.segments import SegmentRecord

logger = logging.getLogger("meshfusion.drives")

READS_A_LOOK: Final = 4
_SUSPECTS_A_LOOK: Final = 16
_LOOK_WAIT_S: Final = 1.0  # a round waits so long for its looks; what comes later is heeded in the next one
_FORGET_DEADLINE_S: Final = 10.0


class _Look:
    """One look, under way or over."""

    def __init__(self, sought: Sought, lbas: tuple[int, ...], began_s: float) -> None:
        self.sought = sought
        self.reported_s = began_s  # since when it has not been called late
        self.sighting: Sighting | None = None
        self._lbas = lbas
        self.thread = threading.Thread(target=self._run, name=f"meshfusion-look-{sought.number}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        expected = self.sought.open.drive.label if self.sought.open else None
        try:
            self.sighting = look_at(self.sought.path, expected, self._lbas)
        except Exception as error:  # a bug must not look like a drive that hangs
            logger.exception("looking at drive %d failed", self.sought.number)
            self.sighting = Sighting(None, problem=f"it could not be looked at: {error!r}")


class DrivesKeeper:
    """``mutex``: the pool's. ``submit``, ``wait``: make a step of its store durable; the first under the mutex, the
    second not. ``changes``: held while drives come or leave, by whoever sees to that. ``rng``: where a look reads."""

    def __init__(
        self,
        drives: RunningDrives,
        index: Index,
        *,
        mutex: threading.Lock,
        changes: threading.Lock,
        submit: Callable[[Step[None]], None],
        wait: Callable[[Step[None], float], None],
        clock: Callable[[], float],
        read_health: ReadHealth,
        rng: random.Random,
    ) -> None:
        self._drives, self._index, self._mutex, self._submit, self._wait = drives, index, mutex, submit, wait
        self._clock, self._changes, self._read_health, self._rng = clock, changes, read_health, rng
        self._looks: dict[int, _Look] = {}
        self._emptied: set[tuple[int, int]] = set()  # segments, by number and generation
        self._window_ends_s = clock() + drives.options.window_s
        self._health_from_s = clock()
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="meshfusion-drives", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def close(self, deadline_s: float) -> bool:
        """False: it is still taking a drive back, or emptying one."""
        self._is_stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopped:
            self._wake.wait(self._drives.options.check_interval_s)
            self._wake.clear()
            if self._is_stopped:
                return
            try:
                self.round()
            except Exception:  # a bug in one round must not end the watch
                logger.exception("a round over the drives failed")

    # ---- one round -----------------------------------------------------------------------------------------------

    def round(self) -> None:
        for look in self._look():
            self._fold(look)
        self._tick()
        self._take_back()
        self._heed_health()
        for number in self._drives_to_empty():
            self._empty(number)

    def _look(self) -> list[_Look]:
        """Those that are over. Of one that hangs, no second is begun."""
        with self._mutex:
            for sought in self._drives.sought():
                if sought.number not in self._looks:
                    suspects = tuple(self._drives.suspects.pop(sought.number, ()))[:_SUSPECTS_A_LOOK]
                    self._looks[sought.number] = _Look(sought, (*suspects, *self._places(sought)), self._clock())
        end_s = time.monotonic() + _LOOK_WAIT_S
        for look in self._looks.values():
            look.thread.join(max(0.0, end_s - time.monotonic()))
        over = [look for look in self._looks.values() if look.sighting is not None]
        for look in over:
            del self._looks[look.sought.number]
        return over

    def _places(self, sought: Sought) -> tuple[int, ...]:
        if sought.open is None:
            return ()
        label = sought.open.drive.label
        return tuple(self._rng.randrange(label.data_start_lba, label.end_lba) for _ in range(READS_A_LOOK))

    def _fold(self, look: _Look) -> None:
        sighting, sought = look.sighting, look.sought
        assert sighting is not None
        if sighting.is_blind:
            logger.warning("drive %d could not be looked at: %s", sought.number, sighting.problem)
            return
        with self._mutex:
            drives, now_s, number = self._drives, self._clock(), sought.number
            if number not in drives.lives.numbers or drives.sought_as(number) != sought:
                return  # it has left, or was exchanged meanwhile
            if sighting.fault not in (None, Fault.ABSENT):
                assert sighting.fault is not None
                drives.saw(now_s, number, CommandFailed(sighting.fault), sighting.problem)
                return
            if sighting.identity is None:
                drives.saw(now_s, number, Disappeared(), sighting.problem)
                return
            is_same_drive = sighting.identity == label_identity(sought.uuid)
            if sought.open is not None and sighting.place != sought.open.file.place:
                if is_same_drive and not drives.lives.is_awaiting_check(number):
                    drives.saw(now_s, number, Disappeared(), f"something else lies at {sought.path}")
            elif self._is_another_owners(sought, sighting):
                drives.saw(now_s, number, CommandFailed(Fault.CONFLICT), "another service has written its epoch on it")
                return
            problem = sighting.problem or ("" if is_same_drive else f"another drive lies at {sought.path}")
            drives.saw(now_s, number, Appeared(sighting.identity), problem)
            if is_same_drive:
                drives.took(number, sighting.latencies_s)

    def _is_another_owners(self, sought: Sought, sighting: Sighting) -> bool:
        """Only its owner writes an epoch; ours is the one that is known here."""
        if sought.open is None or not sighting.epochs or not sought.open.has_epoch:
            return False
        return last_epoch(sighting.epochs, sought.open.drive.label) != self._drives.epoch

    def _tick(self) -> None:
        with self._mutex:
            drives, now_s = self._drives, self._clock()
            for number, look in self._looks.items():
                if now_s - look.reported_s >= drives.options.look_deadline_s and number in drives.lives.numbers:
                    look.reported_s = now_s
                    drives.saw(now_s, number, CommandFailed(Fault.TIMEOUT), NO_ANSWER)
            for number in drives.lives.numbers:
                drives.saw(now_s, number, Tick())
            if now_s >= self._window_ends_s:
                self._window_ends_s = now_s + drives.options.window_s
                for number, told in drives.lives.end_window(now_s).items():
                    drives.heed(number, told)
            if drives.lives.waits_for_engines and drives.reach.is_known_to_all_here(now_s):
                drives.lives.are_all_known()
            drives.apply()

    def _take_back(self) -> None:
        """Those that are there again, as owned and compared as at the start of the service. An operator's change that
        takes its time does not hold up the watch: then they wait for the next round."""
        with self._unless_changing() as may_change:
            if not may_change:
                return
            with self._mutex:
                back = [s for s in self._drives.sought() if self._drives.lives.is_awaiting_check(s.number)]
            for sought in back:
                try:
                    take_back(sought, self._drives, self._index, self._mutex)
                except MeshFusionError as error:
                    with self._mutex:
                        self._drives.is_refused(self._clock(), sought.number, error)
                    continue
                with self._mutex:
                    self._drives.saw(self._clock(), sought.number, Checked())

    def _heed_health(self) -> None:
        now_s = self._clock()
        if now_s < self._health_from_s:
            return
        self._health_from_s = now_s + self._drives.options.health_interval_s
        with self._mutex:
            paths = {sought.number: sought.path for sought in self._drives.sought() if sought.open is not None}
        with self._unless_changing() as may_ask:
            lost = [number for number in paths if may_ask and self._drives.owners.has_lost(number)]
        found = self._read_health(paths)
        with self._mutex:
            for number in lost:
                self._drives.saw(now_s, number, CommandFailed(Fault.CONFLICT), "another service holds its reservation")
            for number, drive in found.items():
                if drive.health is not None and number in self._drives.lives.numbers:
                    endurance_bytes = drive.endurance.estimate_bytes if drive.endurance else 0
                    self._drives.has_health(now_s, number, drive.health, endurance_bytes, domain_of(drive))

    @contextlib.contextmanager
    def _unless_changing(self) -> Iterator[bool]:
        is_held = self._changes.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                self._changes.release()

    # ---- emptying ------------------------------------------------------------------------------------------------

    def _drives_to_empty(self) -> list[int]:
        with self._mutex:
            shelf, lives = self._drives.shelf, self._drives.lives
            return [number for number in sorted(shelf.numbers) if lives.use(number).is_emptied]

    def _empty(self, number: int) -> None:
        """Some of its segments, those that were not used for longest. It is empty when nobody holds anything there."""
        with self._mutex:
            left = [record for record in self._drives.shelf.held(number) if _name(record) not in self._emptied]
            interval_s = self._drives.options.check_interval_s
            count = self._drives.lives.to_empty_now(self._clock(), number, len(left), interval_s)
        for record in left[:count]:
            chunks = self._index.chunks_in(record) or []
            with self._mutex:
                step = self._drives.store.forget(record.segment, chunks)
                self._submit(step)
            try:
                self._wait(step, _FORGET_DEADLINE_S)
            except MeshFusionError as error:
                logger.warning("drive %d is emptied later: %s", number, error)
                return
            self._emptied.add(_name(record))
        with self._mutex:
            held = self._drives.shelf.held(number)
            if all(_name(record) in self._emptied for record in held) and not self._drives.shelf.is_pinned(number):
                self._drives.saw(self._clock(), number, Emptied())


def _name(record: SegmentRecord) -> tuple[int, int]:
    return record.segment, record.generation
