"""The user of a session in the simulation, who keeps an account of his own of every transfer and every block."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from meshfusion.jbof.nvme.controller_effects import (
    Connected,
    ConnectionLost,
    ControllerLost,
    ControllerState,
    DeathOverdue,
    Disconnected,
    InventoryChanged,
    RequestEnded,
    RetryScheduled,
)
from meshfusion.jbof.nvme.io_commands import LbaRange
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.session import Session
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transfer_effects import (
    SessionEffect,
    TransferDone,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)
from meshfusion.jbof.nvme.transfer_requests import Deallocate, Flush, Read, Request, Write
from meshfusion.jbof.nvme.transport import InvalidateKey, KillLink, LinkEvent, OpenLink, PostCapsule
from tests.jbof.nvme.sim.fabric import MAX_KILL_S, Fabric
from tests.jbof.nvme.sim.memory import REGION_NUMBER, RKEY, HostMemory, Memory, SimScratchPool
from tests.jbof.nvme.sim.rules import must
from tests.jbof.nvme.sim.subsystem import LBA_BYTES, SUBSYSTEM_NQN
from tests.jbof.nvme.sim.target_io import SimIoTarget

TICK_S = 0.01
SLOTS, SLOT_BYTES = 48, 16384
CELLS, CELL_LBAS = 24, 32  # of each namespace; one transfer at a time in a cell
SETTINGS = ControllerSettings(
    subsystem_nqn=SUBSYSTEM_NQN,
    host_nqn="nqn.2026-01.com.example:host",
    host_id=uuid.UUID(int=7),
    where="sim",
    io_queue_count=3,
    io_queue_depth=8,
    admin_queue_depth=16,
    connect_timeout_s=0.5,
    admin_timeout_s=1.0,
    keep_alive_timeout_s=2.0,
    shutdown_timeout_s=1.0,
    backoff_first_s=0.05,
    backoff_max_s=1.0,
    loss_timeout_s=4.0,
    kill_alarm_s=1.0,
)


@dataclass(eq=False)
class Cell:
    """``content``: what its blocks hold as far as the account goes; None if that is unknown."""

    nsid: int
    lba: int
    content: bytes | None = bytes(CELL_LBAS * LBA_BYTES)
    is_durable: bool = True
    is_busy: bool = False
    doubtful: bool = False  # a write of unknown fate may still land
    version: int = 0


@dataclass(eq=False)
class Transfer:
    """``slots`` of memory are the session's until it is over."""

    request: Request
    cell: Cell | None
    deadline_s: float
    began_s: float
    slots: list[int] = field(default_factory=list)
    data: bytes = b""
    ends: list[str] = field(default_factory=list)
    epoch: int = 0
    covers: list[tuple[Cell, int]] = field(
        default_factory=list
    )  # of a flush: what was written before it, in which version


