"""What operators ask of the drives of a pool that is served: see them, add, drain, remove.

The list of drives in the pool's directory changes durably before anything follows from it, so that a service that ends
in between goes on from there at its next start.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from meshfusion.dpu.api.drive_types import AddDriveRequest, DrainDriveRequest, DriveStatus, RemoveDriveRequest
from meshfusion.dpu.drive_list import read_drive_list, write_drive_list
from meshfusion.dpu.drive_return import take_back
from meshfusion.dpu.encryption.making import slices_at, undo
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.index import Index
from meshfusion.dpu.index_files import map_size_bytes
from meshfusion.dpu.pool_create import add_listed_drive, wipe_new_drive
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.pool_remove import list_of, only_drive, unknown_drive
from meshfusion.dpu.running_drives import RunningDrives
from meshfusion.jbof.drives.life_words import Admit, Checked, Drain
from meshfusion.jbof.drives.system.luks import CRYPTSETUP, Luks
from meshfusion.jbof.errors import ConfigError, MediaError, PoolBusyError, ServiceUnavailableError
from meshfusion.jbof.pool_addresses import MAX_DRIVE_SEGMENTS, first_segment

_BETWEEN_LOOKS_S: Final = 0.05


class ServedDriveAdmin:
    """A :class:`~meshfusion.dpu.api.drive_types.DriveAdmin`. ``mutex``: of the pool; ``changes``: one at a time.
    ``exports``: what shows drives to hosts of a target; None where there is none."""

    def __init__(
        self,
        drives: RunningDrives,
        index: Index,
        exports: ExportKeeper | None = None,
        *,
        mutex: threading.Lock,
        changes: threading.Lock,
        clock: Callable[[], float],
        look_again: Callable[[], None],
        luks: Luks = CRYPTSETUP,
    ) -> None:
        self._drives, self._index, self._exports = drives, index, exports
        self._mutex, self._changes = mutex, changes
        self._clock, self._look_again = clock, look_again
        self._luks = luks
        self._is_closed = False

    def close(self, deadline_s: float) -> bool:
        """No change begins any more. What is under way ends first; False: it has not, and must not meet another
        owner's."""
        self._is_closed = True
        has_ended = self._changes.acquire(timeout=deadline_s)
        if has_ended:
            self._changes.release()
        return has_ended

    def drives(self, *, deadline_s: float) -> tuple[DriveStatus, ...]:
        with self._mutex:
            return tuple(map(self._drives.status, self._drives.numbers))

    def add_drive(self, request: AddDriveRequest, *, deadline_s: float) -> DriveStatus:
        layout = self._drives.layout
        self._wipe_new(request, deadline_s)
        with self._changing(deadline_s):
            self._check_can_add(request)
            try:
                label = add_listed_drive(
                    layout,
                    find_drives(layout),
                    request.size_bytes,
                    Path(request.data_path) if request.data_path else None,
                    request.overwrite_serial or None,
                    self._drives.check_budget,
                    is_wiped=True,
                    luks=self._luks,
                )
            except OSError as error:
                raise MediaError(
                    f"a drive cannot be added to {layout.directory}: {error}",
                    next_step="check space and permissions of its directory",
                ) from error
            drive = list_of(layout).find(label.drive_number)
            assert drive is not None, "just listed"
            with self._mutex:
                sought = self._drives.is_sought(drive.number, drive.path, label.drive_uuid)
            take_back(sought, self._drives, self._index, self._mutex)
            with self._mutex:
                self._drives.lives.is_new(drive.number)
                self._drives.saw(self._clock(), drive.number, Checked())
                status = self._drives.status(drive.number)
            if self._exports is not None:
                self._exports.wake()
            return status

    def drain_drive(self, request: DrainDriveRequest, *, deadline_s: float) -> DriveStatus:
        number, layout = request.number, self._drives.layout
        with self._changing(deadline_s):
            listed = read_drive_list(layout.directory)
            with self._mutex:
                is_known = number in self._drives.lives.numbers
            if not request.is_ended or not is_known or listed is not None:
                listed = list_of(layout)  # the only drive can be trusted again, and not be drained
                drive = listed.find(number)
                if drive is None or not is_known:
                    raise unknown_drive(layout, listed, number)
                if not request.is_ended and listed.only is not None:
                    raise only_drive(layout)
                changed = replace(drive, is_draining=not request.is_ended)
                if changed != drive:
                    write_drive_list(layout.directory, listed.with_drive(changed))
            with self._mutex:
                self._drives.saw(self._clock(), number, Admit() if request.is_ended else Drain())
                status = self._drives.status(number)
        self._look_again()
        return status

    def remove_drive(self, request: RemoveDriveRequest, *, deadline_s: float) -> int:
        number, layout, end_s = request.number, self._drives.layout, time.monotonic() + deadline_s
        with self._changing(deadline_s):
            listed = list_of(layout)
            if not 0 <= number < listed.next_number:
                raise unknown_drive(layout, listed, number)
            if {drive.number for drive in listed.drives} == {number}:
                raise ConfigError(
                    f"drive {number} is the only one of {layout.directory}",
                    next_step="stop the service and remove the pool's directory instead",
                )
            with self._mutex:
                is_known = number in self._drives.lives.numbers
                if is_known and self._drives.shelf.numbers == {number}:
                    raise ConfigError(
                        f"drive {number} is the only one of {layout.directory} that is here",
                        next_step="attach the others first, or add one",
                    )
            self._check_can_withdraw()
            if is_known:
                self._wait_until_nobody_uses(number, end_s)
                self._wait_until_nobody_reaches(number, end_s)
            # Before the index: of a drive that is listed, segments that the index does not know would count as unused.
            drive = listed.find(number)
            try:
                write_drive_list(layout.directory, listed.without_drive(number))
            except BaseException:
                self._stays(number)
                raise
            if is_known:
                self._take_off(number)
            first = first_segment(number)
            count = self._index.forget_drive(range(first, first + MAX_DRIVE_SEGMENTS))
            if drive is not None and drive.path.parent == layout.directory:
                drive.path.unlink(missing_ok=True)
            if drive is not None:
                undo(layout, slices_at(layout, (drive.path,), self._luks), self._luks)
            return count

    # ---- inside --------------------------------------------------------------------------------------------------

    def _wipe_new(self, request: AddDriveRequest, deadline_s: float) -> None:
        """Beside other changes: it may take long, and drives come and go meanwhile."""
        layout = self._drives.layout
        with self._changing(deadline_s):
            self._check_can_add(request)
        if request.data_path:
            wipe_new_drive(
                layout,
                find_drives(layout),
                request.size_bytes,
                Path(request.data_path),
                request.overwrite_serial or None,
                self._drives.check_budget,
                self._go_on,
                self._luks,
            )

    def _go_on(self, done_bytes: int, total_bytes: int) -> None:
        if self._is_closed:
            raise _ending()

    @contextlib.contextmanager
    def _changing(self, deadline_s: float) -> Iterator[None]:
        """One change at a time. Raises ServiceUnavailableError when another takes longer than ``deadline_s``."""
        if not self._changes.acquire(timeout=max(0.0, min(deadline_s, threading.TIMEOUT_MAX))):
            raise ServiceUnavailableError(
                f"another change of the pool's drives has taken longer than {deadline_s:g} s",
                next_step="ask again when it has ended; mfctl jbof drives shows how far it is",
            )
        try:
            if self._is_closed:
                raise _ending()
            yield
        finally:
            self._changes.release()

    def _check_can_add(self, request: AddDriveRequest) -> None:
        if self._exports is not None:
            listed = read_drive_list(self._drives.layout.directory)
            self._exports.check_can_show(1 if listed is None else listed.next_number)
        self._check_room(request.size_bytes)

    def _check_room(self, size_bytes: int) -> None:
        with self._mutex:
            capacity_bytes = self._drives.shelf.geometry.capacity_bytes + size_bytes
        if map_size_bytes(capacity_bytes) > self._index.room_bytes:
            raise ConfigError(
                "the pool would become so large that its index, as it is open now, may not hold it",
                next_step="stop the service, add the drive with the same command, and start it again",
            )

    def _check_can_withdraw(self) -> None:
        """Hosts of a target may reach the drive though this service has let in none: only their target can tell."""
        layout = self._drives.layout
        if self._exports is None and layout.exported.exists():
            exported_as = layout.exported.read_text().strip()
            raise ConfigError(
                f"{layout.directory} was exported ({exported_as}) and is served without these exports now: whether a "
                "host still reaches the drive, only their target can say",
                next_step="serve the pool with these exports, or stop the service and name their configuration: "
                "mfctl jbof remove --config FILE",
            )

    def _wait_until_nobody_uses(self, number: int, end_s: float) -> None:
        """What an engine that lives may still write to it must not hit whoever has it then (rule 3)."""
        with self._mutex:
            self._drives.is_leaving(number, is_so=True)
        while True:
            with self._mutex:
                is_unused = not self._drives.is_pinned(number) and number not in self._drives.answers.late
                is_free = is_unused and self._drives.store.holders.all_current()
                if is_free:
                    return
                if time.monotonic() >= end_s or self._is_closed:
                    self._drives.is_leaving(number, is_so=False)
                    break
            time.sleep(_BETWEEN_LOOKS_S)
        raise PoolBusyError(
            f"engines still read from drive {number} or may write to it, or it has not answered what it was asked",
            next_step="drain it first, or try again: loads and saves end, and what is silent is cut off or given up",
        )

    def _wait_until_nobody_reaches(self, number: int, end_s: float) -> None:
        """Who has the drive next may be another tenant: what a host can still ask of it, and what the target is at,
        must be over (rule 3). Only the target can say so, and a timeout is no answer."""
        exports = self._exports
        if exports is None:
            return
        with self._mutex:
            self._drives.withdraw(number, is_so=True)
        exports.wake()
        while True:
            with self._mutex:
                if self._drives.showing.is_out(number):
                    return
            if time.monotonic() >= end_s or self._is_closed:
                break
            time.sleep(_BETWEEN_LOOKS_S)
        reason = exports.waits_for(number) or exports.problem or "it has not answered yet"
        self._stays(number)
        raise PoolBusyError(
            f"the target has not confirmed that no host reaches drive {number} any more: {reason}",
            next_step="is the target running? Try again when it answers; until then the drive stays the pool's",
        )

    def _stays(self, number: int) -> None:
        """It is shown and used again, when what was begun has ended."""
        with self._mutex:
            self._drives.withdraw(number, is_so=False)
            self._drives.is_leaving(number, is_so=False)

    def _take_off(self, number: int) -> None:
        """Nobody uses it, and nobody can begin to: it is not offered."""
        with self._mutex:
            one = self._drives.left(number)
        self._drives.medium.put(number, None)
        self._drives.owners.release(number)
        if one is not None:
            self._drives.owner.release_data(one.place)
            one.close()


def _ending() -> ServiceUnavailableError:
    return ServiceUnavailableError(
        "the service is ending", next_step="ask again when it is back, or change the pool without it"
    )


__all__ = ["ServedDriveAdmin"]
