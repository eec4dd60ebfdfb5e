"""The I/O queues of the simulated target: every command in stages, so that it may be cut off or come late anywhere."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tests.jbof.nvme.sim.memory import Action
from tests.jbof.nvme.sim.rules import must
from tests.jbof.nvme.sim.subsystem import LBA_BYTES, NON_OPTIMIZED, OPTIMIZED, SimNamespace
from tests.jbof.nvme.sim.target import INTERNAL_ERROR, INVALID_FIELD, NO_NAMESPACE, Capsule, SimController
from tests.jbof.nvme.sim.target_admin import SimAdminTarget

LBA_OUT_OF_RANGE = 0x4080
INACCESSIBLE = 0x302
FUA = 1 << 30


@dataclass(slots=True, eq=False)
class PendingWrite:
    """It may still change the medium."""

    nsid: int
    lba: int
    lba_count: int


class SimIoTarget(SimAdminTarget):
    pending: list[PendingWrite]

    def may_still_write(self, nsid: int, lba: int, lba_count: int) -> bool:
        return any(
            write.nsid == nsid and write.lba < lba + lba_count and lba < write.lba + write.lba_count
            for write in self.pending
        )

    def restart(self, away_s: float) -> None:
        super().restart(away_s)
        self.pending.clear()

    def later(self, action: Action) -> None:
        """The next stage of a command, unless the target restarts before."""
        delay_s = self.rng.uniform(0.0001, 0.003)
        if self.chance(0.004, "stages late"):
            delay_s = self.rng.uniform(0.1, 2.5)
        epoch = self.epoch

        def stage() -> None:
            if self.clock.now_s < self.silent_until_s:
                self.clock.after(self.silent_until_s - self.clock.now_s, stage)
            elif epoch == self.epoch:
                action()

        self.clock.after(delay_s, stage)

    def io(self, capsule: Capsule, controller: SimController) -> None:
        namespace = self.subsystem.namespaces.get(capsule.nsid)
        if namespace is None:
            self.respond(capsule, NO_NAMESPACE)
        elif namespace.ana_state not in (OPTIMIZED, NON_OPTIMIZED):
            self.seen["path errors"] += 1
            self.respond(capsule, INACCESSIBLE)
        elif self.chance(0.006, "commands failed"):
            self.respond(capsule, self.rng.choice((INTERNAL_ERROR, INVALID_FIELD)))
        elif capsule.opcode == 0x00:
            self.later(lambda: self._flush(capsule, namespace))
        elif capsule.opcode == 0x09:
            self._deallocate(capsule, namespace)
        elif capsule.opcode == 0x12:
            self._placement_handles(capsule)
        else:
            must(capsule.opcode in (0x01, 0x02), "unknown I/O opcode", hex(capsule.opcode))
            self._transfer(capsule, namespace)

    def _transfer(self, capsule: Capsule, namespace: SimNamespace) -> None:
        """NVM Figures 50 to 53 and 67 to 70."""
        lba, lba_count = capsule.number(40, 8), capsule.number(48, 2) + 1
        length = sum(descriptor[1] for descriptor in capsule.descriptors())
        must(length == lba_count * LBA_BYTES, "memory for", length, "bytes and", lba_count, "blocks")
        must(length <= (self.subsystem.max_transfer_bytes or length), "more than MDTS allows")
        must(len(capsule.descriptors()) <= self.subsystem.descriptors, "more descriptors than MSDBD allows")
        if lba + lba_count > namespace.lba_count:
            self.respond(capsule, LBA_OUT_OF_RANGE)
        elif capsule.opcode == 0x02:
            self.later(lambda: self._read(capsule, namespace, lba, lba_count))
        else:
            directive, specific = capsule.number(48, 4) >> 20 & 0xF, capsule.number(52, 4) >> 16
            must(directive in (0, 2), "a directive that was never enabled", directive)
            if directive:
                must(specific in self.subsystem.placement_ids, "a placement that the namespace does not have", specific)
            self.seen[f"writes to placement {specific if directive else None}"] += 1
            pending = PendingWrite(namespace.nsid, lba, lba_count)
            self.pending.append(pending)
            self.later(lambda: self._fetch(capsule, namespace, pending))

    def _placement_handles(self, capsule: Capsule) -> None:
        """I/O Management Receive (Base 7.3): MO 1, NUMD 0's based."""
        must(capsule.number(40, 4) == 1, "another management operation", capsule.number(40, 4))
        ids = self.subsystem.placement_ids
        data = struct.pack("<14xH", len(ids)) + b"".join(
            struct.pack("<HHIQ16x", pid, handle, 0, 0) for handle, pid in enumerate(ids)
        )
        length = 4 * (capsule.number(44, 4) + 1)

        def place() -> None:
            if self.copy_out(capsule, data[:length].ljust(length, b"\0")):
                self.respond(capsule)

        self.later(place)

    def _read(self, capsule: Capsule, namespace: SimNamespace, lba: int, lba_count: int) -> None:
        data = namespace.read(lba, lba_count)

        def place() -> None:
            if self.copy_out(capsule, data):
                self.respond(capsule)

        self.later(place)

    def _fetch(self, capsule: Capsule, namespace: SimNamespace, pending: PendingWrite) -> None:
        data = self.copy_in(capsule)
        if data is None:
            self.pending.remove(pending)
            return

        def land() -> None:
            durably = bool(capsule.number(48, 4) & FUA)
            namespace.write(pending.lba, data, durably=durably)
            self.pending.remove(pending)
            if capsule.link.is_dead:
                self.seen["writes landed after their queue's death"] += 1
            self.respond(capsule)

        self.later(land)

    def _flush(self, capsule: Capsule, namespace: SimNamespace) -> None:
        namespace.flush()
        self.respond(capsule)

    def _deallocate(self, capsule: Capsule, namespace: SimNamespace) -> None:
        """NVM Figures 44 to 46. Deallocated blocks read as zeros here."""
        range_count = capsule.data[40] + 1
        must(capsule.number(44, 4) == 1 << 2, "Dataset Management without Deallocate")
        if self.subsystem.has_limits:
            must(range_count <= 4, "more ranges than DMRL allows")
        writes: list[PendingWrite] = []

        def fetch() -> None:
            data = self.copy_in(capsule)
            if data is None:
                return
            must(len(data) == 16 * range_count, "a range list of another length")
            ranges = [(lba, count) for _, count, lba in struct.iter_unpack("<IIQ", data)]
            if self.subsystem.has_limits:
                must(max(count for _, count in ranges) <= 8, "a range longer than DMRSL allows")
                must(sum(count for _, count in ranges) <= 24, "more blocks than DMSL allows")
            writes.extend(PendingWrite(namespace.nsid, *item) for item in ranges)
            self.pending.extend(writes)
            self.later(land)

        def land() -> None:
            for write in writes:
                namespace.write(write.lba, bytes(write.lba_count * LBA_BYTES), durably=True)
                self.pending.remove(write)
            self.respond(capsule)

        self.later(fetch)
