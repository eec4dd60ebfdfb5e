"""What a drive must offer so that it can have one owner, whoever carries the commands. Implementations do I/O."""

from __future__ import annotations

from typing import Protocol

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.reservations import ReservationReport, ReservationType


class ReservationConflictError(MediaError):
    """Another host's registration or reservation is in the way."""


class Reservations(Protocol):
    """Of one drive, as one host. All raise :class:`ReservationConflictError` where another host is in the way,
    :class:`~meshfusion.jbof.errors.UnsupportedError` where the drive has no such thing, and
    :class:`~meshfusion.jbof.errors.MediaError` for anything else. Keys are not 0.
    """

    def register(self, key: int) -> None:
        """Make ``key`` this host's, whatever it had. Durable, where the drive can do that.

        A conflict: another process of this machine has the drive.
        """

    def unregister(self, key: int) -> None:
        """Give ``key`` up, and a reservation with it."""

    def acquire(self, key: int, kind: ReservationType) -> None:
        """Reserve the drive; no error for who holds it already, with the same type."""

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        """Take registration and reservation from the hosts with ``victim_key``.

        When this returns, nothing that they began is under way any more (Base 8.1.22; SPC-5 5.14.11.3).
        """

    def report(self) -> ReservationReport | None:
        """None: there is no way to ask."""
