"""The simulated target in real time, as a transport for an initiator: what targets touch are real registered arrays."""

from __future__ import annotations

import ctypes
import random
import time
from collections import Counter

import numpy as np

from meshfusion.jbof.nvme.memory import RegionScratchPool, RegisteredRegion
from meshfusion.jbof.nvme.registration import AddressRange, MemoryRange
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import SCRATCH_BYTES, KillLink, LinkEvent, TransportEffect
from tests.jbof.nvme.sim.fabric import Clock, Fabric
from tests.jbof.nvme.sim.memory import HostMemory
from tests.jbof.nvme.sim.rules import must
from tests.jbof.nvme.sim.subsystem import Subsystem
from tests.jbof.nvme.sim.target_io import SimIoTarget


class RealMemory(HostMemory):
    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[int, tuple[RemoteMemory, bool]] = {}  # by key

    def reached(self, address: int, length_bytes: int, key: int) -> memoryview:
        must(key in self.regions, "the target uses the key of memory that is not registered any more")
        memory, _ = self.regions[key]
        must(memory.address <= address <= address + length_bytes <= memory.address + memory.length_bytes, "outside")
        return memoryview((ctypes.c_char * length_bytes).from_address(address)).cast("B")

    def count_window(self, address: int, length_bytes: int, region: int, change: int) -> None:
        must(region in self.regions or change < 0, "a window on memory that is not registered any more")


class LiveTransport:
    """``subsystem`` is well behaved, unless a test makes ``target`` behave otherwise."""

    def __init__(self, subsystem: Subsystem) -> None:
        rng = random.Random(1)
        self.memory = RealMemory()
        self.clock = Clock()
        self.fabric = Fabric(self.clock, rng, self.memory)
        self.target = SimIoTarget(self.clock, rng, subsystem, Counter())
        self.target.pending = []
        self.fabric.target = self.target
        self.fabric.is_rough = self.target.is_rough = False
        self.is_closed = False
        self._began_s = time.monotonic()
        self._events: list[LinkEvent] = []
        self.fabric.tell = self._events.append
        self._next_key = 100
        self._registered: list[RegisteredRegion] = []

    def carry_out(self, now_s: float, effect: TransportEffect) -> None:
        self.fabric.carry_out(effect)

    def poll(self, now_s: float) -> list[LinkEvent]:
        self.clock.run_until(max(self.clock.now_s, now_s - self._began_s))
        events = list(self._events)
        self._events.clear()
        return events

    def kill_all(self, now_s: float) -> None:
        for link in list(self.fabric.links.values()):
            if not link.is_killed:
                self.fabric.carry_out(KillLink(link.number))

    @property
    def is_idle(self) -> bool:
        return not self.fabric.links

    def register(self, memory: MemoryRange, *, writable: bool, owner: object) -> RegisteredRegion:
        assert isinstance(memory, AddressRange), "the simulation has no dma-bufs"
        self._next_key += 1
        key = self._next_key
        remote = RemoteMemory(memory.first_iova, memory.length_bytes, key)
        self.memory.regions[key] = (remote, writable)
        region = RegisteredRegion(remote, owner, lambda: self.memory.regions.pop(key) and None)
        self._registered.append(region)
        return region

    def scratch_pool(self, count: int) -> RegionScratchPool:
        buffer = np.zeros(count * SCRATCH_BYTES, np.uint8)
        memory = AddressRange(buffer.ctypes.data, buffer.nbytes)
        return RegionScratchPool(self.register(memory, writable=True, owner=buffer), buffer)

    def close(self) -> None:
        must(self.is_idle, "closed while links live")
        for region in self._registered:
            region.revoke()
        self.is_closed = True
