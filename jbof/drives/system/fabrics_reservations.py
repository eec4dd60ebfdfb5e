"""Reservations of a namespace that our own initiator has connected to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.nvme.reservation_host import ReservationHost
from meshfusion.jbof.nvme.reservations import KeyChange, ReservationReport, ReservationType
from meshfusion.jbof.nvme.status import NvmeCommandError

_CONFLICT = (0, 0x83)  # Reservation Conflict (Base Figure 102)


class FabricsReservations:
    """:class:`~meshfusion.jbof.drives.reservation.Reservations`, for the host identifier of the initiator."""

    def __init__(self, host: ReservationHost) -> None:
        self._host = host

    def register(self, key: int) -> None:
        """To a host that is registered under another key, Register is a conflict (Base 8.1.22)."""
        try:
            self._change(KeyChange.REGISTER, key)
        except ReservationConflictError:
            self._change(KeyChange.REPLACE, key)

    def unregister(self, key: int) -> None:
        self._change(KeyChange.UNREGISTER, key)

    def acquire(self, key: int, kind: ReservationType) -> None:
        with _conflicts_named():
            self._host.acquire(key, kind)

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        with _conflicts_named():
            self._host.preempt_and_abort(key, victim_key, kind)

    def report(self) -> ReservationReport | None:
        return self._host.report()

    def _change(self, change: KeyChange, key: int) -> None:
        with _conflicts_named():
            self._host.change_key(change, key)


@contextlib.contextmanager
def _conflicts_named() -> Iterator[None]:
    try:
        yield
    except NvmeCommandError as error:
        if (error.status.sct, error.status.sc) != _CONFLICT:
            raise
        raise ReservationConflictError(error.message, next_step=error.next_step) from error
