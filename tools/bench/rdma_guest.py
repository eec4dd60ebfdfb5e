"""The part of the ``rdma`` benchmark that runs in the guest: three initiators read from one target, in turns.

On a thread of its own, as an engine loads. Ours and ``nvmeof`` read into registered memory; the kernel's is read
through O_DIRECT, by as many threads as reads are under way. Processor time is that of the whole guest, its only
processor's: target, network and initiator, which lets the three be compared although the kernel's works in threads of
its own. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.nvme.initiator import connect
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.tools.lab.guest_setup import initiator as kernel
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device
from meshfusion.tools.lab.guest_setup.links import soft_roce_on_dummy
from meshfusion.tools.lab.guest_setup.nvmet import SERVICE, Port, Subsystem, export

NQN = "nqn.2026-01.io.meshfusion:bench"
HOST = uuid.UUID("22222222-2222-3333-4444-555555555555")
NSID = 1
LBA_BYTES = 4096
SPACE_BYTES = 64 << 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

ReadFor = Callable[[int, int, float], int]
"""(size in bytes, reads under way, seconds) -> reads done."""


def busy_s() -> float:
    """Of the guest's processors, since it booted: all but idle time."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / TICKS_PER_S


@contextlib.contextmanager
def ours(address: str, key_scope: KeyScope = KeyScope.REGION) -> Iterator[ReadFor]:
    host_nqn = f"nqn.2014-08.org.nvmexpress:uuid:{HOST}"
    initiator = connect(address, SERVICE, NQN, host_nqn, HOST, io_queue_count=1, io_queue_depth=64, key_scope=key_scope)
    memory = initiator.register(np.zeros(SPACE_BYTES, np.uint8))

    def read_for(size_bytes: int, depth: int, seconds: float) -> int:
        done, at, end_s = 0, 0, time.monotonic() + seconds
        window: deque[Any] = deque()
        while (more := time.monotonic() < end_s) or window:
            while more and len(window) < depth:
                window.append(initiator.begin_read(NSID, at // LBA_BYTES, [memory.part(at, size_bytes)]))
                at = (at + size_bytes) % SPACE_BYTES
            if window:
                window.popleft().wait()
                done += 1
        return done

    yield read_for
    initiator.close()


@contextlib.contextmanager
def nvmeof(address: str) -> Iterator[ReadFor]:
    import nvmeof as package
    from nvmeof import protocol

    controller = package.Controller.connect(address, NQN, port=SERVICE, queue_depth=64)
    memory = controller.allocate(SPACE_BYTES)
    queue = controller.io

    def read_for(size_bytes: int, depth: int, seconds: float) -> int:
        done = under_way = at = 0
        end_s = time.monotonic() + seconds
        while (more := time.monotonic() < end_s) or under_way:
            while more and under_way < depth:
                lbas = size_bytes // LBA_BYTES
                queue.submit(
                    protocol.rw_command(2, NSID, at // LBA_BYTES, lbas, memory, lba_size=LBA_BYTES, buffer_offset=at)
                )
                at = (at + size_bytes) % SPACE_BYTES
                under_way += 1
            for result in queue.poll():
                result.response.raise_for_status()
                under_way -= 1
                done += 1
        return done

    yield read_for
    memory.close()
    controller.close()


@contextlib.contextmanager
def through_the_kernel(address: str) -> Iterator[ReadFor]:
    kernel.connect(NQN, address)
    (device,) = kernel.block_devices(NQN, 1)
    fd = os.open(device, os.O_RDONLY | os.O_DIRECT)

    def read_for(size_bytes: int, depth: int, seconds: float) -> int:
        counts = [0] * depth
        end_s = time.monotonic() + seconds

        def read(worker: int) -> None:
            buffer = AlignedBuffer(size_bytes)
            at = worker * size_bytes % SPACE_BYTES
            while time.monotonic() < end_s:
                assert os.preadv(fd, [buffer.view], at) == size_bytes
                at = (at + depth * size_bytes) % SPACE_BYTES
                counts[worker] += 1

        threads = [threading.Thread(target=read, args=(worker,)) for worker in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    yield read_for
    os.close(fd)
    kernel.disconnect(NQN)


def exported_target() -> str:
    """Its address."""
    link = soft_roce_on_dummy()
    device = make_memory_device(MemoryDevice("bench", SPACE_BYTES >> 20))
    export([Subsystem(NQN, (device,))], [Port(1, link.address, (NQN,))])
    return link.address


INITIATORS: dict[str, Callable[[str], contextlib.AbstractContextManager[ReadFor]]] = {
    "ours": ours,
    "kernel": through_the_kernel,
    "nvmeof": nvmeof,
    "ours, a key for each command": partial(ours, key_scope=KeyScope.COMMAND),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cases", required=True, help="SIZE:DEPTH,...")
    parser.add_argument("--initiators", required=True, help="NAME;...")
    arguments = parser.parse_args()
    names = arguments.initiators.split(";")
    address = exported_target()
    rows = []
    for index in range(arguments.rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            with INITIATORS[name](address) as read_for, ThreadPoolExecutor(1) as loader:
                for case in arguments.cases.split(","):
                    size_bytes, depth = map(int, case.split(":"))
                    loader.submit(read_for, size_bytes, depth, 0.1).result()
                    began_s, began_busy_s = time.monotonic(), busy_s()
                    done = loader.submit(read_for, size_bytes, depth, arguments.seconds).result()
                    took_s, took_busy_s = time.monotonic() - began_s, busy_s() - began_busy_s
                    rows.append(
                        {
                            "initiator": name,
                            "size_bytes": size_bytes,
                            "depth": depth,
                            "mb_per_s": done * size_bytes / took_s / 1e6,
                            "cpu_s_per_gib": took_busy_s / (done * size_bytes / (1 << 30)),
                        }
                    )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
