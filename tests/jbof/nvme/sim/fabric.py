"""Time, and the connections between host and target: the transport of :mod:`meshfusion.jbof.nvme.transport`.

Checks the host's half of that contract, and keeps the transport's half in the least helpful way that it allows.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Protocol

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.transport import (
    KillLink,
    LinkBroken,
    LinkDead,
    LinkEvent,
    LinkUp,
    OpenLink,
    PostCapsule,
    Received,
    Sent,
    TransportEffect,
)
from tests.jbof.nvme.sim.memory import Action, HostMemory
from tests.jbof.nvme.sim.rules import must

MAX_KILL_S = 3.0


class Clock:
    """What is to happen when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def after(self, delay_s: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, action))

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def run_until(self, end_s: float) -> None:
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.now_s = end_s


class TargetSide(Protocol):
    """What a connection needs of the target."""

    def accept(self, link: Link) -> None: ...

    def receive(self, link: Link, capsule: bytes) -> None: ...

    def gone(self, link: Link) -> None: ...


class Link:
    """Both ends of one connection."""

    def __init__(self, fabric: Fabric, number: int, depth: int, private_data: bytes) -> None:
        self.number = number
        self.depth = depth
        self.private_data = private_data
        self.is_up = False
        self.is_broken = False  # as the host was told
        self.is_killed = False  # as the host asked
        self.is_dead = False
        self.sends: set[int] = set()
        self.unanswered: set[int] = set()
        self._fabric = fabric

    # ---- the target's end ----------------------------------------------------------------------------------------

    def up(self, private_data: bytes) -> None:
        self.is_up = True
        self._tell(LinkUp(self.number, private_data))

    def break_off(self, reason: str) -> None:
        """The host hears of it, unless it is over for the host anyway."""
        if not self.is_broken:
            self._tell(LinkBroken(self.number, MediaError(reason, next_step="none")))
            self.is_broken = True

    def respond(self, data: bytes, invalidated_key: int | None = None) -> None:
        self.unanswered.discard(int.from_bytes(data[12:14], "little"))
        self._tell(Received(self.number, data, invalidated_key))

    def memory(self, address: int, length_bytes: int, key: int) -> memoryview | None:
        """RDMA READ or WRITE. None: the queue pair is gone."""
        return None if self.is_dead else self._fabric.memory.reached(address, length_bytes, key)

    def _tell(self, event: LinkEvent) -> None:
        if self.is_broken or self.is_dead:
            return
        if self.is_killed and self._fabric.rng.random() < 0.5:
            return
        self._fabric.tell(event)


class Fabric:
    """``tell``: takes events for the host."""

    def __init__(self, clock: Clock, rng: random.Random, memory: HostMemory) -> None:
        self.clock = clock
        self.rng = rng
        self.memory = memory
        self.tell: Callable[[LinkEvent], None]
        self.target: TargetSide
        self.links: dict[int, Link] = {}
        self.opened: set[int] = set()
        self.is_rough = True

    def latency_s(self) -> float:
        return self.rng.uniform(0.0001, 0.004)

    def carry_out(self, effect: TransportEffect) -> None:
        match effect:
            case OpenLink(number, depth, private_data, _):
                must(number not in self.opened, "link", number, "is opened twice")
                self.opened.add(number)
                link = self.links[number] = Link(self, number, depth, private_data)
                self.clock.after(self.latency_s(), lambda: None if link.is_dead else self.target.accept(link))
            case PostCapsule(number, command_id, capsule):
                self._post(self.links[number], command_id, capsule)
            case KillLink(number):
                link = self.links[number]
                must(not link.is_killed, "link", number, "is killed twice")
                link.is_killed = True
                slow = self.is_rough and self.rng.random() < 0.1
                self.clock.after(
                    self.rng.uniform(0.5, MAX_KILL_S) if slow else self.latency_s(), lambda: self._die(link)
                )

    def _post(self, link: Link, command_id: int, capsule: bytes) -> None:
        must(link.is_up and not link.is_broken and not link.is_killed, "a capsule for a link that is not up")
        must(command_id not in link.sends, "two sends under way with identifier", command_id)
        link.sends.add(command_id)
        link.unanswered.add(command_id)
        must(len(link.sends | link.unanswered) < link.depth, "more commands under way than fit in the queue")
        self.clock.after(self.latency_s(), lambda: self.target.receive(link, capsule))
        slow = self.is_rough and self.rng.random() < 0.03
        self.clock.after(
            self.rng.uniform(0.01, 0.3) if slow else self.latency_s(), lambda: self._sent(link, command_id)
        )

    def _sent(self, link: Link, command_id: int) -> None:
        if not link.is_broken and not link.is_killed:
            link.sends.remove(command_id)
            self.tell(Sent(link.number, command_id))

    def _die(self, link: Link) -> None:
        link.is_dead = True
        del self.links[link.number]
        self.clock.after(self.latency_s(), lambda: self.target.gone(link))
        self.tell(LinkDead(link.number))
