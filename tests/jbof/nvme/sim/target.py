"""A simulated NVMe/RDMA target: its connections, and how it misbehaves. See :mod:`.target_admin`, :mod:`.target_io`.

Decodes capsules by the figures of the specification, independently of the code under test.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from dataclasses import dataclass, field

from tests.jbof.nvme.sim.fabric import Clock, Link
from tests.jbof.nvme.sim.rules import must
from tests.jbof.nvme.sim.subsystem import Subsystem

INTERNAL_ERROR = 0x006
INVALID_FIELD = 0x4002  # do not retry
NO_NAMESPACE = 0x400B


@dataclass(slots=True, eq=False)
class Capsule:
    """A command on its way, and the controller as it was when it came."""

    link: Link
    data: bytes
    controller: SimController | None

    @property
    def opcode(self) -> int:
        return self.data[0]

    @property
    def command_id(self) -> int:
        return self.number(2, 2)

    @property
    def nsid(self) -> int:
        return self.number(4, 4)

    def number(self, offset: int, size: int) -> int:
        return int.from_bytes(self.data[offset : offset + size], "little")

    def descriptors(self) -> list[tuple[int, int, int]]:
        """(address, length, key) by RDMA Figures 9 and 10, from entry 1 or from the list behind the entry."""
        if self.data[39] == 0x31:
            must(self.number(24, 8) == 0, "a list that is not right behind the entry")
            length = self.number(32, 4)
            must(len(self.data) == 64 + length, "a capsule that does not end with its list")
            entries = [self.data[i : i + 16] for i in range(64, 64 + length, 16)]
        else:
            must(len(self.data) == 64, "a capsule with more than a command")
            entries = [self.data[24:40]]
        must(all(entry[15] in (0x40, 0x4F) for entry in entries), "a descriptor that is not keyed")
        decoded = [struct.unpack("<QQ", entry) for entry in entries]
        return [(address, rest & 0xFFFFFF, rest >> 24 & 0xFFFFFFFF) for address, rest in decoded if rest & 0xFFFFFF]

    @property
    def key_to_invalidate(self) -> int | None:
        """That the host allows it to (RDMA Figure 10: sub type Fh)."""
        return self.number(35, 4) if self.data[39] == 0x4F else None


@dataclass(slots=True, eq=False)
class SimController:
    number: int
    keep_alive_s: float
    links: dict[int, Link] = field(default_factory=dict)
    last_seen_s: float = 0.0
    ready_s: float = float("inf")
    is_shut_down: bool = False
    is_gone: bool = False
    events_wanted: int = 0
    requests: list[Capsule] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    masked: set[tuple[int, int, int]] = field(default_factory=set)
    request_times_s: list[float] = field(default_factory=list)


class SimTarget:
    def __init__(self, clock: Clock, rng: random.Random, subsystem: Subsystem, seen: Counter[str]) -> None:
        self.clock = clock
        self.rng = rng
        self.subsystem = subsystem
        self.seen = seen
        self.is_rough = True
        self.away_until_s = 0.0
        self.refuses_while_away = True
        self.silent_until_s = 0.0
        self.storm_until_s = 0.0
        self.epoch = 0
        self.controllers: dict[int, SimController] = {}
        self.next_controller = 1
        self.owners: dict[Link, SimController] = {}

    def chance(self, probability: float, name: str) -> bool:
        """Does the target misbehave now?"""
        if not self.is_rough or self.rng.random() >= probability:
            return False
        self.seen[name] += 1
        return True

    def is_deaf(self) -> bool:
        return self.clock.now_s < max(self.away_until_s, self.silent_until_s)

    # ---- connections ---------------------------------------------------------------------------------------------

    def accept(self, link: Link) -> None:
        record, queue_id, entries, size, controller_id = struct.unpack_from("<HHHHH", link.private_data)
        must((record, entries, size) == (0, link.depth, link.depth - 1), "wrong private data", link.private_data.hex())
        nobody_listens = self.clock.now_s < self.away_until_s and self.refuses_while_away
        if not nobody_listens and (self.is_deaf() or self.chance(0.02, "connections ignored")):
            return
        unknown = queue_id and controller_id not in self.controllers
        if nobody_listens or unknown or self.chance(0.02, "connections refused"):
            link.break_off("refused")
            return
        link.up(struct.pack("<HH28x", 0, self.rng.choice((link.depth, link.depth, 4)) if self.is_rough else link.depth))

    def gone(self, link: Link) -> None:
        """The host's queue pair is dead: like Linux' target, keep the controller only if it is not the admin queue."""
        controller = self.owners.pop(link, None)
        if controller is not None:
            controller.links = {queue_id: other for queue_id, other in controller.links.items() if other is not link}
            if 0 not in controller.links:
                self.end(controller, "its admin queue is gone")

    def end(self, controller: SimController, reason: str) -> None:
        controller.is_gone = True
        self.controllers.pop(controller.number, None)
        for link in controller.links.values():
            self.owners.pop(link, None)
            if not self.chance(0.3, "links cut in silence"):
                link.break_off(reason)
        controller.links.clear()

    def restart(self, away_s: float) -> None:
        self.epoch += 1
        self.away_until_s = self.clock.now_s + away_s
        self.refuses_while_away = self.rng.random() < 0.5
        for controller in list(self.controllers.values()):
            self.end(controller, "the target restarts")
        self.subsystem.lose_power()

    # ---- commands ------------------------------------------------------------------------------------------------

    def receive(self, link: Link, data: bytes) -> None:
        if self.clock.now_s < self.silent_until_s:
            self.clock.after(self.silent_until_s - self.clock.now_s, lambda: self.receive(link, data))
            return
        if self.is_deaf():
            return
        capsule = Capsule(link, data, self.owners.get(link))
        must(data[1] == 0x40, "PSDT", data[1])
        if capsule.opcode == 0x7F and data[4] == 0x01:
            self.connect(capsule)
        elif capsule.controller is None:
            pass  # of a controller that has ended
        elif capsule.controller.links.get(0) is link:
            self.admin(capsule, capsule.controller)
        else:
            self.io(capsule, capsule.controller)

    def connect(self, capsule: Capsule) -> None:
        raise NotImplementedError

    def admin(self, capsule: Capsule, controller: SimController) -> None:
        raise NotImplementedError

    def io(self, capsule: Capsule, controller: SimController) -> None:
        raise NotImplementedError

    def respond(self, capsule: Capsule, status: int = 0, result: int = 0) -> None:
        """``status``: do-not-retry, type and code, without the phase tag, which over Fabrics means nothing."""
        delay_s = self.rng.uniform(0.0001, 0.004)
        is_event = capsule.opcode == 0x0C
        # A request for events waits without a deadline: a lost answer to it would never be noticed, by any host.
        if not is_event and self.chance(0.004, "responses lost"):
            return
        if self.chance(0.006, "responses late"):
            delay_s = self.rng.uniform(0.2, 3.0)
        command_id = capsule.command_id
        if self.chance(0.001, "responses to nobody"):
            command_id = (command_id + self.rng.randrange(1000, 60000)) % 0x10000
        tail = struct.pack("<HHHH", self.rng.randrange(128), self.rng.randrange(8), command_id, 0)
        data = struct.pack("<Q", result) + tail[:6] + struct.pack("<H", status << 1 | self.rng.randrange(2))
        if self.chance(0.0007, "responses cut short"):
            data = data[:9]
        epoch = self.epoch
        key = self._key_with_response(capsule)

        def send() -> None:
            if self.clock.now_s < self.silent_until_s:
                self.clock.after(self.silent_until_s - self.clock.now_s, send)
            elif epoch == self.epoch:
                capsule.link.respond(data, key)

        self.clock.after(delay_s, send)
        if self.chance(0.003, "responses twice"):
            self.clock.after(delay_s + self.rng.uniform(0, 0.05), send)

    def _key_with_response(self, capsule: Capsule) -> int | None:
        """It need not be invalidated, and must not be another."""
        key = capsule.key_to_invalidate
        if key is None or self.rng.random() < 0.2:
            return None
        others = [other for other in capsule.link.windows.bound_keys if other != key]
        if others and self.chance(0.015, "keys of others invalidated"):
            capsule.link.is_misled = True
            return self.rng.choice(others)
        self.seen["keys invalidated by the target"] += 1
        return key

    def copy_in(self, capsule: Capsule) -> bytes | None:
        """RDMA READ of the command's data; None: the queue pair is gone."""
        parts = [capsule.link.memory(*descriptor, is_written=False) for descriptor in capsule.descriptors()]
        return None if any(part is None for part in parts) else b"".join(bytes(part) for part in parts if part)

    def copy_out(self, capsule: Capsule, data: bytes) -> bool:
        """RDMA WRITE. False: the queue pair is gone."""
        for address, length, key in capsule.descriptors():
            memory = capsule.link.memory(address, length, key, is_written=True)
            if memory is None:
                return False
            memory[:], data = data[:length], data[length:]
        must(not data, "the command's memory is too short")
        return True
