"""Runs in the guest, as ``python guest_engine.py CASE``: vLLM engines over RDMA, a service, and the kernel's target.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import RdmaPath, cut_path, restore_path, shape_path, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import NVMET, remove_exports
from meshfusion.tools.lab.guest_setup.shaping import Shaping
from meshfusion.tools.lab.guest_setup.steps import load_modules
from tests.e2e.daemon import Daemon
from tests.e2e.harness import LOGPROB_TOLERANCE, Answer, EngineProcess, make_prompt, whole_chunks
from tests.e2e.models import make_models

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache"
CHILD = "tests.lab.guest_engine_child"
KV_BYTES = 64 << 20
SIZE_MIB = 128
PROMPT = make_prompt(1, 600)
OTHER = make_prompt(2, 600)
UNSAVED = make_prompt(3, 1100)
SLOW_MBIT = 4
SILENCE_S = 6.0  # such a guest may be slow


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + timeout_s, "it does not happen"
        time.sleep(0.05)
    return time.monotonic() - began


class Rig:
    """A pool on a device in memory, exported over two paths, and engines that reach it through them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.paths = soft_roce_paths(2)
        load_modules("nvmet", "nvmet-rdma")
        device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
        portals = ", ".join(f"'rdma://{path.target.address}:4420'" for path in self.paths)
        exports = f"exports: {{target: nvmet, portals: [{portals}]}}\n"
        self.daemon = Daemon(folder, data_path=device, silence_s=SILENCE_S, more=exports)
        self.daemon.start()
        self.model = make_models(MODEL)["llama"]
        self._engines = 0

    def engine(self) -> EngineProcess:
        self._engines += 1
        engine = EngineProcess(self.folder / f"engine{self._engines}.log", module=CHILD)
        connector = {**self.daemon.connector, "path": "rdma"}
        engine.start(self.model, connector, kv_cache_memory_bytes=KV_BYTES)
        return engine

    def settle(self, engine: EngineProcess) -> None:
        engine.call("settle")

    def end(self) -> list[str]:
        self.daemon.stop()
        return [*remove_exports(), *remove_devices()]

    def holders(self) -> dict[str, str]:
        return {holder.holder_id: holder.state for holder in self.daemon.status().holders}

    def log(self) -> str:
        return "".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))


def sent_bytes(path: RdmaPath) -> int:
    """By the target, over the wire."""
    return int(Path(f"/sys/class/net/{path.target.interface}/statistics/tx_bytes").read_text())


def compared(got: Answer, expected: Answer) -> dict[str, Any]:
    return {
        "tokens": got.tokens == expected.tokens,
        "logprobs": got.distance(expected) < LOGPROB_TOLERANCE,
        "cached": got.cached,
    }


def ask_again(engine: EngineProcess, expected: Answer) -> dict[str, Any]:
    """With nothing in the engine's own cache."""
    assert engine.call("reset")
    return compared(engine.answer(PROMPT), expected)


def reuse(rig: Rig) -> dict[str, Any]:
    """What one engine computed, a fresh one loads over both paths, straight into its tensors."""
    first = rig.engine()
    cold = first.answer(PROMPT)
    rig.settle(first)
    first_moved = first.call("moved")
    first.close()
    sent = [sent_bytes(path) for path in rig.paths]
    second = rig.engine()
    warm = compared(second.answer(PROMPT), cold)
    sent = [sent_bytes(path) - before for path, before in zip(rig.paths, sent, strict=True)]
    report = {
        "cold_cached": cold.cached,
        "warm": warm,
        "expected_cached": whole_chunks(len(PROMPT)),
        "saved": first_moved,
        "loaded": second.call("moved"),
        "counts": second.call("counts"),
        "sent_bytes": sent,
    }
    second.close()
    until(lambda: not rig.holders())
    return report


def trouble(rig: Rig) -> dict[str, Any]:
    """A path is lost and comes back, the target loses everything, and a silent engine is fenced."""
    engine = rig.engine()
    cold = engine.answer(PROMPT)
    rig.settle(engine)
    report: dict[str, Any] = {"cold": compared(cold, cold)}
    cut_path(rig.paths[0])
    report["one path"] = ask_again(engine, cold)
    restore_path(rig.paths[0])
    remove_exports()
    report["while the target is empty"] = ask_again(engine, cold)
    until(lambda: any((NVMET / "subsystems").iterdir()))
    report["target back after"] = until(lambda: ask_again(engine, cold)["cached"] > 0)
    report["target back"] = ask_again(engine, cold)
    (holder,) = rig.holders()
    for path in rig.paths:
        shape_path(path, Shaping(rate_mbit=SLOW_MBIT))
    engine.answer(UNSAVED)  # the device fetches what is saved from the engine's memory, also when that is stopped
    until(lambda: rig.daemon.status().grant_count > 0)
    os.kill(engine.process.pid, signal.SIGSTOP)
    report["stopped with grants"] = rig.daemon.status().grant_count
    report["fenced after"] = until(lambda: not rig.holders())
    report["grants left"] = rig.daemon.status().grant_count
    for path in rig.paths:
        shape_path(path, Shaping())
    report["exports left"] = len(list((NVMET / "subsystems").iterdir()))
    other = rig.engine()
    report["other"] = compared(other.answer(PROMPT), cold)
    others_own = other.answer(OTHER)
    rig.settle(other)
    os.kill(engine.process.pid, signal.SIGCONT)
    report["woken"] = ask_again(engine, cold)
    report["new incarnation after"] = until(lambda: len(rig.holders()) == 2)
    report["readmitted"] = holder in rig.holders()
    report["woken reuses after"] = until(lambda: ask_again(engine, cold)["cached"] > 0)
    report["woken again"] = ask_again(engine, cold)
    assert other.call("reset")
    report["untouched"] = compared(other.answer(OTHER), others_own)
    report["mismatches"] = [each.call("counts").get("digest_mismatches", 0) for each in (engine, other)]
    engine.close()
    other.close()
    return report


CASES = (reuse, trouble)

if __name__ == "__main__":
    case = {case.__name__: case for case in CASES}[sys.argv[1]]
    rig = Rig(Path("/tmp/rig"))
    try:
        report = case(rig)
    except BaseException:
        print(rig.log(), file=sys.stderr)
        raise
    print(json.dumps({**report, "left": rig.end()}))
