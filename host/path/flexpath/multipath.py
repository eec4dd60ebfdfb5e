"""Several initiators that look like one: reads and writes go over whichever path is best, and survive the loss of one.

What initiators tell, on their threads, and what callers ask goes to one machine, a thing at a time, without anybody
waiting for anybody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from meshfusion.host.path.flexpath.flushing import Flushing
from meshfusion.host.path.flexpath.link import CurrentKey, PathSpec
from meshfusion.host.path.flexpath.links import Links
from meshfusion.host.path.flexpath.pieces import Piece, Whole, pieces_of
from meshfusion.host.path.flexpath.regions import parts_on
from meshfusion.host.path.flexpath.report import PathReport, report_of
from meshfusion.host.path.flexpath.requests import Attempt, Begin, Kind, PathChanged, SpreadEffect
from meshfusion.host.path.flexpath.same_namespace import SameNamespaces
from meshfusion.host.path.flexpath.serial import Serial
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.spread import Effects, Spread
from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.controller import not_connected
from meshfusion.jbof.nvme.controller_effects import (
    Connected,
    ConnectionLost,
    ControllerEvent,
    ControllerLost,
    Disconnected,
    InventoryChanged,
)
from meshfusion.jbof.nvme.memory import RegionPart, RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingTransfer
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange
from meshfusion.jbof.nvme.transfer_effects import (
    TransferDone,
    TransferEffect,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)

TICK_S: Final = 0.005
RETRY_S: Final = 5.0
_IDLE_TICK_S: Final = 0.05

logger = logging.getLogger("meshfusion.path")


@dataclass(slots=True, eq=False)
class _Transfer:
    """Of one piece. ``inner``: its last attempt."""

    whole: Whole
    nsid: int
    piece: Piece
    inner: PendingTransfer | None = None
    is_told: bool = False  # that it is in doubt


class _Task(NamedTuple):
    """``transfers``: which begin with it."""

    call: Callable[[float], Effects]
    transfers: Sequence[_Transfer] = ()


class Multipath:
    """Keeps :class:`~meshfusion.host.path.rdma.NamespaceInitiator`. It owns what ``paths`` open.

    Paths that cannot be opened now, or are given up by their initiator later, are tried again every ``retry_s``.
    ``key``: with which ``paths`` are opened, where they authenticate.
    Raises :class:`~meshfusion.host.path.flexpath.requests.NoPathError` if none can be opened.
    """

    def __init__(
        self,
        paths: Sequence[PathSpec],
        settings: SpreadSettings | None = None,
        *,
        retry_s: float = RETRY_S,
        key: CurrentKey | None = None,
    ) -> None:
        settings = settings or SpreadSettings()
        self._piece_bytes = settings.piece_bytes
        self._spread = Spread(settings, [spec.weight for spec in paths], [spec.name for spec in paths])
        self._tasks: Serial[_Task | Callable[[], None]] = Serial(self._work)
        self._open: set[_Transfer] = set()  # of whoever is at work
        self._crash: MeshFusionError | None = None
        self._namespaces = SameNamespaces()  # of whoever is at work
        self._is_over = threading.Event()
        self._when_closed: list[Callable[[], None]] = []
        self._links = Links(
            paths, self._on_event, self._on_joined, self._wait_for_turn, retry_s=retry_s, key=key or CurrentKey()
        )
        self._flushing = Flushing(self._links)
        self._links.open()
        threading.Thread(target=self._tick_loop, name="flexpath-tick", daemon=True).start()

    # ---- for the caller ------------------------------------------------------------------------------------------

    @property
    def max_descriptors(self) -> int:
        """The least of all paths that were there at the start; paths that take fewer are not used later."""
        return self._links.max_descriptors

    def reports(self) -> list[PathReport]:
        """For people and metrics; may be asked from any thread, and is not of one instant."""
        return [report_of(lane, self._links.last_error(lane.path)) for lane in self._spread.lanes]

    def disable(self, name: str) -> None:
        """All paths of this name get nothing new, from any thread. With none left, requests fail and say why.

        Raises :class:`~meshfusion.jbof.errors.ConfigError`: there is none.
        """
        for path in self._named(name):
            self._tasks.put(_Task(partial(self._spread.disable, path=path)))

    def enable(self, name: str) -> None:
        """They are used again. Raises as :meth:`disable` does."""
        for path in self._named(name):
            self._tasks.put(_Task(partial(self._spread.enable, path=path)))

    def use_key(self, host_key: Secret) -> None:
        """Authenticate with this key whenever a path connects anew. What is connected stays so."""
        self._links.use_key(host_key)

    def when_closed(self, call: Callable[[], None]) -> None:
        """``call`` at the end of :meth:`close`."""
        self._when_closed.append(call)

    def lba_bytes(self, nsid: int) -> int | None:
        """Of a block of this namespace; None: no path has shown it."""
        return self._namespaces.lba_bytes(nsid)

    def register_address(self, address: int, length_bytes: int, *, writable: bool, owner: object) -> RegisteredRegion:
        """With every path, also those to come. Raises what one that is there raises."""
        return self._links.register(AddressRange(address, length_bytes), writable=writable, owner=owner)

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        """The same. Its file descriptor must stay open until the region is closed: paths may come at any time."""
        return self._links.register(memory, writable=writable, owner=owner)

    def begin_read(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self._begin(Kind.READ, nsid, lba, memory, timeout_s)

    def begin_write(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        return self._begin(Kind.WRITE, nsid, lba, memory, timeout_s)

    def flush(self, nsid: int, *, timeout_s: float) -> None:
        """All writes since the last flush, successful or not, are durable when this returns. One saver at a time.

        Raises :class:`~meshfusion.jbof.errors.MeshFusionError`: they are not known to be.
        """
        self._flushing.flush(nsid, timeout_s=timeout_s)

    def close(self, *, timeout_s: float) -> None:
        """As an initiator's: in order for ``timeout_s``, then at once. Again is no error.

        Raises what closing a path raises, when all others are closed: memory may still be in use there.
        """
        self._tasks.put(_Task(self._spread.close))
        self._wait_for_turn()
        self._links.close(timeout_s=timeout_s)
        self._is_over.set()
        calls, self._when_closed = self._when_closed, []
        for call in calls:
            call()

    def _named(self, name: str) -> list[int]:
        lanes = self._spread.lanes
        paths = [lane.path for lane in lanes if lane.name == name]
        if not paths:
            known = ", ".join(lane.name for lane in lanes)
            raise ConfigError(f"there is no path {name!r}", next_step=f"Name one of these: {known}.")
        return paths

    def _begin(
        self, kind: Kind, nsid: int, lba: int, memory: Sequence[RegionPart], timeout_s: float
    ) -> PendingTransfer:
        deadline_s = time.monotonic() + timeout_s
        pending = PendingTransfer(memory, deadline_s)
        lba_bytes = self._namespaces.lba_bytes(nsid)
        if lba_bytes is None:
            pieces = [Piece(lba, tuple(memory))]
        else:
            pieces = list(pieces_of(lba, memory, lba_bytes, self._piece_bytes))
        whole = Whole(pending, len(pieces))
        transfers = [_Transfer(whole, nsid, piece) for piece in pieces]

        def begin(now_s: float) -> Effects:
            effects: Effects = []
            for transfer in transfers:
                length_bytes = transfer.piece.length_bytes
                effects += self._spread.begin(now_s, transfer, kind, nsid, length_bytes, deadline_s)
            return effects

        self._tasks.put(_Task(begin, transfers))
        return pending

    # ---- the machine, used by one thread at a time ---------------------------------------------------------------

    def _wait_for_turn(self) -> None:
        """Until everything is done that was to be done before, such as a call of an initiator that will be closed."""
        turn = threading.Event()
        self._tasks.put(turn.set)
        turn.wait()

    def _work(self, task: _Task | Callable[[], None]) -> None:
        if not isinstance(task, _Task):
            task()
            return
        self._open.update(task.transfers)
        if self._crash is None:
            try:
                now_s = time.monotonic()
                for effect in task.call(now_s):
                    self._carry_out(now_s, effect)
            except Exception as error:  # a bug of ours
                logger.critical("FlexPath ended", exc_info=error)
                self._crash = MediaError(
                    f"FlexPath ended by a bug: {error!r}", next_step="Report this as a bug; start the engine again."
                )
        if self._crash is not None:
            self._leave_nobody_waiting(self._crash)

    def _carry_out(self, now_s: float, effect: SpreadEffect) -> None:
        match effect:
            case Begin(attempt):
                self._attempt(now_s, attempt)
            case PathChanged(path, state):
                logger.info("path %s is %s", self._links.name(path), state.value)
            case TransferDone(_Transfer() as transfer):
                self._open.remove(transfer)
                transfer.whole.done()
            case TransferFailed(_Transfer() as transfer, error, is_retryable):
                self._open.remove(transfer)
                transfer.whole.failed(error, is_retryable=is_retryable)
            case TransferInDoubt(_Transfer() as transfer, error):
                transfer.is_told = True
                transfer.whole.in_doubt(error)
            case TransferMemoryFree(_Transfer() as transfer):
                self._open.remove(transfer)
                transfer.whole.memory_free()

    def _attempt(self, now_s: float, attempt: Attempt) -> None:
        request, initiator = attempt.request, self._links.initiator(attempt.path)
        transfer = request.owner
        assert isinstance(transfer, _Transfer)
        if initiator is None:
            self._became(TransferFailed(attempt, not_connected(self._links.name(attempt.path)), is_retryable=True))
            return
        begin = initiator.begin_read if request.kind is Kind.READ else initiator.begin_write
        memory = parts_on(attempt.path, transfer.piece.memory)
        inner = begin(transfer.nsid, transfer.piece.lba, memory, timeout_s=max(0.0, attempt.deadline_s - now_s))
        transfer.inner = inner
        inner.when_ended(partial(self._on_ended, attempt, inner))

    def _leave_nobody_waiting(self, error: MeshFusionError) -> None:
        """Memory is free when the last attempt says so, whatever the machine thought."""
        transfers, self._open = self._open, set()
        for transfer in transfers:
            if not transfer.is_told:
                transfer.whole.in_doubt(error)
            if transfer.inner is None:
                transfer.whole.memory_free()
            else:
                transfer.inner.when_memory_free(partial(self._tasks.put, transfer.whole.memory_free))

    def _tell_access(self, path: int, now_s: float) -> Effects:
        """What the path reaches, as is known when the machine gets to it."""
        initiator = self._links.initiator(path)
        if initiator is None:
            return []
        inventory = initiator.inventory
        access = self._namespaces.access(path, inventory)
        if not inventory.namespaces:  # not connected any more, or there is nothing to be had
            return self._spread.access_changed(now_s, path, access)
        return self._spread.connected(now_s, path, access)

    # ---- on other threads: the initiators', and that which opens paths -------------------------------------------

    def _became(self, effect: TransferEffect) -> None:
        self._tasks.put(_Task(partial(self._spread.on_transfer, effect=effect)))

    def _on_ended(self, attempt: Attempt, inner: PendingTransfer) -> None:
        if inner.error is not None:
            self._links.note(attempt.path, inner.error)
        if inner.is_in_doubt:
            assert inner.error is not None
            self._became(TransferInDoubt(attempt, inner.error))
            inner.when_memory_free(lambda: self._became(TransferMemoryFree(attempt)))
        elif inner.error is not None:
            self._became(TransferFailed(attempt, inner.error, inner.is_retryable))
        else:
            if attempt.request.kind is Kind.WRITE:
                # by the thread that will tell of its connection's loss, so before that
                self._flushing.wrote(attempt.path, attempt.request.nsid)
            self._became(TransferDone(attempt))

    def _on_event(self, path: int, event: ControllerEvent) -> None:
        match event:
            case ConnectionLost() | ControllerLost() | Disconnected():
                self._flushing.lost(path)
                if not isinstance(event, Disconnected):
                    self._links.note(path, event.error)
                if isinstance(event, ControllerLost):
                    self._links.give_up(path)
                self._tasks.put(_Task(partial(self._spread.lost, path=path)))
            case Connected() | InventoryChanged():
                self._on_joined(path)

    def _on_joined(self, path: int) -> None:
        self._tasks.put(_Task(partial(self._tell_access, path)))

    def _tick_loop(self) -> None:
        while not self._is_over.wait(TICK_S if self._spread.open_count else _IDLE_TICK_S):
            self._tasks.put(_Task(self._spread.tick))
