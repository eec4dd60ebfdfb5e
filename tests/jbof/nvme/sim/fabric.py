"""Time, and the connections between host and target: the transport of :mod:`meshfusion.jbof.nvme.transport`.

Checks the host's half of that contract, and keeps the transport's half in the least helpful way that it allows.
"""

from __future__ import annotations

import heapq
import random
import struct
from collections.abc import Callable
from typing import Protocol

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.transport import (
    Bind,
    InvalidateKey,
    KeyInvalidated,
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
from tests.jbof.nvme.sim.memory import REGION_NUMBER, Action, HostMemory
from tests.jbof.nvme.sim.rules import must
from tests.jbof.nvme.sim.windows import SimWindows

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

    def __init__(self, fabric: Fabric, number: int, depth: int, private_data: bytes, window_count: int) -> None:
        self.number = number
        self.depth = depth
        self.private_data = private_data
        self.is_up = False
        self.is_broken = False  # as the host was told
        self.is_killed = False  # as the host asked
        self.is_dead = False
        self.is_misled = False  # by the target itself, which has ended keys of commands that it still works on
        self.sends: set[int] = set()
        self.unanswered: set[int] = set()
        self.invalidations: set[int] = set()
        self.windows = SimWindows(number, window_count, fabric.memory)
        self._fabric = fabric

    # ---- the target's end ----------------------------------------------------------------------------------------

    def up(self, private_data: bytes) -> None:
        self.is_up = True
        self._tell(LinkUp(self.number, private_data, self.windows.keys))

    def break_off(self, reason: str) -> None:
        """The host hears of it, unless it is over for the host anyway."""
        if not self.is_broken:
            self._tell(LinkBroken(self.number, MediaError(reason, next_step="none")))
            self.is_broken = True

    def respond(self, data: bytes, invalidated_key: int | None = None) -> None:
        if self.is_dead:
            return
        if invalidated_key is not None and not self.windows.kill(invalidated_key):
            self.break_off("a dead key was invalidated")
            return
        self.unanswered.discard(int.from_bytes(data[12:14], "little"))
        self._tell(Received(self.number, data, invalidated_key))

    def memory(self, address: int, length_bytes: int, key: int, *, is_written: bool) -> memoryview | None:
        """RDMA READ or WRITE. None: the queue pair is gone, or ends by it."""
        if self.is_dead:
            return None
        bind = self.windows.opened_by(key)
        if bind is None and self.is_misled:
            self.break_off("a dead key was used")
            return None
        if bind is None:
            must(key != REGION_NUMBER, "the number of a region was told as a key")
            return self._fabric.memory.reached(address, length_bytes, key)
        must(bind.is_written is is_written, "a window in the wrong direction")
        first, last = bind.memory.address, bind.memory.address + bind.memory.length_bytes
        must(first <= address <= address + length_bytes <= last, "access outside of a window")
        return self._fabric.memory.reached(address, length_bytes, bind.memory.rkey)

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
            case OpenLink(number, depth, private_data, _, window_count):
                must(number not in self.opened, "link", number, "is opened twice")
                self.opened.add(number)
                link = self.links[number] = Link(self, number, depth, private_data, window_count)
                self.clock.after(self.latency_s(), lambda: None if link.is_dead else self.target.accept(link))
            case PostCapsule(number, command_id, capsule, bind):
                self._post(self.links[number], command_id, capsule, bind)
            case InvalidateKey(number, command_id, key):
                self._invalidate(self.links[number], command_id, key)
            case KillLink(number):
                link = self.links[number]
                must(not link.is_killed, "link", number, "is killed twice")
                link.is_killed = True
                slow = self.is_rough and self.rng.random() < 0.1
                self.clock.after(
                    self.rng.uniform(0.5, MAX_KILL_S) if slow else self.latency_s(), lambda: self._die(link)
                )

    def _post(self, link: Link, command_id: int, capsule: bytes, bind: Bind | None) -> None:
        must(link.is_up and not link.is_broken and not link.is_killed, "a capsule for a link that is not up")
        must(command_id not in link.sends, "two sends under way with identifier", command_id)
        link.sends.add(command_id)
        link.unanswered.add(command_id)
        must(len(link.sends | link.unanswered) < link.depth, "more commands under way than fit in the queue")
        if bind is not None:
            address, rest = struct.unpack_from("<QQ", capsule, 24)  # Base Figure 122
            must(rest >> 24 & 0xFFFFFFFF == bind.key, "the target is told another key than is bound")
            must(rest >> 56 == 0x4F, "the target is not asked to invalidate the key")
            link.windows.bind(bind, address, rest & 0xFFFFFF, is_written=capsule[0] == 2)
        self.clock.after(self.latency_s(), lambda: self.target.receive(link, capsule))
        slow = self.is_rough and self.rng.random() < 0.03
        self.clock.after(
            self.rng.uniform(0.01, 0.3) if slow else self.latency_s(), lambda: self._sent(link, command_id)
        )

    def _sent(self, link: Link, command_id: int) -> None:
        if not link.is_broken and not link.is_killed:
            link.sends.remove(command_id)
            self.tell(Sent(link.number, command_id))

    def _invalidate(self, link: Link, command_id: int, key: int) -> None:
        must(link.is_up and not link.is_broken and not link.is_killed, "an invalidation for a link that is not up")
        must(link.windows.opened_by(key) is not None, "a dead key is invalidated")  # which stops Linux' soft-RoCE
        must(command_id not in link.invalidations, "two invalidations under way for command", command_id)
        link.invalidations.add(command_id)
        self.clock.after(self.latency_s(), lambda: self._invalidated(link, command_id, key))

    def _invalidated(self, link: Link, command_id: int, key: int) -> None:
        if not link.is_broken and not link.is_killed:
            must(link.windows.kill(key), "a key dies twice")
            link.invalidations.remove(command_id)
            self.tell(KeyInvalidated(link.number, command_id))

    def _die(self, link: Link) -> None:
        link.is_dead = True
        link.windows.kill_all()
        del self.links[link.number]
        self.clock.after(self.latency_s(), lambda: self.target.gone(link))
        self.tell(LinkDead(link.number))
