"""Runs in the guest, as ``python guest_silent_writer.py TARGET[-all|-minute|-unfenced]``: a writer with grants falls
silent with writes under way, its space is written by another one, and then it wakes up.

``TARGET``: the kernel's (``nvmet``), or the SPDK that ``MESHFUSION_TEST_NVMF_TGT`` names (``spdk``). ``all``: in more
ways; ``minute``: it is silent for a real one. ``unfenced``: the service is made to believe that every host is gone that
it asks to have cut off, to see that this test would tell. Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api import types as api
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import RdmaPath, cut_path, restore_path, shape_path, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import remove_exports
from meshfusion.tools.lab.guest_setup.shaping import Shaping
from tests.e2e.daemon import Daemon
from tests.lab.killable_targets import killable
from tests.lab.other_writer import OtherWriter, chunk_of, unit_content
from tests.lab.silent_writer import MARK

SIZE_MIB, SEGMENT_MIB = 32, 2
SILENCE_S, MINUTE_S = 4.0, 60.0
SLOW = Shaping(rate_mbit=2.0)  # what is under way takes six seconds
UNTIL_S, ANSWER_S = 150.0, 180.0
STORES_MAX = 600
UNFENCED = """
from meshfusion.dpu.export import steps
from meshfusion.dpu.export.fence import Confirmed
from meshfusion.dpu.export.nvmet.target import NvmetTarget
from meshfusion.dpu.export.spdk.target import SpdkTarget

TAKES_AWAY = (steps.RemoveHost, steps.RemoveListener, steps.RemoveNamespace, steps.DeleteSubsystem)

def without_taking_away(apply):
    return lambda self, step: None if isinstance(step, TAKES_AWAY) else apply(self, step)

for target in (NvmetTarget, SpdkTarget):
    target.apply = without_taking_away(target.apply)
    target.fence = lambda self, host_nqn: Confirmed()
"""


def until(condition: Callable[[], object], what: str, timeout_s: float = UNTIL_S) -> float:
    """How long it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() < began_s + timeout_s, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.05)
    return time.monotonic() - began_s


