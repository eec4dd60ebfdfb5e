"""One path as its initiator shows it: it keeps the contract of transfers in the least helpful way that it allows.

Bytes pass one after the other at its bandwidth. A connection that is lost, or does not answer by an attempt's deadline,
leaves everything in doubt; until its death is confirmed reads may land in memory, and writes may land on the medium
even later.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.host.path.flexpath.requests import Attempt, Kind
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.command import IoOpcode
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.queue_effects import QueueLostError
from meshfusion.jbof.nvme.status import NvmeCommandError, Status
from meshfusion.jbof.nvme.transfer_effects import (
    PathUnusableError,
    TransferDone,
    TransferEffect,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)
from tests.host.path.flexpath.sim.memory import Extent, View
from tests.jbof.nvme.sim.fabric import Clock

MAX_KILL_S = 3.0
BACKOFF_S = 0.5
LATE_LANDING_S = 5.0
LOST = QueueLostError("lost", next_step="none")
ANA_INACCESSIBLE = Status(3, 0x02)
INTERNAL_PATH_ERROR = Status(3, 0x00)
TRANSFER_ERROR = Status(0, 0x04)
UNRECOVERED = Status(2, 0x81, dnr=True)


@dataclass(eq=False)
class Command:
    attempt: Attempt
    extent: Extent
    view: View
    association: int
    start_s: float
    is_over: bool = False  # as the host was told


class SimPath:
    """``tell`` takes what becomes of attempts, ``lost`` and ``up`` what becomes of the connection."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        rng: random.Random,
        seen: Counter[str],
        *,
        bandwidth_bytes_per_s: float,
        latency_s: float,
    ) -> None:
        self.number = number
        self.clock = clock
        self.rng = rng
        self.seen = seen
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.latency_s = latency_s
        self.slowness = 1.0
        self.is_stalled = False
        self.is_down = False
        self.is_connected = False
        self.error_part = 0.0  # of the commands fail
        self.loss_part = 0.0  # of the responses are lost
        self.max_kill_s = 0.05
        self.access: dict[int, AnaState] = {}  # the truth
        self.told_access: dict[int, AnaState] = {}
        self.moved_bytes = 0
        self.tell: Callable[[TransferEffect], None]
        self.lost: Callable[[int], None]
        self.up: Callable[[int, bool], None]
        self._association = 0
        self._free_s = 0.0
        self._commands: dict[Command, None] = {}
        self._held: list[Command] = []

    # ---- faults --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self.is_connected or self.is_down or self.is_stalled:
            return
        self._association += 1
        self.is_connected = True
        self._free_s = self.clock.now_s
        self.told_access = dict(self.access)
        self.up(self.number, True)

    def kill(self) -> None:
        self.is_down = True
        self._break()

    def revive(self) -> None:
        self.is_down = self.is_stalled = False
        self.clock.after(self.rng.uniform(0.01, BACKOFF_S), self.connect)

    def stall(self) -> None:
        """Nothing comes back, and nobody says so."""
        self.is_stalled = True

    def unstall(self) -> None:
        self.is_stalled = False
        held, self._held = self._held, []
        for command in held:
            self._finish(command)
        self.clock.after(self.rng.uniform(0.01, BACKOFF_S), self.connect)

    def set_access(self, nsid: int, state: AnaState) -> None:
        self.access[nsid] = state
        self.clock.after(self.rng.uniform(0.002, 0.05), self._tell_access)

    def _tell_access(self) -> None:
        if self.is_connected and not self.is_stalled and self.told_access != self.access:
            self.told_access = dict(self.access)
            self.up(self.number, False)

    # ---- commands ------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, extent: Extent, view: View) -> None:
        now_s = self.clock.now_s
        start_s = max(now_s, self._free_s)
        command = Command(attempt, extent, view, self._association, start_s)
        self._commands[command] = None
        refusal = None
        if not self.is_connected:
            refusal = TransferFailed(attempt, LOST, is_retryable=True)
        elif not self.told_access[extent.nsid].is_usable:
            refusal = TransferFailed(attempt, PathUnusableError("inaccessible", next_step="none"), is_retryable=True)
        if refusal is not None:
            failed = refusal
            self.clock.after(0.0, lambda: self._over(command, failed))
            return
        service_s = attempt.request.length_bytes / self.bandwidth_bytes_per_s * self.slowness
        service_s *= self.rng.uniform(0.5, 1.5)
        self._free_s = start_s + service_s
        self.clock.after(self._free_s + self.latency_s - now_s, lambda: self._finish(command))
        self.clock.after(max(0.0, attempt.deadline_s - now_s), lambda: self._deadline(command))

    def _finish(self, command: Command) -> None:
        if command.is_over or command.association != self._association or not self.is_connected:
            return
        if self.is_stalled:
            self._held.append(command)
            return
        if self.rng.random() < self.error_part:
            self._fail(command)
        elif self.access[command.extent.nsid].is_usable:
            self._move(command)
            if self.rng.random() < self.loss_part:
                self.seen["responses lost"] += 1
                return
            self.moved_bytes += command.attempt.request.length_bytes
            self._over(command, TransferDone(command.attempt))
        else:
            self.seen["access errors"] += 1
            self._over(command, _failure(command.attempt, ANA_INACCESSIBLE))

    def _fail(self, command: Command) -> None:
        status = self.rng.choice((INTERNAL_PATH_ERROR, INTERNAL_PATH_ERROR, TRANSFER_ERROR, UNRECOVERED))
        self.seen["commands failed"] += 1
        if self.rng.random() < 0.5:
            self._move(command)
        self._over(command, _failure(command.attempt, status))

    def _move(self, command: Command) -> None:
        if command.attempt.request.kind is Kind.READ:
            command.view.write(bytes(command.extent.content))
        else:
            command.extent.content[:] = command.view.read()

    def _over(self, command: Command, effect: TransferEffect) -> None:
        if not command.is_over:
            command.is_over = True
            del self._commands[command]
            self.tell(effect)

    # ---- the end of a connection ---------------------------------------------------------------------------------

    def _deadline(self, command: Command) -> None:
        if not command.is_over:
            self.seen["connections given up"] += 1
            self._break()

    def _break(self) -> None:
        if not self.is_connected:
            return
        self.is_connected = False
        self._held.clear()
        commands = list(self._commands)
        self._commands.clear()
        now_s = self.clock.now_s
        kill_s = self.rng.uniform(0.001, self.max_kill_s)
        tell_loss_first = self.rng.random() < 0.5
        if tell_loss_first:
            self.lost(self.number)
        for command in commands:
            command.is_over = True
            if command.start_s > now_s and self.rng.random() < 0.5:
                self.tell(TransferFailed(command.attempt, LOST, is_retryable=True))
            else:
                self._doubt(command, kill_s)
        if not tell_loss_first:
            self.lost(self.number)
        self.clock.after(kill_s + BACKOFF_S, self.connect)

    def _doubt(self, command: Command, kill_s: float) -> None:
        self.seen["in doubt"] += 1
        after = self.clock.after
        if command.attempt.request.kind is Kind.READ:
            after(self.rng.uniform(0, kill_s), lambda: self._move(command))
        elif self.rng.random() < 0.7:
            after(self.rng.uniform(0, kill_s), lambda: self._take_for_later(command))
        self.tell(TransferInDoubt(command.attempt, LOST))
        after(kill_s, lambda: self.tell(TransferMemoryFree(command.attempt)))

    def _take_for_later(self, command: Command) -> None:
        data = command.view.read()

        def land() -> None:
            self.seen["writes landed late"] += 1
            command.extent.content[:] = data

        self.clock.after(self.rng.uniform(0, LATE_LANDING_S), land)


def _failure(attempt: Attempt, status: Status) -> TransferFailed:
    opcode = IoOpcode.READ if attempt.request.kind is Kind.READ else IoOpcode.WRITE
    return TransferFailed(attempt, NvmeCommandError(status, opcode, where="sim"), is_retryable=not status.dnr)


def is_refusal(error: MeshFusionError) -> bool:
    """Does it say that the namespace is not reached there now?"""
    is_status = isinstance(error, NvmeCommandError) and error.status == ANA_INACCESSIBLE
    return is_status or isinstance(error, PathUnusableError)
