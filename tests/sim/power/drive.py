"""A drive with a volatile write cache: what a power cut takes, and what a drive does wrong without one.

A cut leaves of what was not flushed any subset of the blocks, each block whole, and of a block written several times
any of its versions. A deallocation is a write of zeros, or does nothing on a drive that keeps what was there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from meshfusion.jbof.format import LBA_BYTES

ZEROS = bytes(LBA_BYTES)


@dataclass
class Faults:
    """Chances of a write: to be lost though it was confirmed, to land elsewhere; of a cut: to find a bit flipped."""

    lost: float = 0.0
    misdirected: float = 0.0
    rot: float = 0.0


@dataclass
class Drive:
    """A :class:`~meshfusion.dpu.pool_medium.BlockMedium`. ``on_write`` is called after each thing that is asked of it;
    ``frees``: does it do something about deallocated blocks? ``promises_zeros``: and say so?"""

    rng: random.Random
    lba_count: int
    frees: bool = True
    promises_zeros: bool = False
    faults: Faults = field(default_factory=Faults)
    durable: dict[int, bytes] = field(default_factory=dict)
    cached: dict[int, list[bytes]] = field(default_factory=dict)
    on_write: Callable[[], None] = lambda: None
    reads: int = 0
    blocks_read: int = 0
    flush_count: int = 0
    fault_count: int = 0

    def read(self, lba: int) -> bytes:
        versions = self.cached.get(lba)
        return versions[-1] if versions else self.durable.get(lba, ZEROS)

    def read_blocks(self, lba: int, lba_count: int) -> bytes:
        assert 0 <= lba < lba + lba_count <= self.lba_count
        self.reads += 1
        self.blocks_read += lba_count
        return b"".join(self.read(lba + i) for i in range(lba_count))

    def write_blocks(self, lba: int, data: bytes) -> None:
        self._write(lba, data)
        self.on_write()

    def write_through(self, lba: int, data: bytes) -> None:
        """With FUA: durable at once, of these blocks and no others."""
        for i in self._write(lba, data):
            self.durable[i] = self.cached.pop(i)[-1]
        self.on_write()

    def flush(self) -> None:
        self.on_write()
        self.durable.update((lba, versions[-1]) for lba, versions in self.cached.items())
        self.cached.clear()
        self.flush_count += 1

    def deallocate(self, lba: int, lba_count: int) -> bool:
        assert 0 <= lba < lba + lba_count <= self.lba_count
        if self.frees:
            for i in range(lba, lba + lba_count):
                if self.read(i) is not ZEROS:
                    self.cached.setdefault(i, []).append(ZEROS)
        self.on_write()
        return self.frees

    @property
    def deallocated_reads_zeros(self) -> bool:
        return self.promises_zeros and self.frees

    def after_cut(self, rng: random.Random) -> Drive:
        """What would be found if the power went now."""
        share = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        durable = dict(self.durable)
        for lba, versions in self.cached.items():
            if rng.random() < share:
                durable[lba] = rng.choice(versions)
        found = Drive(self.rng, self.lba_count, self.frees, self.promises_zeros, self.faults, durable)
        found.fault_count = self.fault_count
        if durable and rng.random() < self.faults.rot:
            lba = rng.choice(list(durable))
            block = bytearray(durable[lba])
            block[rng.randrange(LBA_BYTES)] ^= 1 << rng.randrange(8)
            durable[lba] = bytes(block)
            found.fault_count += 1
        return found

    def copy(self) -> Drive:
        """As it is; what is done to either does not concern the other."""
        cached = {lba: list(versions) for lba, versions in self.cached.items()}
        found = Drive(
            self.rng, self.lba_count, self.frees, self.promises_zeros, self.faults, dict(self.durable), cached
        )
        found.fault_count = self.fault_count
        return found

    def _write(self, lba: int, data: bytes) -> list[int]:
        """Returns the blocks that were really written."""
        assert data
        assert len(data) % LBA_BYTES == 0
        assert 0 <= lba < lba + len(data) // LBA_BYTES <= self.lba_count
        written = []
        for i in range(len(data) // LBA_BYTES):
            to = lba + i
            if self.faults.lost and self.rng.random() < self.faults.lost:
                self.fault_count += 1
                continue
            if self.faults.misdirected and self.rng.random() < self.faults.misdirected:
                self.fault_count += 1
                to = self.rng.randrange(self.lba_count)
            self.cached.setdefault(to, []).append(data[i * LBA_BYTES : (i + 1) * LBA_BYTES])
            written.append(to)
        return written
