"""The host's registered memory: slots that are in use or free. A target that touches a free one breaks a rule.

Free is what no key opens: memory under windows (see :mod:`.windows`) may be given back only when they are dead.
"""

from __future__ import annotations

from collections.abc import Callable

from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import SCRATCH_BYTES
from tests.jbof.nvme.sim.rules import must

RKEY = 0x5EED
REGION_NUMBER = 77  # stands in place of a key where there are windows


class Memory:
    """``slot_count`` slots of ``slot_bytes``, from ``base`` on, under ``rkey``: a key, or REGION_NUMBER."""

    def __init__(self, base: int, slot_count: int, slot_bytes: int, rkey: int = RKEY) -> None:
        self.base = base
        self.rkey = rkey
        self.slot_bytes = slot_bytes
        self.data = bytearray(slot_count * slot_bytes)
        self._in_use = [False] * slot_count
        self._windows = [0] * slot_count  # that are open

    def take(self) -> int | None:
        """The number of a free slot, which is in use from now on."""
        for slot, in_use in enumerate(self._in_use):
            if not in_use:
                self._in_use[slot] = True
                return slot
        return None

    def free(self, slot: int) -> None:
        must(self._in_use[slot], "memory", slot, "is given back twice")
        must(self._windows[slot] == 0, "memory", slot, "is given back while a key opens it")
        self._in_use[slot] = False

    @property
    def in_use_count(self) -> int:
        return sum(self._in_use)

    def remote(self, slot: int) -> RemoteMemory:
        return RemoteMemory(self.base + slot * self.slot_bytes, self.slot_bytes, self.rkey)

    def content(self, slot: int) -> memoryview:
        return memoryview(self.data)[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def holds(self, address: int) -> bool:
        return self.base <= address < self.base + len(self.data)

    def reached(self, address: int, length_bytes: int) -> memoryview:
        """By the target, over the fabric."""
        first = self._slot(address, length_bytes)
        must(self._in_use[first], "the target touches memory", first, "which is free")
        offset = address - self.base
        return memoryview(self.data)[offset : offset + length_bytes]

    def count_window(self, address: int, length_bytes: int, change: int) -> None:
        """A window is opened (1) or dead (-1)."""
        slot = self._slot(address, length_bytes)
        must(self._in_use[slot], "a window is bound to memory", slot, "which is free")
        self._windows[slot] += change

    def _slot(self, address: int, length_bytes: int) -> int:
        offset = address - self.base
        must(0 <= offset <= offset + length_bytes <= len(self.data), "access outside of registered memory")
        first, last = offset // self.slot_bytes, (offset + length_bytes - 1) // self.slot_bytes
        must(first == last, "access across the end of a slot")
        return first


class SimScratch:
    def __init__(self, memory: Memory, slot: int) -> None:
        self._memory = memory
        self.slot = slot

    @property
    def remote(self) -> RemoteMemory:
        return self._memory.remote(self.slot)

    def read(self, length_bytes: int) -> bytes:
        return bytes(self._memory.content(self.slot)[:length_bytes])

    def write(self, data: bytes) -> None:
        self._memory.content(self.slot)[: len(data)] = data


class SimScratchPool:
    def __init__(self, base: int, count: int) -> None:
        self.memory = Memory(base, count, SCRATCH_BYTES)

    def lend(self) -> SimScratch | None:
        slot = self.memory.take()
        return None if slot is None else SimScratch(self.memory, slot)

    def give_back(self, scratch: object) -> None:
        assert isinstance(scratch, SimScratch)
        self.memory.free(scratch.slot)


class HostMemory:
    """All of it, as the target reaches it."""

    def __init__(self, *memories: Memory) -> None:
        self._memories = memories

    def reached(self, address: int, length_bytes: int, key: int) -> memoryview:
        """``key``: of the region, or its number if it is reached through a window."""
        return self._memory(address, key).reached(address, length_bytes)

    def count_window(self, address: int, length_bytes: int, region: int, change: int) -> None:
        self._memory(address, region).count_window(address, length_bytes, change)

    def _memory(self, address: int, key: int) -> Memory:
        memory = next((memory for memory in self._memories if memory.holds(address)), None)
        must(memory is not None, "access outside of registered memory", hex(address))
        assert memory is not None
        must(key == memory.rkey, "an unknown key", hex(key))
        return memory


Action = Callable[[], None]
