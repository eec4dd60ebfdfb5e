"""What a simulated target holds: namespaces with a volatile cache, their access states, and the data that tell of it.

Structures are laid out by hand, by the figures of the Base and NVM Command Set specifications.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

LBA_BYTES = 512
OPTIMIZED, NON_OPTIMIZED, INACCESSIBLE, CHANGE = 0x1, 0x2, 0x3, 0xF
KEEP_ALIVE_UNIT = 1  # of 100 ms
SUBSYSTEM_NQN = "nqn.2026-01.com.example:sim"


@dataclass
class SimNamespace:
    """``durable`` survives a restart of the target; ``cache`` lies over it and does not."""

    nsid: int
    lba_count: int
    ana_state: int = OPTIMIZED
    durable: dict[int, bytes] = field(default_factory=dict)
    cache: dict[int, bytes] = field(default_factory=dict)

    def read(self, lba: int, count: int) -> bytes:
        zero = bytes(LBA_BYTES)
        return b"".join(self.cache.get(i, self.durable.get(i, zero)) for i in range(lba, lba + count))

    def write(self, lba: int, data: bytes, *, durably: bool) -> None:
        for i in range(len(data) // LBA_BYTES):
            block = data[i * LBA_BYTES : (i + 1) * LBA_BYTES]
            if durably:
                self.cache.pop(lba + i, None)
                self.durable[lba + i] = block
            else:
                self.cache[lba + i] = block

    def flush(self) -> None:
        self.durable |= self.cache
        self.cache.clear()


@dataclass
class Subsystem:
    """``mdts``: 2^n pages of 4096 bytes. ``descriptors``: keyed ones that a command may have. ``placement_ids``: of
    each namespace; empty without Flexible Data Placement."""

    namespaces: dict[int, SimNamespace]
    mdts: int
    descriptors: int
    max_commands: int
    has_limits: bool
    ready_timeout: int = 4  # of 500 ms
    event_requests: int = 4
    placement_ids: tuple[int, ...] = ()

    @classmethod
    def random(cls, rng: random.Random) -> Subsystem:
        return cls(
            namespaces={nsid: SimNamespace(nsid, 4096) for nsid in sorted(rng.sample(range(1, 9), 2))},
            mdts=rng.choice((0, 1, 2)),
            descriptors=rng.choice((1, 1, 2, 16)),
            max_commands=rng.choice((0, 4, 64)),
            has_limits=rng.random() < 0.5,
            event_requests=rng.choice((1, 2, 4)),
        )

    @property
    def max_transfer_bytes(self) -> int | None:
        return 4096 << self.mdts if self.mdts else None

    def lose_power(self) -> None:
        for namespace in self.namespaces.values():
            namespace.cache.clear()

    def cap(self) -> int:
        """Base Figure 36: MQES 127, TO, NVM command set."""
        return 127 | 1 << 16 | self.ready_timeout << 24 | 1 << 37

    def identify_controller(self, controller_id: int) -> bytes:
        """Base Figure 313."""
        data = bytearray(4096)
        data[4:24] = b"SIM".ljust(20)
        data[24:64] = b"simulated".ljust(40)
        data[64:72] = b"1".ljust(8)
        data[76] = 1 << 1 | 1 << 3  # CMIC: several controllers, ANA
        data[77] = self.mdts
        struct.pack_into("<HI", data, 78, controller_id, 0x20000)
        struct.pack_into("<I", data, 92, 1 << 8 | 1 << 11)  # OAES: namespaces, ANA
        struct.pack_into("<I", data, 96, bool(self.placement_ids) << 19)  # CTRATT: FDPS
        data[111] = 1  # CNTRLTYPE: I/O
        data[259] = self.event_requests - 1
        struct.pack_into("<H", data, 320, KEEP_ALIVE_UNIT)
        struct.pack_into("<BBII", data, 342, 10, 1, 8, 8)  # ANATT, ANACAP, ANAGRPMAX, NANAGRPID
        data[512], data[513] = 0x66, 0x44
        struct.pack_into("<H", data, 514, self.max_commands)
        struct.pack_into("<IH", data, 516, 8, 1 << 2)  # NN; ONCS: Dataset Management
        data[525] = 1  # VWC: there is a volatile write cache
        struct.pack_into("<II", data, 536, 1 | 1 << 2, 8)  # SGLS: keyed; MNAN
        nqn = SUBSYSTEM_NQN.encode()
        data[768 : 768 + len(nqn)] = nqn
        capsule_bytes = 64 + (16 * self.descriptors if self.descriptors > 1 else 0)
        struct.pack_into("<II", data, 1792, capsule_bytes // 16, 1)
        data[1803] = self.descriptors
        return bytes(data)

    def identify_namespace(self, nsid: int) -> bytes:
        """NVM Figure 114."""
        data = bytearray(4096)
        if namespace := self.namespaces.get(nsid):
            struct.pack_into("<QQQ", data, 0, *[namespace.lba_count] * 3)
            struct.pack_into("<I", data, 92, nsid)  # ANAGRPID: a group each
            data[128:132] = bytes((0, 0, 9, 0))
        return bytes(data)

    def namespace_list(self, after: int) -> bytes:
        nsids = [nsid for nsid in sorted(self.namespaces) if nsid > after]
        return struct.pack(f"<{len(nsids)}I", *nsids).ljust(4096, b"\0")

    def namespace_descriptors(self, nsid: int) -> bytes:
        """Base Figure 316: a UUID and the command set."""
        return (bytes((3, 16, 0, 0)) + bytes(15) + bytes((nsid, 4, 1, 0, 0, 0))).ljust(4096, b"\0")

    def limits(self) -> bytes:
        """NVM Figure 120: 4 ranges of at most 8 blocks, 24 blocks in all."""
        return struct.pack("<BBBBIQ", 0, 0, 0, 4, 8, 24).ljust(4096, b"\0")

    def ana_log(self) -> bytes:
        """Base Figures 224 and 225."""
        log = struct.pack("<QH6x", 0, len(self.namespaces))
        for namespace in self.namespaces.values():
            log += struct.pack("<IIQB15xI", namespace.nsid, 1, 0, namespace.ana_state, namespace.nsid)
        return log
