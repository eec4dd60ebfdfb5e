"""Ownership among the processes of one machine: an exclusive lock on the file or device node.

For files it is all there is. For drives it comes before the reservation, because the processes of one machine are one
host to the drive.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.reservations import ReservationReport, ReservationType


class FileReservations:
    """:class:`~meshfusion.jbof.drives.reservation.Reservations` by a lock that ends with the process (flock(2)).

    Nobody can be cut off: a process that lives has the lock, and one that is dead has lost it.
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MediaError(
                f"{path} cannot be locked: {error.strerror}", next_step="Check its permissions."
            ) from error

    def close(self) -> None:
        """The lock ends with it."""
        os.close(self._fd)

    def register(self, key: int) -> None:
        """Takes the lock: whoever has it has nobody to contend with any more."""
        self._lock()

    def unregister(self, key: int) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def acquire(self, key: int, kind: ReservationType) -> None:
        self._lock()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ReservationConflictError(
                f"{self._path} is in use by another process", next_step=f"See which: `fuser {self._path}`."
            ) from error
        except OSError as error:
            raise MediaError(
                f"{self._path} cannot be locked: {error.strerror}", next_step="Use a filesystem with flock."
            ) from error

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        raise UnsupportedError(
            f"a process that has {self._path} cannot be cut off from it",
            next_step=f"End that process: `fuser {self._path}` tells which it is.",
        )

    def report(self) -> ReservationReport | None:
        return None
