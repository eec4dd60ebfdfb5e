"""The bytes: a medium with extents, and host memory in slots that are lent and given back. A block is 8 bytes here."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.jbof.nvme.sim.rules import must

BLOCK = 8
NOMINAL_BLOCK_BYTES = 256 << 10  # what a block counts for a path
MAX_BLOCKS = 8


@dataclass(eq=False)
class Slot:
    """``lease``: whose it is now; older ones may not touch it."""

    data: bytearray = field(default_factory=lambda: bytearray(BLOCK * MAX_BLOCKS))
    lease: int = 0


class HostMemory:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._free: list[Slot] = []

    def lend(self) -> Slot:
        """The last one given back first: whoever still writes it is seen."""
        return self._free.pop() if self._free else Slot()

    def give_back(self, slot: Slot) -> None:
        slot.lease += 1
        slot.data[:] = self._rng.randbytes(len(slot.data))
        self._free.append(slot)


@dataclass(frozen=True, slots=True)
class View:
    """Of a slot under the lease that an attempt began with."""

    slot: Slot
    lease: int
    length: int

    def write(self, data: bytes) -> None:
        must(self.slot.lease == self.lease, "memory is written after it was given back")
        self.slot.data[: len(data)] = data

    def read(self) -> bytes:
        must(self.slot.lease == self.lease, "memory is read after it was given back")
        return bytes(self.slot.data[: self.length])


@dataclass(eq=False)
class Extent:
    """``expected`` is what its last certain write left there; ``reads``: under way."""

    nsid: int
    blocks: int
    content: bytearray = field(init=False)
    expected: bytes | None = None
    reads: int = 0

    def __post_init__(self) -> None:
        self.content = bytearray(self.blocks * BLOCK)
