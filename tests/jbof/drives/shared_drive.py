"""A drive that several hosts reach, with NVMe's reservations of the type Write Exclusive (Base 8.1.22), by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshfusion.jbof.drives.ownership import OwnerRecord
from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.nvme.reservations import Registrant, ReservationReport, ReservationType


def conflict() -> ReservationConflictError:
    return ReservationConflictError("reservation conflict", next_step="none")


@dataclass
class SharedDrive:
    """``keys``: of registered hosts. ``holder``: of the reservation. ``record``: what its medium has."""

    can_report: bool = True
    keys: dict[str, int] = field(default_factory=dict)
    holder: str | None = None
    record: OwnerRecord | None = None
    preempted: list[str] = field(default_factory=list)

    def host(self, name: str) -> DriveAsHost:
        return DriveAsHost(self, name)

    def may_write(self, name: str) -> bool:
        return self.holder in (None, name)


@dataclass
class DriveAsHost:
    """Reservations and records, as one host."""

    drive: SharedDrive
    name: str

    def register(self, key: int) -> None:
        self.drive.keys[self.name] = key

    def unregister(self, key: int) -> None:
        if self.drive.keys.get(self.name) != key:
            raise conflict()
        self._forget(self.name)

    def acquire(self, key: int, kind: ReservationType) -> None:
        assert kind is ReservationType.WRITE_EXCLUSIVE
        if self.drive.keys.get(self.name) != key or self.drive.holder not in (None, self.name):
            raise conflict()
        self.drive.holder = self.name

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        victims = [name for name, registered in self.drive.keys.items() if registered == victim_key]
        if self.drive.keys.get(self.name) != key or not victims:
            raise conflict()
        held = self.drive.holder in victims
        for name in victims:
            self._forget(name)
            self.drive.preempted.append(name)
        if held:
            self.drive.holder = self.name

    def report(self) -> ReservationReport | None:
        if not self.drive.can_report:
            return None
        registrants = tuple(
            Registrant(key, name.encode(), name == self.drive.holder) for name, key in self.drive.keys.items()
        )
        kind = ReservationType.WRITE_EXCLUSIVE if self.drive.holder else None
        return ReservationReport(1, kind, persists=True, registrants=registrants)

    def read(self) -> OwnerRecord | None:
        return self.drive.record

    def write(self, record: OwnerRecord) -> None:
        if not self.drive.may_write(self.name):
            raise conflict()
        self.drive.record = record

    def _forget(self, name: str) -> None:
        del self.drive.keys[name]
        if self.drive.holder == name:
            self.drive.holder = None
