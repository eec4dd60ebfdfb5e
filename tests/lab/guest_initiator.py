"""Runs in the guest, as ``python guest_initiator.py CASE``: our initiator against the kernel's target.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.controller_effects import (
    ConnectionLost,
    ControllerEvent,
    ControllerState,
    InventoryChanged,
    RetryScheduled,
)
from meshfusion.jbof.nvme.initiator import Initiator, connect
from meshfusion.jbof.nvme.io_commands import LbaRange
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_file_device, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import (
    cut_path,
    restore_path,
    soft_roce_on_dummy,
    soft_roce_paths,
)
from meshfusion.tools.lab.guest_setup.nvmet import NVMET, Port, Subsystem, export, remove_exports

NQN = "nqn.2026-01.io.meshfusion:test"
HOST = uuid.UUID("11111111-2222-3333-4444-555555555555")
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST}"
SERVICE = 4420
LBA_BYTES = 4096
MIB = 1 << 20
SIZE_MIB = 64
RNG = np.random.default_rng(11)


def join(address: str, nqn: str = NQN, **settings: Any) -> tuple[Initiator, list[ControllerEvent]]:
    events: list[ControllerEvent] = []
    return connect(address, SERVICE, nqn, HOST_NQN, HOST, on_event=events.append, **settings), events


@contextmanager
def exported(*devices: Path, hosts: tuple[str, ...] | None = None) -> Iterator[str]:
    """On one soft-RoCE device; its address."""
    link = soft_roce_on_dummy()
    made = devices or (make_memory_device(MemoryDevice("mf0", SIZE_MIB)),)
    export([Subsystem(NQN, made, hosts)], [Port(1, link.address, (NQN,))])
    yield link.address


def take_down() -> list[str]:
    """Not the links: librdmacm keeps their devices open for as long as this process lives."""
    return [*remove_exports(), *remove_devices()]


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + timeout_s, "it does not happen"
        time.sleep(0.005)
    return time.monotonic() - began


def transfers() -> dict[str, object]:
    """Every size and alignment of memory, on a device in memory; deallocation, on one over a file."""
    devices = make_memory_device(MemoryDevice("mf0", SIZE_MIB)), make_file_device(Path("/tmp/n.img"), SIZE_MIB)
    with exported(*devices) as address:
        began = time.monotonic()
        initiator, _ = join(address)
        connect_s = time.monotonic() - began
        info, inventory = initiator.info, initiator.identify()
        assert info is not None
        arena = np.zeros(20 * MIB, np.uint8)
        region = initiator.register(arena)
        wrong = []
        for blocks in (1, 2, 3, 31, 256, 257, 1024):
            for offset in (0, 1, 12, 4095):
                size = blocks * LBA_BYTES
                source, sink = arena[offset : offset + size], arena[10 * MIB + offset : 10 * MIB + offset + size]
                source[:] = RNG.integers(0, 256, size, dtype=np.uint8)
                sink[:] = 0
                initiator.write(1, blocks, [region.part(offset, size)], force_unit_access=bool(offset))
                initiator.read(1, blocks, [region.part(10 * MIB + offset, size)])
                if not (source == sink).all():
                    wrong.append((blocks, offset))
        arena[: 4 * LBA_BYTES] = 7
        pieces = [region.part(3 * LBA_BYTES, LBA_BYTES), region.part(0, 2 * LBA_BYTES), region.part(2 * MIB, LBA_BYTES)]
        arena[2 * MIB : 2 * MIB + LBA_BYTES] = 9
        initiator.write(2, 0, pieces)
        initiator.flush(2)
        on_medium = np.fromfile(devices[1], np.uint8, 4 * LBA_BYTES)
        initiator.deallocate(2, [LbaRange(0, 1), LbaRange(2, 1)])
        initiator.read(2, 0, [region.part(0, 4 * LBA_BYTES)])
        after = [int(arena[i * LBA_BYTES]) for i in range(4)]
        namespace = inventory.namespaces[1]
        region.close()
        initiator.close()
    return {
        "connect_s": round(connect_s, 3),
        "model": info.controller.mn,
        "queues": [info.io_queue_count, info.io_queue_depth],
        "max_transfer_bytes": info.max_transfer_bytes,
        "max_descriptors": info.controller.max_sgl_descriptors,
        "namespaces": sorted(inventory.namespaces),
        "capacity_mib": namespace.info.capacity_bytes >> 20,
        "uuid": str(namespace.ids.uuid),
        "ana": str(inventory.ana_state(1)),
        "wrong": wrong,
        "on_medium": [int(on_medium[i * LBA_BYTES]) for i in range(4)],
        "after_deallocation": after,
        "left": take_down(),
    }


def idle() -> dict[str, object]:
    """Four keep-alive timeouts without a command of ours; the target would end the controller after one."""
    with exported() as address:
        initiator, events = join(address, keep_alive_timeout_s=5.0)
        time.sleep(20.0)
        state = initiator.state.value
        initiator.flush(1)
        initiator.close()
    return {"state": state, "events": [type(event).__name__ for event in events], "left": take_down()}


def target_removed() -> dict[str, object]:
    """In the middle of writes; then it comes back."""
    with exported() as address:
        initiator, events = join(address, backoff_first_s=0.1)
        region = initiator.register(np.ones(4 * MIB, np.uint8))
        pending = [initiator.begin_write(1, 256 * i, [region.part(0, MIB)], timeout_s=5.0) for i in range(32)]
        failures = remove_exports()
        ends = [outcome(transfer.wait) for transfer in pending]
        began = time.monotonic()
        assert all(transfer.wait_memory_free(10.0) for transfer in pending)
        memory_free_s = time.monotonic() - began
        uses = region.use_count
        until(lambda: any(isinstance(event, ConnectionLost) for event in events))
        refused = outcome(lambda: initiator.flush(1))
        export([Subsystem(NQN, (Path("/dev/mf0"),))], [Port(1, address, (NQN,))])
        back_s = until(lambda: initiator.state is ControllerState.LIVE)
        initiator.write(1, 0, [region.all()])
        initiator.close()
    return {
        "removal_failures": failures,
        "ends": {end: ends.count(end) for end in sorted(set(ends))},
        "memory_free_s": round(memory_free_s, 3),
        "uses": uses,
        "refused": refused,
        "retries": sum(isinstance(event, RetryScheduled) for event in events),
        "back_s": round(back_s, 2),
        "left": take_down(),
    }


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except MeshFusionError as error:
        return type(error).__name__
    return "done"


def hard_kill() -> dict[str, object]:
    """With reads and writes outstanding. Memory that is said to be free stays as it is left then."""
    with exported() as address:
        rounds: list[dict[str, Any]] = []
        # How much is still under way is chance, since the wire is as fast as the guest.
        while len(rounds) < 3 or (len(rounds) < 8 and not any("FateUnknownError" in r["ends"] for r in rounds)):
            initiator, _ = join(address)
            arena = np.zeros(32 * MIB, np.uint8)
            region = initiator.register(arena)
            arena[:] = 1
            initiator.write(1, 0, [region.part(0, 16 * MIB)])
            parts = [region.part(i * MIB, MIB) for i in range(32)]
            pending = [initiator.begin_read(1, 256 * i, [parts[i]]) for i in range(16)]
            pending += [initiator.begin_write(1, 256 * i, [parts[i]]) for i in range(16, 32)]
            time.sleep(0.01)
            began = time.monotonic()
            initiator._poller.call(lambda now_s, i=initiator: i._session.disconnect(now_s, orderly=False))  # type: ignore[misc]
            ends = [outcome(transfer.wait) for transfer in pending]
            assert all(transfer.wait_memory_free(10.0) for transfer in pending)
            free_s = time.monotonic() - began
            arena[:] = 0xA5
            time.sleep(0.3)
            untouched = bool((arena == 0xA5).all())
            region.close()
            initiator.close()
            rounds.append(
                {
                    "ends": {end: ends.count(end) for end in sorted(set(ends))},
                    "free_s": round(free_s, 4),
                    "untouched": untouched,
                }
            )
        # Writes in doubt may have landed or not, each block as a whole.
        initiator, _ = join(address)
        check = np.zeros(16 * MIB, np.uint8)
        region = initiator.register(check)
        initiator.read(1, 256 * 16, [region.all()])
        values = sorted({int(value) for value in np.unique(check)})
        initiator.close()
    return {"rounds": rounds, "values": values, "left": take_down()}


def path_cut() -> dict[str, object]:
    """Nothing answers any more: a deadline passes, the queue pair dies here, its memory is free, and it comes back."""
    (path,) = soft_roce_paths(1)
    device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
    export([Subsystem(NQN, (device,))], [Port(1, path.target.address, (NQN,))])
    initiator, events = join(path.target.address, source_address=path.host.address, backoff_first_s=0.2)
    region = initiator.register(np.ones(MIB, np.uint8))
    initiator.write(1, 0, [region.all()])
    cut_path(path)
    began = time.monotonic()
    pending = initiator.begin_write(1, 0, [region.all()], timeout_s=1.0)
    end = outcome(pending.wait)
    told_s = time.monotonic() - began
    in_use = region.use_count
    free = pending.wait_memory_free(5.0)
    free_s = time.monotonic() - began
    restore_path(path)
    back_s = until(lambda: initiator.state is ControllerState.LIVE)
    initiator.write(1, 0, [region.all()])
    initiator.close()
    return {
        "end": end,
        "told_s": round(told_s, 3),
        "in_use": in_use,
        "free": free,
        "free_s": round(free_s, 3),
        "back_s": round(back_s, 2),
        "events": sorted({type(event).__name__ for event in events}),
        "left": take_down(),
    }


def changes() -> dict[str, object]:
    """A namespace that comes, one that is reached no more, and one that is reached again."""
    with exported() as address:
        initiator, events = join(address)
        second = make_memory_device(MemoryDevice("mf1", 32))
        folder = NVMET / "subsystems" / NQN / "namespaces" / "2"
        folder.mkdir()
        (folder / "device_path").write_text(str(second))
        (folder / "enable").write_text("1")
        appeared_s = until(lambda: 2 in initiator.inventory.namespaces)
        state = NVMET / "ports" / "1" / "ana_groups" / "1" / "ana_state"
        state.write_text("inaccessible")
        closed_s = until(lambda: str(initiator.inventory.ana_state(1)) != "1")
        refused = outcome(lambda: initiator.flush(1))
        state.write_text("optimized")
        opened_s = until(lambda: str(initiator.inventory.ana_state(1)) == "1")
        initiator.flush(1)
        initiator.flush(2)
        (folder / "enable").write_text("0")
        gone_s = until(lambda: 2 not in initiator.inventory.namespaces)
        folder.rmdir()
        initiator.close()
    return {
        "seconds": [round(s, 3) for s in (appeared_s, closed_s, opened_s, gone_s)],
        "refused": refused,
        "changes": sum(isinstance(event, InventoryChanged) for event in events),
        "left": take_down(),
    }


def refusals() -> dict[str, object]:
    """What a user may get wrong."""
    with exported(hosts=("nqn.2026-01.com.example:somebody-else",)) as address:
        said = {
            "host": told(lambda: join(address)),
            "subsystem": told(lambda: join(address, "nqn.2026-01.com.example:none")),
            "service": told(lambda: connect(address, 9999, NQN, HOST_NQN, HOST)),
            "address": told(lambda: connect("10.99.0.77", SERVICE, NQN, HOST_NQN, HOST, timeout_s=3.0)),
            "network": told(lambda: connect("127.0.0.1", SERVICE, NQN, HOST_NQN, HOST, timeout_s=3.0)),
        }
    return {"said": said, "left": take_down()}


def told(action: Callable[[], object]) -> list[str]:
    try:
        action()
    except MeshFusionError as error:
        return [type(error).__name__, error.message]
    return ["none", ""]


def peer() -> dict[str, object]:
    """Another initiator, the package nvmeof, reads what ours wrote, and ours what it wrote."""
    import nvmeof

    data = RNG.integers(0, 256, 2 * MIB, dtype=np.uint8)
    with exported() as address:
        initiator, _ = join(address)
        memory = data.copy()
        region = initiator.register(memory)
        theirs = nvmeof.Controller.connect(address, NQN, port=SERVICE, queue_depth=16)
        namespace = theirs.namespace(1)
        buffer = theirs.allocate(data.nbytes)
        initiator.write(1, 8, [region.all()])
        namespace.read(buffer, 8)
        read_by_peer = buffer.read() == data.tobytes()
        reversed_data = data[::-1].tobytes()
        buffer.write(reversed_data)
        namespace.write(buffer, 4096)
        initiator.read(1, 4096, [region.all()])
        read_by_us = memory.tobytes() == reversed_data
        buffer.close()
        theirs.close()
        initiator.close()
    return {"read_by_peer": read_by_peer, "read_by_us": read_by_us, "left": take_down()}


def cost() -> dict[str, object]:
    """How fast, and how much processor time of this process, a command is."""
    with exported() as address:
        initiator, _ = join(address)
        region = initiator.register(np.ones(32 * MIB, np.uint8))
        rows = []
        for size, depth, write in (
            (4096, 1, False),
            (4096, 16, False),
            (4096, 64, False),
            (131072, 8, False),
            (MIB, 4, False),
            (MIB, 4, True),
        ):
            begin = initiator.begin_write if write else initiator.begin_read
            count = max(40, min(3000, 200 * MIB // size))
            used = resource.getrusage(resource.RUSAGE_SELF)
            began = time.monotonic()
            window = []
            for i in range(count):
                at = (i * size) % (32 * MIB)
                window.append(begin(1, at // LBA_BYTES, [region.part(at, size)]))
                if len(window) == depth:
                    window.pop(0).wait()
            for transfer in window:
                transfer.wait()
            took_s = time.monotonic() - began
            after = resource.getrusage(resource.RUSAGE_SELF)
            rows.append(
                {
                    "what": f"{'write' if write else 'read'} {size >> 10} KiB, {depth} at a time",
                    "per_s": round(count / took_s),
                    "mb_per_s": round(count * size / took_s / 1e6),
                    "user_us": round((after.ru_utime - used.ru_utime) / count * 1e6),
                    "system_us": round((after.ru_stime - used.ru_stime) / count * 1e6),
                }
            )
        initiator.close()
    return {"rows": rows, "left": take_down()}


CASES = (transfers, idle, target_removed, hard_kill, path_cut, changes, refusals, peer, cost)

if __name__ == "__main__":
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
