"""The right kind of ownership for a drive as it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from meshfusion.jbof.drives.drive import Drive, DriveKind
from meshfusion.jbof.drives.reservation import Reservations
from meshfusion.jbof.drives.system.block_reservations import BlockReservations
from meshfusion.jbof.drives.system.file_lock import FileReservations
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.reservations import ReservationReport, ReservationType


class OpenReservations(Reservations, Protocol):
    def close(self) -> None:
        """The machine's lock ends with it; a drive's reservation stays."""


class ReservableDrive(Reservations, Protocol):
    def close(self) -> None: ...


class LockedReservations:
    """:class:`~meshfusion.jbof.drives.reservation.Reservations` of ``drive``, behind the lock of this machine.

    The lock is taken before the key is registered: to the drive the processes of a machine are one host, so the key
    of a second one would replace that of the owner.
    """

    def __init__(self, lock: FileReservations, drive: ReservableDrive) -> None:
        self._lock = lock
        self._drive = drive

    def register(self, key: int) -> None:
        self._lock.register(key)
        self._drive.register(key)

    def unregister(self, key: int) -> None:
        self._drive.unregister(key)

    def acquire(self, key: int, kind: ReservationType) -> None:
        self._drive.acquire(key, kind)

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        self._drive.preempt_and_abort(key, victim_key, kind)

    def report(self) -> ReservationReport | None:
        return self._drive.report()

    def close(self) -> None:
        self._drive.close()
        self._lock.close()


def open_reservations(drive: Drive) -> OpenReservations:
    """A drive with reservations is reserved, behind the machine's lock; any other, and a file, is locked only.

    Raises :class:`~meshfusion.jbof.errors.MediaError` when it cannot be opened, and
    :class:`~meshfusion.jbof.errors.UnsupportedError` for a drive of SPDK: it is reserved through SPDK.
    """
    path = Path(drive.where)
    if drive.kind is DriveKind.SPDK:
        raise UnsupportedError(
            f"the drive {drive.identity} belongs to SPDK's driver, not to Linux'",
            next_step="Reserve it through SPDK (meshfusion.dpu.export.spdk.reservations).",
        )
    lock = FileReservations(path)
    if drive.kind is DriveKind.FILE or drive.capabilities.reservations is None:
        return lock
    try:
        return LockedReservations(lock, BlockReservations.open(path))
    except BaseException:
        lock.close()
        raise
