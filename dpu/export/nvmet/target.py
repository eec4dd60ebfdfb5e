"""The kernel's target. One subsystem per host incarnation (``layout.one_subsystem_per_host``): removing a host from a
subsystem leaves its controllers connected, so that only its whole subsystem can be taken away.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from meshfusion.dpu.export.actual import Actual
from meshfusion.dpu.export.desired import Address, AnaState, Export
from meshfusion.dpu.export.errors import ExportError
from meshfusion.dpu.export.fence import Fence, NotYet, verdict, withdrawal
from meshfusion.dpu.export.layout import host_subsystem_nqn
from meshfusion.dpu.export.nvmet.actual import read_actual
from meshfusion.dpu.export.nvmet.configfs import ConfigFs
from meshfusion.dpu.export.nvmet.steps import carry_out
from meshfusion.dpu.export.nvmet.worker import Worker
from meshfusion.dpu.export.reconcile import Report, reconcile
from meshfusion.dpu.export.steps import Step
from meshfusion.jbof.errors import ConfigError

_LOG = logging.getLogger(__name__)


class NvmetTarget:
    """Holds what is desired. For one thread at a time. ``patience_s``: how long a change may hold up its caller."""

    removal_disconnects = False

    def __init__(self, tree: ConfigFs, desired: Export, *, patience_s: float = 5.0) -> None:
        self._tree = tree
        self._worker = Worker(patience_s)
        self._working_on = ""
        self._desired = check(desired)

    def desire(self, desired: Export) -> Report:
        """From now on this. Hosts fenced before stay fenced. Raises as :func:`check` does."""
        self._desired = check(desired.fencing(self._desired.fenced))
        return self.reconcile()

    def reconcile(self) -> Report:
        """Make the kernel's target as desired, as far as it goes now. Never raises for faults of the target."""
        return reconcile(self, self._desired)

    def fence(self, host_nqn: str) -> Fence:
        """Take the host's subsystem away for good, and say whether that is confirmed; ask again until it is.

        Confirmed means that its subsystem is gone, and that each of its namespaces was disabled before, which waits for
        the requests in flight.
        """
        self._desired = check(self._desired.fencing(frozenset({host_nqn})))
        self.reconcile()
        if busy := self._worker.busy_with:  # before reading: whatever it is, it could give the host something yet
            return NotYet(busy)
        try:
            actual = self.read(self._desired)
        except ExportError as error:
            return NotYet(error.message)
        return verdict(actual, host_nqn, host_subsystem_nqn(self._desired.nqn_prefix, host_nqn))

    def withdraw(self, nsid: int, backing: str) -> Fence:
        """Is the drive behind this namespace, which is not desired any more, shown to nobody, and at rest? Ask again
        until it is confirmed, after :meth:`desire`."""
        if busy := self._worker.busy_with:  # as of a fence
            return NotYet(busy)
        try:
            actual = self.read(self._desired)
        except ExportError as error:
            return NotYet(error.message)
        return withdrawal(actual, nsid, backing, self._desired.manages)

    def read(self, desired: Export) -> Actual:
        actual = read_actual(self._tree)
        busy = self._worker.busy_with
        return tuple(
            replace(there, pending=busy) if busy and there.nqn == self._working_on else there for there in actual
        )

    def apply(self, step: Step) -> None:
        if not self._worker.busy_with:
            self._working_on = step.nqn
        self._worker.run(f"{step}", lambda: carry_out(self._tree, step))
        _LOG.info("applied %s", step)


def check(desired: Export) -> Export:
    """What this target shall have of it: subsystems whose host is fenced are not wanted at all.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` for what nvmet cannot do safely.
    """
    states: dict[Address, AnaState] = {}
    wanted = set()
    for subsystem in desired.subsystems:
        if len(subsystem.hosts) != 1:
            raise _refusal(f"{subsystem.nqn} has {len(subsystem.hosts)} hosts, not one")
        (host,) = subsystem.hosts
        if subsystem.nqn != host_subsystem_nqn(desired.nqn_prefix, host.nqn):
            raise _refusal(f"{subsystem.nqn} is not named after its host {host.nqn}")
        if subsystem.is_secure:
            raise _refusal(f"{subsystem.nqn} is for TLS, which this version does not set up in the kernel")
        for listener in subsystem.listeners:  # an nvmet port has one ANA state for all subsystems
            if states.setdefault(listener.address, listener.ana_state) != listener.ana_state:
                raise _refusal(f"{listener.address} would have two ANA states")
        if host.nqn not in desired.fenced:
            wanted.add(subsystem)
    return replace(desired, subsystems=frozenset(wanted))


def _refusal(problem: str) -> ConfigError:
    return ConfigError(
        f"cannot be exported by nvmet: {problem}", next_step="Use layout.one_subsystem_per_host and equal listeners."
    )
