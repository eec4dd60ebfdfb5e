"""Runs in the guest, as ``python guest_reservations.py CASE``: NVMe reservations of SPDK's target, contended for by two
hosts. ``MESHFUSION_TEST_NVMF_TGT``: the target. Linux' own has reservations from 6.13 on only.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.export.spdk.client import SpdkClient
from meshfusion.jbof.drives.owner_record import BLOCK_BYTES, StoredRecord, encode_record, newest_record
from meshfusion.jbof.drives.ownership import OwnerRecord, Ownership, carry_out, close, is_held, take
from meshfusion.jbof.drives.reservation import Reservations
from meshfusion.jbof.drives.system.fabrics_reservations import FabricsReservations
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.initiator import Initiator, connect
from meshfusion.jbof.nvme.reservation_host import ReservationHost
from meshfusion.tools.lab.guest_setup import initiator as kernel_initiator
from meshfusion.tools.lab.guest_setup.links import soft_roce_on_dummy
from tests.lab.guest_drives import Host

NQN = "nqn.2026-11.io.meshfusion:shared"
SERVICE = 4421
START_S = 60.0
HOST_IDS = (uuid.UUID(int=0xA << 64 | 1), uuid.UUID(int=0xB << 64 | 1))


@contextlib.contextmanager
def spdk(address: str) -> Iterator[None]:
    socket, log = Path("/tmp/spdk.sock"), Path("/tmp/nvmf.log")
    command = [os.environ["MESHFUSION_TEST_NVMF_TGT"], "--no-huge", "-s", "512", "-m", "0x1", "--no-pci", "-r", socket]
    with log.open("wb") as output:
        target = subprocess.Popen([*map(str, command), "--iova-mode=va"], stdout=output, stderr=output)
    rpc = SpdkClient(socket)
    try:
        end_s = time.monotonic() + START_S
        while True:
            try:
                rpc.connect(5.0)
                break
            except MeshFusionError:
                assert target.poll() is None, log.read_text()
                assert time.monotonic() < end_s, log.read_text()
                time.sleep(0.1)
        for method, parameters in set_up_calls(address):
            rpc.call(method, START_S, **parameters)
        yield
    finally:
        rpc.close()
        target.kill()
        target.wait()


def set_up_calls(address: str) -> list[tuple[str, dict[str, Any]]]:
    listen = {"adrfam": "IPv4", "traddr": address, "trsvcid": str(SERVICE)}
    return [
        ("framework_wait_init", {}),
        ("nvmf_create_transport", {"trtype": "RDMA"}),
        ("nvmf_create_transport", {"trtype": "TCP"}),
        ("bdev_malloc_create", {"name": "m0", "num_blocks": 4096, "block_size": 4096}),
        ("nvmf_create_subsystem", {"nqn": NQN, "serial_number": "S1", "allow_any_host": True}),
        ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "m0", "ptpl_file": "/tmp/ptpl.json"}}),
        ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": {"trtype": "RDMA", **listen}}),
        ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": {"trtype": "TCP", **listen, "trsvcid": "4422"}}),
    ]


class FabricHost:
    """Our initiator as one host; its record lies in blocks 256 and 257."""

    def __init__(self, address: str, host_id: uuid.UUID) -> None:
        nqn = f"nqn.2014-08.org.nvmexpress:uuid:{host_id}"
        self.initiator: Initiator = connect(address, SERVICE, NQN, nqn, host_id, timeout_s=30.0)
        self.reservations: Reservations = FabricsReservations(ReservationHost(self.initiator, 1))
        self.memory = np.zeros(2 * BLOCK_BYTES, np.uint8)
        self.region = self.initiator.register(self.memory)
        self.name = host_id

    def read(self) -> OwnerRecord | None:
        stored = self._newest()
        return None if stored is None else stored.record

    def _newest(self) -> StoredRecord | None:
        self.initiator.read(1, 256, [self.region.all()])
        content = self.memory.tobytes()
        return newest_record([content[:BLOCK_BYTES], content[BLOCK_BYTES:]], where="the namespace")

    def write(self, record: OwnerRecord) -> None:
        newest = self._newest()
        sequence = 0 if newest is None else newest.sequence + 1
        self.memory[:BLOCK_BYTES] = np.frombuffer(encode_record(StoredRecord(sequence, record)), np.uint8)
        self.initiator.write(1, 256 + sequence % 2, [self.region.part(0, BLOCK_BYTES)], force_unit_access=True)

    def run(self, steps: Any) -> Any:
        return carry_out(steps, self.reservations, self)

    def take(self, *, may_take_over: bool = False) -> Ownership:
        key = int.from_bytes(os.urandom(8), "little") | 1
        ownership = self.run(take(self.name, key, may_take_over=may_take_over))
        assert isinstance(ownership, Ownership)
        return ownership

    def write_data(self) -> str:
        return outcome(lambda: self.initiator.write(1, 0, [self.region.part(0, BLOCK_BYTES)]))


def fabrics() -> dict[str, object]:
    """Over our initiator and soft-RoCE."""
    link = soft_roce_on_dummy()
    with spdk(link.address):
        first, second = (FabricHost(link.address, host_id) for host_id in HOST_IDS)
        one = first.take()
        seen = first.reservations.report()
        assert seen is not None
        refused = outcome(second.take)
        beside = second.write_data()
        pending = [first.initiator.begin_write(1, 512 + i, [first.region.part(0, BLOCK_BYTES)]) for i in range(16)]
        other = second.take(may_take_over=True)
        ends = {outcome(transfer.wait) for transfer in pending}
        result = {
            "report": [seen.persists, seen.kind and seen.kind.name, [r.host.hex() for r in seen.registrants]],
            "refused": refused,
            "beside": beside,
            "under_way": sorted(ends),
            "taken_over": [other.was_taken_over, other.needs_rebuild, other.record.epoch],
            "loser": first.write_data(),
            "loser_holds": first.run(is_held(one)),
            "winner": second.write_data(),
        }
        second.run(close(other))
        again = first.take()
        result["again"] = [again.was_taken_over, again.needs_rebuild, again.record.epoch, first.write_data()]
        for host in (first, second):
            host.initiator.close()
    return {**result, "left": []}


def kernel() -> dict[str, object]:
    """Linux' initiator and its calls for block devices (NVMe/TCP) against ours: one protocol, one owner's record."""
    link = soft_roce_on_dummy()
    with spdk(link.address):
        more = (f"--hostnqn=nqn.2014-08.org.nvmexpress:uuid:{HOST_IDS[0]}", f"--hostid={HOST_IDS[0]}")
        kernel_initiator.connect(NQN, link.address, transport="tcp", service=4422, more=more)
        (device,) = kernel_initiator.block_devices(NQN, 1)
        first, second = Host(device), FabricHost(link.address, HOST_IDS[1])
        one = first.take()
        reports = [host.reservations.report() for host in (first, second)]
        refused = outcome(second.take)
        beside = second.write_data()
        by_owner = first.write(3)
        other = second.take(may_take_over=True)
        result: dict[str, object] = {
            "reports_agree": reports[0] == reports[1] and reports[0] is not None,
            "refused": refused,
            "beside": beside,
            "by_owner": by_owner,
            "taken_over": [other.was_taken_over, other.needs_rebuild, other.record.epoch],
            "loser": first.write(4),
            "loser_record": outcome(lambda: first.close(one)),
            "winner": second.write_data(),
            "refused_back": outcome(first.take),
        }
        back = first.take(may_take_over=True)
        result["back"] = [back.was_taken_over, back.needs_rebuild, back.record.epoch, first.write(6)]
        result["loser_of_back"] = second.write_data()
        second.initiator.close()
        kernel_initiator.disconnect_all()
    return {**result, "left": []}


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except MeshFusionError as error:
        return f"{type(error).__name__}: {error.message}"
    return "done"


CASES = (fabrics, kernel)

if __name__ == "__main__":
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
