"""Runs in the guest, as ``python guest_windows.py CASE``: keys that die with their command.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme import sgl
from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.controller_effects import ControllerState
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.jbof.nvme.io_commands import read
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.sgl import RemoteMemory, remote_data
from meshfusion.jbof.nvme.status import NvmeCommandError
from meshfusion.jbof.nvme.windows import KeyWindows
from tests.lab.guest_initiator import LBA_BYTES, MIB, RNG, exported, join, take_down, until

BEFORE, ON_MEDIUM = 5, 7
DEPTHS = (1, 2, 7, 32, 100)


class Seen:
    """What became of keys: ``binds`` as they were posted, and responses with and without an invalidation."""

    def __init__(self) -> None:
        self.binds: list[Any] = []
        self.counts: Counter[str] = Counter()
        bind, received = KeyWindows.bind, QueuePair._on_received

        def noting_bind(windows: KeyWindows, memory: RemoteMemory, *, is_written: bool) -> Any:
            self.binds.append(bind(windows, memory, is_written=is_written))
            return self.binds[-1]

        def noting_response(queue: QueuePair, event: Any) -> Any:
            if queue._window_count:
                self.counts["by the target" if event.invalidated_key is not None else "not by the target"] += 1
            return received(queue, event)

        patch.object(KeyWindows, "bind", noting_bind).start()
        patch.object(QueuePair, "_on_received", noting_response).start()


@dataclass(frozen=True, slots=True)
class UseKey:
    """A read whose data the target writes by ``remote``'s key, whatever that is."""

    nsid: int
    remote: RemoteMemory

    def commands(self, *_: object) -> Iterable[Command]:
        yield read(self.nsid, 0, self.remote.length_bytes // LBA_BYTES, remote_data(self.remote))


def let_target_write(initiator: Initiator, remote: RemoteMemory) -> bool:
    """Does it say that it did? Waits for the connection that this may have cost."""
    until(lambda: initiator.state is ControllerState.LIVE)
    pending = initiator.begin(UseKey(1, remote), (), 3.0)  # type: ignore[arg-type]
    try:
        pending.wait()
    except MeshFusionError:
        assert pending.wait_memory_free(10.0)
        return False
    return True


def transfers() -> dict[str, object]:
    """Linux' target invalidates every key that it may."""
    with exported() as address:
        report = transferred(address)
    return {**report, "left": take_down()}


def keys_left() -> dict[str, object]:
    """It is not asked to, so that every key is left to us; and a target that keeps one still finds nothing."""
    with patch.object(sgl, "_KEYED_INVALIDATE", sgl._KEYED_ADDRESS), exported() as address:
        report = transferred(address)
        late = late_use_of(address, KeyScope.COMMAND, Seen())
    return {**report, "late": late, "left": take_down()}


def transferred(address: str) -> dict[str, object]:
    """Reads and writes of one piece and of many commands, at many depths, each compared; and one that fails."""
    seen = Seen()
    wrong: list[object] = []
    initiator, _ = join(address, key_scope=KeyScope.COMMAND, io_queue_count=2, io_queue_depth=64)
    arena = np.zeros(32 * MIB, np.uint8)
    region = initiator.register(arena)
    for depth in DEPTHS:
        for size in (LBA_BYTES, 3 * LBA_BYTES, 128 << 10):
            total = depth * size
            source, sink = arena[:total], arena[16 * MIB + 12 : 16 * MIB + 12 + total]
            source[:] = RNG.integers(0, 256, total, dtype=np.uint8)
            sink[:] = 0
            for begin, at in ((initiator.begin_write, 0), (initiator.begin_read, 16 * MIB + 12)):
                under_way = deque(
                    begin(1, i * size // LBA_BYTES, [region.part(at + i * size, size)]) for i in range(depth)
                )
                while under_way:
                    under_way.popleft().wait()
            if not (source == sink).all():
                wrong.append((depth, size))
    arena[: 20 * LBA_BYTES] = 1
    initiator.write(1, 0, [region.part(i * 3 * LBA_BYTES, LBA_BYTES) for i in range(5)])
    initiator.read(1, 0, [region.part(MIB, 5 * LBA_BYTES)])
    with suppress(NvmeCommandError):
        initiator.read(1, 1 << 40, [region.part(0, LBA_BYTES)])
        wrong.append("read beyond the end")
    report: dict[str, object] = {
        "wrong": wrong,
        "pieces": int(arena[MIB : MIB + 5 * LBA_BYTES].sum()),
        "max_descriptors": initiator.max_descriptors,
        "state": initiator.state.value,
        "keys": dict(seen.counts),
        "binds": len(seen.binds),
    }
    region.close()
    initiator.close()
    return report


def late_use() -> dict[str, object]:
    """The target is made to write by a key that it was told before, when the command has ended."""
    seen = Seen()
    with exported() as address:
        report = {scope.value: late_use_of(address, scope, seen) for scope in KeyScope}
    return {**report, "left": take_down()}


def late_use_of(address: str, scope: KeyScope, seen: Seen) -> dict[str, bool]:
    initiator, _ = join(address, key_scope=scope, io_queue_count=1, backoff_first_s=0.1)
    memory = np.full(LBA_BYTES, ON_MEDIUM, np.uint8)
    region = initiator.register(memory)
    initiator.write(1, 0, [region.all()])
    memory[:] = BEFORE
    initiator.read(1, 0, [region.all()])
    by_right = bool((memory == ON_MEDIUM).all())
    told = region.remote if scope is KeyScope.REGION else region.remote._replace(rkey=seen.binds[-1].key)
    memory[:] = BEFORE
    said = let_target_write(initiator, told)
    is_written = bool((memory != BEFORE).any())
    until(lambda: initiator.state is ControllerState.LIVE)
    initiator.read(1, 0, [region.all()])  # on a new queue pair, with windows of its own, if the other was lost
    after = bool((memory == ON_MEDIUM).all())
    memory[:] = BEFORE
    region.close()
    let_target_write(initiator, told)
    is_written_when_closed = bool((memory != BEFORE).any())
    initiator.close()
    return {
        "by_right": by_right,
        "said": said,
        "is_written": is_written,
        "after": after,
        "is_written_when_closed": is_written_when_closed,
    }


CASES = (transfers, keys_left, late_use)

if __name__ == "__main__":
    np.seterr(all="raise")
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
