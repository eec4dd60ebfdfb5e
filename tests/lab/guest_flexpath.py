"""Runs in the guest, as ``python guest_flexpath.py CASE``: FlexPath over two soft-RoCE paths of different speed.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.host.path.flexpath.addresses import PathAddress, path_specs
from meshfusion.host.path.flexpath.multipath import Multipath
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingTransfer
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device
from meshfusion.tools.lab.guest_setup.links import RdmaPath, cut_path, shape_path, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import SERVICE, Port, Subsystem, export
from meshfusion.tools.lab.guest_setup.shaping import Shaping
from tests.lab.guest_initiator import HOST, HOST_NQN, LBA_BYTES, MIB, NQN, SIZE_MIB, take_down

NSID = 1
RATES_MBIT = (40.0, 80.0)  # far below what the guest's one processor moves
READ_BYTES = 128 << 10
UNDER_WAY = 24
TIMEOUT_S = 5.0
ALONE_S, TOGETHER_S, AFTER_CUT_S = 3.0, 5.0, 5.0
DATA = np.random.default_rng(7).integers(0, 256, SIZE_MIB * MIB, dtype=np.uint8)


def address_of(path: RdmaPath) -> PathAddress:
    return PathAddress(path.target.address, SERVICE, path.host.interface, path.host.address)


def opened(*paths: RdmaPath) -> Multipath:
    return Multipath(path_specs([address_of(path) for path in paths], NQN, HOST_NQN, HOST, io_queue_count=1))


def registered(initiator: Multipath, array: np.ndarray) -> RegisteredRegion:
    return initiator.register_address(array.ctypes.data, array.nbytes, writable=True, owner=array)


class Reader:
    """Reads all over the device, always ``UNDER_WAY`` at a time, and compares every byte."""

    def __init__(self, initiator: Multipath) -> None:
        self._initiator = initiator
        self._memory = np.zeros(UNDER_WAY * READ_BYTES, np.uint8)
        self._region = registered(initiator, self._memory)
        self._rng = np.random.default_rng(9)
        self.ended: list[float] = []  # when, of each read that brought its bytes
        self.wrong = 0
        self.failed: list[str] = []
        self.oldest_s = 0.0

    def run(self, seconds: float, at_start: Callable[[], None] = lambda: None) -> None:
        ended: queue.SimpleQueue[tuple[PendingTransfer, int, int, float]] = queue.SimpleQueue()
        free = deque(range(UNDER_WAY))
        at_start()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or len(free) < UNDER_WAY:
            while free and time.monotonic() < end_s:
                slot = free.popleft()
                lba = int(self._rng.integers(0, (len(DATA) - READ_BYTES) // LBA_BYTES))
                part = self._region.part(slot * READ_BYTES, READ_BYTES)
                pending = self._initiator.begin_read(NSID, lba, [part], timeout_s=TIMEOUT_S)
                read = (pending, slot, lba, time.monotonic())
                pending.when_ended(partial(ended.put, read))
            if len(free) == UNDER_WAY:
                break
            self._finish(*ended.get(), free)  # in the order in which they end: a slow path holds up none of another

    def _finish(self, pending: PendingTransfer, slot: int, lba: int, began_s: float, free: deque[int]) -> None:
        try:
            pending.wait()
        except MeshFusionError as error:
            self.failed.append(f"{type(error).__name__}: {error.message}")
            assert pending.wait_memory_free(30.0)
        else:
            now_s = time.monotonic()
            got = self._memory[slot * READ_BYTES : (slot + 1) * READ_BYTES]
            self.wrong += not np.array_equal(got, DATA[lba * LBA_BYTES : lba * LBA_BYTES + READ_BYTES])
            self.ended.append(now_s)
        self.oldest_s = max(self.oldest_s, time.monotonic() - began_s)
        free.append(slot)

    def mbit_per_s(self, from_s: float, to_s: float) -> float:
        count = sum(from_s <= at_s < to_s for at_s in self.ended)
        return count * READ_BYTES * 8 / (to_s - from_s) / 1e6


def exported() -> tuple[RdmaPath, ...]:
    paths = soft_roce_paths(2)
    device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
    device.write_bytes(DATA.tobytes())
    ports = [Port(number, path.target.address, (NQN,)) for number, path in enumerate(paths, start=1)]
    export([Subsystem(NQN, (device,))], ports)
    return paths


def measured(initiator: Multipath, seconds: float) -> tuple[Reader, float]:
    reader = Reader(initiator)
    reader.run(0.5)
    began_s = time.monotonic()
    reader.run(seconds)
    return reader, reader.mbit_per_s(began_s, began_s + seconds)


def spread() -> dict[str, object]:
    """Each path alone, both together, then one is lost under load."""
    paths = exported()
    for path, rate in zip(paths, RATES_MBIT, strict=True):
        shape_path(path, Shaping(rate_mbit=rate))
    alone = []
    wrong = 0
    for path in paths:
        initiator = opened(path)
        reader, rate = measured(initiator, ALONE_S)
        alone.append(rate)
        wrong += reader.wrong
        initiator.close(timeout_s=5.0)
    initiator = opened(*paths)
    reader, together = measured(initiator, TOGETHER_S)
    states = [str(report) for report in initiator.reports()]
    cut_s = time.monotonic()
    reader.oldest_s = 0.0
    reader.run(AFTER_CUT_S, lambda: cut_path(paths[0]))
    after = reader.mbit_per_s(cut_s + 1.0, cut_s + AFTER_CUT_S)
    reports = [str(report) for report in initiator.reports()]
    initiator.close(timeout_s=5.0)
    return {
        "alone_mbit_per_s": [round(rate, 1) for rate in alone],
        "together_mbit_per_s": round(together, 1),
        "of_the_sum": round(together / sum(alone), 3),
        "after_cut_mbit_per_s": round(after, 1),
        "after_cut_of_survivor": round(after / alone[1], 3),
        "oldest_read_s": round(reader.oldest_s, 2),
        "wrong": wrong + reader.wrong,
        "failed": reader.failed,
        "before_cut": states,
        "after_cut": reports,
        "left": take_down(),
    }


CASES = (spread,)

if __name__ == "__main__":
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