class Host:
    def __init__(
        self,
        rng: random.Random,
        fabric: Fabric,
        target: SimIoTarget,
        seen: Counter[str],
        make: Callable[..., Session],
        key_scope: KeyScope,
    ) -> None:
        self.rng, self.fabric, self.target, self.seen, self.make = rng, fabric, target, seen, make
        self.settings = replace(SETTINGS, key_scope=key_scope)
        rkey = REGION_NUMBER if key_scope is KeyScope.COMMAND else RKEY
        self.memory = Memory(1 << 40, SLOTS, SLOT_BYTES, rkey)
        self.admin_scratch = SimScratchPool(1 << 20, 8)
        self.range_scratch = SimScratchPool(1 << 30, 2)
        fabric.memory = HostMemory(self.memory, self.admin_scratch.memory, self.range_scratch.memory)
        fabric.tell = self.on_event
        self.open: set[Transfer] = set()
        self.cells = [Cell(nsid, index * CELL_LBAS) for nsid in target.subsystem.namespaces for index in range(CELLS)]
        self.log: list[str] = []
        self.attempts_s: list[float] = []
        self.live_s = 0.0
        self.new_session()

    def new_session(self) -> None:
        # Numbers of links go on: the fabric insists that none is used twice.
        self.attempts_s.clear()
        self.live_s = self.now_s
        first_link = max(self.fabric.opened, default=0) + 1
        self.session = self.make(
            self.settings,
            self.admin_scratch,
            self.range_scratch,
            self.rng.random,
            self.rng.randbytes,
            first_link=first_link,
        )
        self.on_effects(self.session.connect(self.now_s))

    @property
    def now_s(self) -> float:
        return self.fabric.clock.now_s

    @property
    def state(self) -> ControllerState:
        return self.session.controller.state

    # ---- events --------------------------------------------------------------------------------------------------

    def on_event(self, event: LinkEvent) -> None:
        self.on_effects(self.session.handle(self.now_s, event))

    def tick(self) -> None:
        self.on_effects(self.session.tick(self.now_s))
        must(self.session.next_deadline_s > self.now_s, "something is due after a tick")
        if self.state not in (ControllerState.CONNECTING, ControllerState.WAITING, ControllerState.LOSING):
            self.live_s = self.now_s
        must(
            self.now_s < self.live_s + SETTINGS.loss_timeout_s + MAX_KILL_S + 2 * TICK_S,
            "neither connected nor given up",
        )
        for transfer in self.open:
            must(transfer.ends or self.now_s < transfer.deadline_s + TICK_S, "a transfer outlives its deadline")

    def on_effects(self, effects: list[SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case OpenLink() | PostCapsule() | InvalidateKey() | KillLink():
                    if isinstance(effect, OpenLink) and effect.private_data[2:4] == b"\0\0":
                        self._on_attempt()
                    self.seen["keys invalidated here"] += isinstance(effect, InvalidateKey)
                    self.fabric.carry_out(effect)
                case TransferDone(owner) | TransferFailed(owner, _, _) | TransferInDoubt(owner, _):
                    assert isinstance(owner, Transfer)
                    must(not owner.ends, "a transfer ends twice:", owner.ends, effect)
                    owner.ends.append(type(effect).__name__)
                    self.seen[type(effect).__name__] += 1
                    self._on_end(owner, effect)
                case TransferMemoryFree(owner):
                    assert isinstance(owner, Transfer)
                    must(owner.ends == ["TransferInDoubt"], "memory is given back of", owner.ends)
                    owner.ends.append("TransferMemoryFree")
                    self._give_back(owner)
                case Connected() | ConnectionLost() | ControllerLost() | Disconnected() | RequestEnded():
                    self.seen[type(effect).__name__] += 1
                    self.log.append(f"{self.now_s:.3f} {type(effect).__name__}")
                case RetryScheduled() | InventoryChanged() | DeathOverdue():
                    self.seen[type(effect).__name__] += 1

    def _on_attempt(self) -> None:
        must(not self.fabric.links, "a new association while queue pairs of another live")
        recent = [s for s in self.attempts_s if s > self.now_s - 1.0]
        must(len(recent) < 20, "a storm of attempts to connect")
        self.attempts_s = [*recent, self.now_s]

    def _on_end(self, transfer: Transfer, effect: SessionEffect) -> None:
        if isinstance(effect, TransferInDoubt):
            must(self.state is not ControllerState.LIVE, "in doubt while live")
            if transfer.cell is not None and not isinstance(transfer.request, Read):
                transfer.cell.content, transfer.cell.doubtful = None, True
            return
        if isinstance(effect, TransferDone):
            must(self.now_s < transfer.deadline_s, "a late success")
            self._check_done(transfer)
        elif transfer.cell is not None and not isinstance(transfer.request, Read):
            transfer.cell.content = None
        self._give_back(transfer)

    def _give_back(self, transfer: Transfer) -> None:
        for slot in transfer.slots:
            self.memory.content(slot)[:] = self.rng.randbytes(SLOT_BYTES)
            self.memory.free(slot)
        if transfer.cell is not None:
            transfer.cell.is_busy = False
        self.open.remove(transfer)

    def _check_done(self, transfer: Transfer) -> None:
        cell, request = transfer.cell, transfer.request
        same_epoch = transfer.epoch == self.target.epoch
        if isinstance(request, Flush):
            for other, version in transfer.covers:
                if other.version == version and same_epoch:
                    other.is_durable = True
            return
        assert cell is not None
        namespace = self.target.subsystem.namespaces[cell.nsid]
        if isinstance(request, Read):
            found = b"".join(bytes(self.memory.content(slot)) for slot in transfer.slots)
            must(cell.content is None or found == cell.content, "a read brought other bytes", cell.nsid, cell.lba)
            self.seen["reads compared"] += cell.content is not None
            return
        is_durable = not isinstance(request, Write) or request.force_unit_access
        if is_durable:
            must(
                all(
                    namespace.durable.get(cell.lba + i, bytes(LBA_BYTES)) == _block(transfer.data, i)
                    for i in range(CELL_LBAS)
                ),
                "an acknowledged write is not durable",
            )
        elif same_epoch:
            must(namespace.read(cell.lba, CELL_LBAS) == transfer.data, "an acknowledged write is not there")
        cell.content = transfer.data if is_durable or same_epoch else None
        cell.is_durable = is_durable
        cell.version += 1

    def on_power_loss(self) -> None:
        for cell in self.cells:
            cell.doubtful = False if not cell.is_busy else cell.doubtful
            if not cell.is_durable:
                cell.content, cell.is_durable = None, True

    # ---- asking --------------------------------------------------------------------------------------------------

    def act(self, *, is_patient: bool = False) -> None:
        """Begin one transfer of some kind; with deadlines that a target without faults keeps if ``is_patient``."""
        kind = self.rng.choices(("read", "write", "flush", "deallocate"), (5, 6, 1, 1))[0]
        timeout_s = 0.012 if self.rng.random() < 0.02 else self.rng.choice((0.05, 0.5, 0.5, 1.0))
        timeout_s = 1.0 if is_patient else timeout_s
        transfer = Transfer(Flush(0), None, self.now_s + timeout_s, self.now_s, epoch=self.target.epoch)
        cell = self._free_cell()
        if kind == "flush":
            nsid = self.rng.choice(self.cells).nsid
            transfer.request = Flush(nsid)
            transfer.covers = [(c, c.version) for c in self.cells if c.nsid == nsid and not c.is_busy]
        elif cell is None or (kind != "deallocate" and not self._take_memory(transfer)):
            return
        else:
            transfer.cell, cell.is_busy = cell, True
            transfer.request = self._request(kind, cell, transfer)
        self.open.add(transfer)
        self.on_effects(self.session.begin(self.now_s, transfer, transfer.request, transfer.deadline_s))

    def _free_cell(self) -> Cell | None:
        for cell in self.cells:
            if cell.doubtful and not cell.is_busy:
                cell.doubtful = self.target.may_still_write(cell.nsid, cell.lba, CELL_LBAS)
        free = [cell for cell in self.cells if not cell.is_busy and not cell.doubtful]
        return self.rng.choice(free) if free else None

    def _take_memory(self, transfer: Transfer) -> bool:
        slot = self.memory.take()
        if slot is None:
            return False
        transfer.slots = [slot]
        return True

    def _request(self, kind: str, cell: Cell, transfer: Transfer) -> Request:
        if kind == "deallocate":
            cuts = sorted(self.rng.sample(range(1, CELL_LBAS), 2))
            edges = [0, *cuts, CELL_LBAS]
            ranges = [LbaRange(cell.lba + a, b - a) for a, b in pairwise(edges)]
            transfer.data = bytes(CELL_LBAS * LBA_BYTES)
            return Deallocate(cell.nsid, tuple(ranges))
        memory = self._pieces(self.memory.remote(transfer.slots[0]))
        if kind == "read":
            return Read(cell.nsid, cell.lba, memory)
        transfer.data = self.rng.randbytes(SLOT_BYTES)
        self.memory.content(transfer.slots[0])[:] = transfer.data
        return Write(cell.nsid, cell.lba, memory, self.rng.random() < 0.5)

    def _pieces(self, memory: RemoteMemory) -> list[RemoteMemory]:
        """Of whole blocks, so that a target with one descriptor can take them."""
        edges = [0, *sorted(self.rng.sample(range(1, CELL_LBAS), self.rng.randrange(3))), CELL_LBAS]
        return [memory.part(a * LBA_BYTES, (b - a) * LBA_BYTES) for a, b in pairwise(edges)]


def _block(data: bytes, index: int) -> bytes:
    return data[index * LBA_BYTES : (index + 1) * LBA_BYTES]


assert SLOT_BYTES == CELL_LBAS * LBA_BYTES