class Silent:
    """The process of ``silent_writer.py``."""

    def __init__(self, daemon: Daemon, path: RdmaPath) -> None:
        command = [sys.executable, str(Path(__file__).parent / "silent_writer.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seen = self.told("attach", address=daemon.address, portal=path.target.address, source=path.host.address)
        self.extents = [range(lba, lba + count) for lba, count, *_ in self.seen["extents"]]

    def tell(self, what: str, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the silent writer ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def told(self, what: str, **order: Any) -> dict[str, Any]:
        self.tell(what, **order)
        return self.answer()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Scenario:
    """``is_cut``: its network is cut, in place of its process being stopped. ``killed_after_s``: the service is killed
    and started again when it has been silent for so long; ``service``, ``target``: that is, between its fence and its
    waking up."""

    name: str
    is_cut: bool = False
    killed_after_s: float | None = None
    service: bool = False
    target: bool = False


SCENARIOS = (
    Scenario("stopped"),
    Scenario("stopped, service restarted during its fence", killed_after_s=SILENCE_S + 1.0),
    Scenario("cut, both restarted", is_cut=True, service=True, target=True),
    Scenario("cut", is_cut=True),
    Scenario("stopped, service restarted before its fence", killed_after_s=0.0),
    Scenario("stopped, service restarted", service=True),
    Scenario("stopped, target restarted", target=True),
)
FEW = 3  # in every run


class Rig:
    """A small pool on a device in memory, and two ways to it: one for the silent writer alone."""

    def __init__(self, target: str, *, silence_s: float, is_fenced: bool = True) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.paths = soft_roce_paths(2)
        self.device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
        self.target = killable(target, self.folder)
        self.target.start()
        self.silence_s = silence_s
        configuration = self.target.configuration(tuple(path.target.address for path in self.paths))
        self.daemon = Daemon(
            self.folder,
            data_path=self.device,
            silence_s=silence_s,
            size=f"{SIZE_MIB}MiB",
            segment_size=f"{SEGMENT_MIB}MiB",
            more=f"{configuration}medium: {{policy: everything}}\n",  # what was used longest ago goes first
            changed_by="" if is_fenced else UNFENCED,
        )
        self.daemon.start()
        self.other = self._joined()
        self._next_chunk = 0
        self.stores: Counter[str] = Counter()

    def _joined(self) -> OtherWriter:
        return OtherWriter(self.daemon.address, self.paths[1].target.address)

    def store(self, count: int) -> None:
        for _ in range(count):
            self._next_chunk += 1
            outcome = self.other.store(self._next_chunk)
            self.stores[outcome] += 1
            if outcome != "stored":
                time.sleep(0.2)

    def is_listed(self, holder_id: str) -> bool:
        return any(holder.holder_id == holder_id for holder in self.daemon.status().holders)

    def restart(self, *, service: bool, target: bool) -> None:
        if target:
            self.target.kill()
        if service:
            self.daemon.kill()
        if target:
            self.target.start()
        if service:
            self.daemon.start()
            former, self.other = self.other, self._joined()
            former.close()
        until(lambda: self.other.host_nqn in self.target.reach(), "the other writer is let in")

    def reused(self, silent: Silent) -> dict[str, Any]:
        """Until every block that was granted to the silent writer belongs to a chunk of the other one."""
        wanted = {lba for extent in silent.extents for lba in extent}
        began_s, generations = (
            time.monotonic(),
            {segment: generation for *_, segment, generation in silent.seen["extents"]},
        )
        for _ in range(STORES_MAX // 10):
            self.store(10)
            extents = [shard.extent for chunk in self.other.chunks() for shard in chunk.shards]
            over = [e for e in extents if not wanted.isdisjoint(range(e.lba, e.lba + e.lba_count))]
            if wanted <= {lba for e in over for lba in range(e.lba, e.lba + e.lba_count)}:
                is_new = all(extent.generation > generations[extent.segment] for extent in over)
                return {"chunks": len(over), "new_generations": is_new, "s": round(time.monotonic() - began_s, 1)}
            assert time.monotonic() < began_s + UNTIL_S, dict(self.stores)
        raise AssertionError(f"its space is not used again: {dict(self.stores)}, {self.daemon.status()}")

    def judged(self) -> dict[str, Any]:
        """Every chunk that is offered: on the medium, behind everybody's back, and over the path."""
        chunks = self.other.chunks()
        on_medium: Counter[str] = Counter(self._on_medium(chunk) for chunk in chunks)
        loaded = Counter(self.other.load(chunk) for chunk in chunks)
        return {"chunks": len(chunks), "on_medium": dict(on_medium), "loaded": dict(loaded)}

    def _on_medium(self, chunk: api.ChunkRecord) -> str:
        (shard,) = chunk.shards
        first = shard.extent.lba + shard.payload_lba_offset
        with self.device.open("rb") as medium:
            for unit in range(len(shard.unit_digests)):
                medium.seek((first + unit * shard.unit_lba_count) * LBA_BYTES)
                got = medium.read(shard.unit_bytes)
                if got != unit_content(chunk_of(chunk.key), unit):
                    return "the silent writer's" if MARK in got and set(got) == {MARK} else "wrong"
        return "right"

    def settled(self) -> dict[str, Any]:
        def is_settled() -> bool:
            status = self.daemon.status()
            held = (status.lease_count, status.grant_count, status.pinned_bytes, status.segments_quarantined)
            return held == (0, 0, 0, 0) and len(status.holders) == 1

        took_s = until(is_settled, "nothing is held or in doubt")
        status = self.daemon.status()
        parts = (status.segments_free, status.segments_open, status.segments_sealed, status.segments_reclaiming)
        return {"took_s": round(took_s, 1), "adds_up": sum(parts) == status.segment_count}

    def log(self) -> str:
        return self.target.log() + "".join(path.read_text()[-6000:] for path in sorted(self.folder.glob("*.log")))


def silenced(rig: Rig, scenario: Scenario) -> dict[str, Any]:
    """A writer falls silent with writes under way; its space is used again; it wakes up."""
    path = rig.paths[0]
    rig.store(4)
    silent = Silent(rig.daemon, path)
    holder, host_nqn = silent.seen["holder"], silent.seen["host_nqn"]
    rig.store(2)
    shape_path(path, SLOW)
    under_way = silent.told("begin_more")["under_way"]
    time.sleep(0.3)
    began_s = time.monotonic()
    if scenario.is_cut:
        under_way = silent.told("mute")["under_way"]
        cut_path(path)
    else:
        silent.stop()
    grants = rig.daemon.status().grant_count
    if scenario.killed_after_s is not None:
        time.sleep(scenario.killed_after_s)
        rig.restart(service=True, target=False)
    until(lambda: not rig.is_listed(holder), "it is fenced")
    fenced_s = time.monotonic() - began_s
    status = rig.daemon.status()
    rig.restart(service=scenario.service, target=scenario.target)
    reused = rig.reused(silent)
    seen_before = host_nqn in rig.target.reach(), host_nqn in rig.target.connected()
    silent_s = time.monotonic() - began_s
    silent.tell("go_on")
    restore_path(path)
    silent.wake()
    went_on = silent.answer()
    times_s = {"awake": time.monotonic()}
    again = silent.told("connect_again", subsystem_nqns=[rig.other.subsystem_nqn])
    times_s["connected"] = time.monotonic()
    asked = silent.told("ask")
    times_s["asked"] = time.monotonic()
    rig.store(3)
    judged = rig.judged()
    times_s["judged"] = time.monotonic()
    seen_after = host_nqn in rig.target.reach(), host_nqn in rig.target.connected()
    silent.end()
    report = {
        "name": scenario.name,
        "under_way": under_way,
        "grants": grants,
        "fenced_s": round(fenced_s, 1),
        "grants_after": status.grant_count,
        "quarantined_after": status.segments_quarantined,
        "reused": reused,
        "silent_s": round(silent_s, 1),
        "went_on": went_on,
        "connected_again": list(again.values()),
        "asked": asked,
        "target_shows": [*seen_before, *seen_after],
        "judged": judged,
        "times_s": {name: round(at_s - began_s, 1) for name, at_s in times_s.items()},
    }
    print(report, file=sys.stderr, flush=True)
    return report


def main(case: str) -> dict[str, Any]:
    target, _, variant = case.partition("-")
    silence_s = MINUTE_S if variant == "minute" else SILENCE_S
    rig = Rig(target, silence_s=silence_s, is_fenced=variant != "unfenced")
    try:
        scenarios = SCENARIOS if variant == "all" else SCENARIOS[:FEW] if not variant else SCENARIOS[:1]
        reports = [silenced(rig, scenario) for scenario in scenarios]
        settled = rig.settled() if variant != "unfenced" else {}
        rig.other.close()
        rig.daemon.stop()
    except BaseException:
        print(rig.log(), file=sys.stderr)
        raise
    finally:
        rig.daemon.kill()
        rig.target.kill()
    return {
        "silence_s": silence_s,
        "scenarios": reports,
        "stores": dict(rig.stores),
        "settled": settled,
        "left": [*remove_exports(), *remove_devices()],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
