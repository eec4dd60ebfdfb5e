"""Reads, writes, flushes and deallocations of namespaces, each of any length, over the I/O queues of a controller.

A *transfer* is cut into commands, which are spread over the queues, one of each transfer in turn. It ends for its owner
in exactly one of three ways:

- :class:`TransferDone`: all commands succeeded;
- :class:`TransferFailed`: it is known what failed or was not sent. Nobody touches its memory any more;
- :class:`TransferInDoubt`: the fate of one of its commands is unknown. :class:`TransferMemoryFree` follows when nobody
  can touch its memory any more, which takes as long as the transport needs to kill queue pairs.

What a write that failed or is in doubt did to the medium is unknown, and in doubt it may be done later (rule 3).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.command import Command, Opcode
from meshfusion.jbof.nvme.controller import Controller, not_connected
from meshfusion.jbof.nvme.controller_effects import ControllerEffect
from meshfusion.jbof.nvme.io_commands import RANGE_BYTES, deallocate
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.queue_effects import (
    CommandDeadlineError,
    CommandEffect,
    Finished,
    InDoubt,
    MemoryFree,
    NotSent,
    QueueFullError,
)
from meshfusion.jbof.nvme.sgl import remote_data
from meshfusion.jbof.nvme.status import NvmeCommandError, is_path_error, is_retryable
from meshfusion.jbof.nvme.transfer_effects import (
    PathUnusableError,
    SessionEffect,
    TransferDone,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)
from meshfusion.jbof.nvme.transfer_requests import RangeList, Request
from meshfusion.jbof.nvme.transport import Scratch, ScratchPool

Effects = list[SessionEffect]


@dataclass(slots=True, eq=False)
class _Transfer:
    """``pending``: still to be sent; ``under_way``: commands that may touch memory."""

    owner: object
    nsid: int
    deadline_s: float
    pending: deque[Command | RangeList]
    under_way: int = 0
    error: MeshFusionError | None = None
    is_retryable: bool = True
    in_doubt: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Part:
    """Owner of one command."""

    transfer: _Transfer
    opcode: Opcode
    scratch: Scratch | None


class Transfers:
    """``scratch_pool`` is for range lists; ``max_transfers`` bounds those that are not over."""

    def __init__(self, controller: Controller, scratch_pool: ScratchPool, *, max_transfers: int) -> None:
        self._controller = controller
        self._scratch_pool = scratch_pool
        self._max_transfers = max_transfers
        self._turns: deque[_Transfer] = deque()  # exactly those with something pending, next first
        self._open_count = 0
        self._last_queue = 0

    @property
    def open_count(self) -> int:
        """Transfers whose memory is not given back."""
        return self._open_count

    @property
    def is_all_sent(self) -> bool:
        """No transfer waits for room in a queue."""
        return not self._turns

    @property
    def next_deadline_s(self) -> float:
        """When :meth:`tick` has something to do; infinite if never."""
        return min((transfer.deadline_s for transfer in self._turns), default=math.inf)

    def begin(self, now_s: float, owner: object, request: Request, deadline_s: float) -> Effects:
        refusal = self._refusal(request.nsid)
        if refusal is not None:
            return [TransferFailed(owner, *refusal)]
        info = self._controller.info
        assert info is not None
        try:
            pending: deque[Command | RangeList] = deque(
                request.commands(
                    info, self._controller.inventory.namespaces[request.nsid], self._controller.settings.key_scope
                )
            )
        except MeshFusionError as error:
            return [TransferFailed(owner, error, is_retryable=False)]
        assert pending
        self._open_count += 1
        self._turns.append(_Transfer(owner, request.nsid, deadline_s, pending))
        return self._send(now_s)

    def handle(self, now_s: float, effects: Iterable[ControllerEffect]) -> Effects:
        """Act on what became of commands of transfers; everything else is kept."""
        kept: Effects = []
        for effect in effects:
            if _ends_part(effect):
                kept += self._on_command(effect)
            else:
                kept.append(effect)
        return kept + self._send(now_s)

    def tick(self, now_s: float) -> Effects:
        """Give up what is late and not sent at ``now_s``; what is sent, the queue pairs watch."""
        error = CommandDeadlineError(
            f"{self._controller.settings.where}: a transfer's deadline passed before all of it was sent",
            next_step="Look at the load of the target, or transfer less at a time.",
        )
        return self._drop([transfer for transfer in self._turns if now_s >= transfer.deadline_s], error)

    # ---- one transfer --------------------------------------------------------------------------------------------

    def _refusal(self, nsid: int) -> tuple[MeshFusionError, bool] | None:
        """Why nothing can be sent to the namespace now, and whether that may change."""
        where = self._controller.settings.where
        if not self._controller.is_live:
            return not_connected(where), True
        namespace = self._controller.inventory.namespaces.get(nsid)
        if namespace is None:
            step = "Check the namespace's number, and what the target exports to this host."
            return MediaError(f"{where} has no namespace {nsid}", next_step=step), False
        if namespace.problem is not None:
            step = "Export a namespace of the NVM command set without metadata."
            return UnsupportedError(f"{where}, namespace {nsid}: {namespace.problem}", next_step=step), False
        state = self._controller.ana_state(nsid)
        if state is None or not state.is_usable:
            words = state.name.lower().replace("_", " ") if state is not None else "in no ANA group"
            step = "Nothing, while another path works; otherwise look at the target's access state."
            return PathUnusableError(f"{where}: namespace {nsid} is {words} here", next_step=step), True
        if self._open_count >= self._max_transfers:
            step = "Transfer less at a time."
            return QueueFullError(f"{where}: {self._open_count} transfers are open already", next_step=step), True
        return None

    def _on_command(self, effect: CommandEffect) -> Effects:
        part = effect.owner
        assert isinstance(part, _Part)
        transfer = part.transfer
        match effect:
            case InDoubt(_, error):
                self._fail(transfer, error, is_retryable=True)
                if transfer.in_doubt:
                    return []
                transfer.in_doubt = True
                return [TransferInDoubt(transfer.owner, error)]
            case NotSent(_, error):
                self._fail(transfer, error, is_retryable=True)
            case Finished(_, completion) if not completion.status.is_success:
                where = f"{self._controller.settings.where}, namespace {transfer.nsid}"
                failure = NvmeCommandError(completion.status, part.opcode, where=where)
                self._fail(transfer, failure, is_retryable=is_retryable(completion.status, part.opcode))
                if is_path_error(completion.status):
                    self._controller.path_failed()
        if part.scratch is not None:
            self._scratch_pool.give_back(part.scratch)
        transfer.under_way -= 1
        return self._settle(transfer)

    def _fail(self, transfer: _Transfer, error: MeshFusionError, *, is_retryable: bool) -> None:
        """No more of it is sent; the first error is the one to tell."""
        transfer.pending.clear()
        with suppress(ValueError):
            self._turns.remove(transfer)
        if transfer.error is None:
            transfer.error, transfer.is_retryable = error, is_retryable

    def _settle(self, transfer: _Transfer) -> Effects:
        """If nothing of it is to be sent or under way, it is over."""
        assert transfer.under_way >= 0
        if transfer.under_way or transfer.pending:
            return []
        assert not transfer.is_over, "a transfer ends once"
        transfer.is_over = True
        self._open_count -= 1
        if transfer.in_doubt:
            return [TransferMemoryFree(transfer.owner)]
        if transfer.error is not None:
            return [TransferFailed(transfer.owner, transfer.error, transfer.is_retryable)]
        return [TransferDone(transfer.owner)]

    def _drop(self, transfers: Iterable[_Transfer], error: MeshFusionError) -> Effects:
        """Send no more of these, which have something to send."""
        effects: Effects = []
        for transfer in transfers:
            self._fail(transfer, error, is_retryable=True)
            effects += self._settle(transfer)
        return effects

    # ---- sending -------------------------------------------------------------------------------------------------

    def _send(self, now_s: float) -> Effects:
        """As much as the queues have room for."""
        if not self._turns:
            return []
        if not self._controller.is_live:
            return self._drop(list(self._turns), not_connected(self._controller.settings.where))
        effects: Effects = []
        without_scratch = 0  # transfers in a row that could not go on
        while without_scratch < len(self._turns) and (queue := self._freest_queue()) is not None:
            transfer = self._turns.popleft()
            scratch = None
            if isinstance(transfer.pending[0], RangeList) and (scratch := self._scratch_pool.lend()) is None:
                without_scratch += 1
            else:
                without_scratch = 0
                effects += self._send_one(now_s, queue, transfer, scratch)
            if transfer.pending:
                self._turns.append(transfer)
        return effects

    def _send_one(self, now_s: float, queue: QueuePair, transfer: _Transfer, scratch: Scratch | None) -> Effects:
        command = transfer.pending.popleft()
        if isinstance(command, RangeList):
            assert scratch is not None
            scratch.write(command.data)
            place = remote_data(scratch.remote.part(0, len(command.data)))
            command = deallocate(transfer.nsid, len(command.data) // RANGE_BYTES, place)
        transfer.under_way += 1
        effects: Effects = []
        part = _Part(transfer, command.opcode, scratch)
        for effect in self._controller.submit_io(now_s, queue, part, command, transfer.deadline_s):
            effects += self._on_command(effect) if _ends_part(effect) else [effect]
        return effects

    def _freest_queue(self) -> QueuePair | None:
        """That with the most room; equals take turns."""
        queues = self._controller.io_queues
        count = len(queues)
        freest, most_room = None, 0
        for step in range(1, count + 1):
            index = (self._last_queue + step) % count
            room = queues[index].room
            if room > most_room:
                freest, most_room, found = queues[index], room, index
        if freest is not None:
            self._last_queue = found
        return freest


def _ends_part(effect: SessionEffect) -> TypeGuard[CommandEffect]:
    return isinstance(effect, Finished | NotSent | InDoubt | MemoryFree) and isinstance(effect.owner, _Part)
