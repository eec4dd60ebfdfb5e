"""Two machines that reach the pool's one drive: who owns it, by the real procedure, and with which index it serves.

The machine that was replaced may be alive: paused, or cut off from everything but the drive. Its service (a *rival*)
and its hosts go on as if nothing had happened, and must not reach the medium any more.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

from meshfusion.jbof.drives import ownership
from meshfusion.jbof.drives.reservation import Reservations
from tests.jbof.drives.shared_drive import SharedDrive
from tests.sim.medium import IndexModel

MACHINES = ("first", "second")
_SERVICES = {machine: uuid.uuid5(uuid.NAMESPACE_DNS, machine) for machine in MACHINES}

# How a machine's service becomes the owner: the reservations of the drive as that machine, its service, a new key.
Take = Callable[[SharedDrive, str, uuid.UUID, int], None]


def take(drive: SharedDrive, machine: str, service: uuid.UUID, key: int) -> None:
    reservations: Reservations = drive.host(machine)
    steps = ownership.take(service, key, may_take_over=True)
    ownership.carry_out(steps, reservations, drive.host(machine))


class Owners:
    """``on_preempted``: what this machine has under way at the drive is aborted."""

    def __init__(self, rng: random.Random, on_preempted: Callable[[str], None], take: Take, *, checks_epoch: bool):
        self.machine = MACHINES[0]
        self.drive = SharedDrive()
        self._indices = {machine: IndexModel() for machine in MACHINES}
        self.latest = self.index  # of who served last
        self._epoch_on_drive = 0
        self._rng, self._on_preempted, self._take, self._checks_epoch = rng, on_preempted, take, checks_epoch

    @property
    def index(self) -> IndexModel:
        """Of the machine that serves."""
        return self._indices[self.machine]

    def move(self) -> None:
        """The other machine is told to serve."""
        self.machine = MACHINES[1 - MACHINES.index(self.machine)]

    def begin(self) -> None:
        """Before a life of the service: it owns the drive, and its index is not behind the epoch on it."""
        self._take(self.drive, self.machine, _SERVICES[self.machine], self._rng.getrandbits(63) + 1)
        for machine in self.drive.preempted:
            self._on_preempted(machine)
        self.drive.preempted.clear()
        if self._checks_epoch and self._epoch_on_drive > self.index.epoch:
            self._indices[self.machine] = self.latest.rebuilt(self._epoch_on_drive)
        self.latest = self.index
        self._epoch_on_drive = self.index.epoch + 1  # which this life begins

    def may_write(self, machine: str) -> bool:
        """As the drive sees it."""
        return self.drive.may_write(machine)
