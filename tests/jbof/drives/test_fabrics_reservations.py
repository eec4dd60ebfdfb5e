"""What becomes of a conflict, and of a target without reservations. The commands themselves: tests/jbof/nvme, and a
real target in tests/lab."""

from __future__ import annotations

from typing import Any

import pytest

from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.drives.system.fabrics_reservations import FabricsReservations
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.command import IoOpcode
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.jbof.nvme.reservation_host import ReservationHost
from meshfusion.jbof.nvme.reservations import KeyChange, ReservationType
from meshfusion.jbof.nvme.status import NvmeCommandError, Status
from tests.jbof.nvme.sim.live import LiveTransport
from tests.jbof.nvme.test_initiator import SETTINGS, subsystem

WE = ReservationType.WRITE_EXCLUSIVE


class Scripted:
    """A ReservationHost whose calls fail with what is given, in order."""

    def __init__(self, *statuses: Status | None) -> None:
        self.statuses = list(statuses)
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> None:
            self.calls.append((name, *arguments))
            status = self.statuses.pop(0) if self.statuses else None
            if status is not None:
                raise NvmeCommandError(status, IoOpcode.RESERVATION_ACQUIRE, where="x")

        return call


CONFLICT, INTERNAL = Status(0, 0x83), Status(0, 0x06)


def made(host: Scripted) -> FabricsReservations:
    return FabricsReservations(host)  # type: ignore[arg-type]


def test_conflicts_and_other_errors() -> None:
    with pytest.raises(ReservationConflictError, match="Reservation Conflict"):
        made(Scripted(CONFLICT)).acquire(1, WE)
    with pytest.raises(ReservationConflictError):
        made(Scripted(CONFLICT)).preempt_and_abort(1, 2, WE)
    with pytest.raises(ReservationConflictError):
        made(Scripted(CONFLICT)).unregister(1)
    with pytest.raises(NvmeCommandError, match="Internal Error"):
        made(Scripted(INTERNAL)).acquire(1, WE)


def test_a_registered_host_replaces_its_key() -> None:
    host = Scripted(CONFLICT)
    made(host).register(7)
    assert host.calls == [("change_key", KeyChange.REGISTER, 7), ("change_key", KeyChange.REPLACE, 7)]
    host = Scripted()
    made(host).register(7)
    assert host.calls == [("change_key", KeyChange.REGISTER, 7)]
    with pytest.raises(NvmeCommandError):
        made(Scripted(INTERNAL)).register(7)


def test_a_target_without_reservations() -> None:
    transport = LiveTransport(subsystem())
    initiator = Initiator(transport, SETTINGS, 5.0)
    try:
        with pytest.raises(UnsupportedError, match="namespace 3 has no reservations"):
            made(ReservationHost(initiator, 3)).register(7)  # type: ignore[arg-type]
    finally:
        initiator.close()
