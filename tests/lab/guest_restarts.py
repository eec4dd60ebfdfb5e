"""Runs in the guest, as ``python guest_restarts.py TARGET[-long] [SEED]``: what engines depend on is killed and started
again under load, in a random order. ``TARGET``: the kernel's (``nvmet``), or the SPDK that ``MESHFUSION_TEST_NVMF_TGT``
names (``spdk``).

Engines, the service and SPDK are processes of their own. Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import remove_exports
from tests.e2e.daemon import Daemon
from tests.lab.killable_targets import Reach, killable
from tests.lab.restart_engines import Ended, EngineProcess, EngineSetup

ENGINES = 2
SIZE_MIB, SEGMENT_MIB = 256, 4
SILENCE_S = 6.0  # such a guest may be slow
ROUNDS, ROUNDS_LONG = 1, 5  # of each kind
FRESH_S, FRESH_LONG_S = 2.0, 6.0  # so that nothing has to be given up: each chunk is accounted for
DOWN_MAX_S, BETWEEN_MAX_S = 3.0, 3.0
UNTIL_S = 150.0
DEADLINE_S = 10.0
NQN_AUTHORITY = "nqn.2026-11.io.meshfusion"


def until(condition: Callable[[], object], what: str, timeout_s: float = UNTIL_S) -> float:
    """How long it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() < began_s + timeout_s, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.05)
    return time.monotonic() - began_s


class Rig:
    """A pool on a device in memory, a target with two ports, and engines at work."""

    def __init__(self, target: str, seed: int, *, fresh_s: float, is_local: bool = False) -> None:
        """``is_local``: without a target, to try this file on any machine."""
        self.folder = Path(tempfile.mkdtemp())
        self.seed, self.fresh_s = seed, fresh_s
        self.path = "auto" if is_local else "rdma"
        self.target = killable(target, self.folder)
        self.addresses: tuple[str, ...] = ()
        self.device: Path | None = None
        if not is_local:
            self.addresses = tuple(path.target.address for path in soft_roce_paths(2))
            self.device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
            self.target.start()
        self.daemon = Daemon(
            self.folder,
            data_path=self.device,
            silence_s=SILENCE_S,
            size=f"{SIZE_MIB}MiB",
            segment_size=f"{SEGMENT_MIB}MiB",
            more="" if is_local else self.target.configuration(self.addresses),
        )
        self.daemon.start()

    def start_engines(self) -> None:
        self.engines = [EngineProcess(self._setup(number)) for number in range(ENGINES)]
        self.reader = EngineProcess(self._setup(ENGINES), is_reader=True)

    def _setup(self, number: int) -> EngineSetup:
        return EngineSetup(number, ENGINES, self.daemon.address, self.seed, self.folder, self.fresh_s, self.path)

    def status(self) -> api.PoolStatus | None:
        """None while the service does not answer."""
        try:
            return self.daemon.status()
        except MeshFusionError:
            return None

    def is_as_wanted(self) -> bool:
        """Every engine is attached, the target lets in their hosts with what they need, and nobody else but those that
        the service still lists."""
        status = self.status()
        if status is None or status.exports_problem:
            return False
        states = {holder.holder_id: holder.state for holder in status.holders}
        live = {holder_id for holder_id, state in states.items() if state == "live"}
        if self.device is None:
            return len(live) == ENGINES
        reach = self.target.reach()
        served = {holder_id for holder_id, state in states.items() if state != "condemned"}
        wanted: Reach = ((1, str(self.device)),), tuple(sorted(self.addresses))
        return len(live) == ENGINES and reach == {host_nqn(status.pool_uuid, h): wanted for h in served}

    def ended(self) -> list[list[Ended]]:
        return [engine.ended() for engine in self.engines]

    def have_all_hit_since(self, from_s: float) -> bool:
        for engine in self.engines:
            engine.check()
        return all(any(e.began_s >= from_s and e.loaded_tokens for e in ended) for ended in self.ended())

    def holders(self) -> set[str]:
        status = self.status()
        return set() if status is None else {h.holder_id for h in status.holders if h.state == "live"}

    def chunks(self) -> list[api.ChunkRecord]:
        client, after = GrpcChunkService(self.daemon.address), b""
        found: list[api.ChunkRecord] = []
        while True:
            reply = client.list_chunks(api.ListRequest(after, 500), deadline_s=DEADLINE_S)
            found += reply.chunks
            after = reply.next_after_key
            if not after:
                client.close()
                return found

    def log(self) -> str:
        return self.target.log() + "".join(path.read_text()[-6000:] for path in sorted(self.folder.glob("*.log")))


def host_nqn(pool_uuid: str, holder_id: str) -> str:
    return f"{NQN_AUTHORITY}:{pool_uuid}:host:{holder_id}"


# ---- what happens --------------------------------------------------------------------------------------------------


def target_killed(rig: Rig, rng: random.Random) -> None:
    rig.target.kill()
    time.sleep(rng.uniform(0.0, DOWN_MAX_S))
    rig.target.start()


def service_killed(rig: Rig, rng: random.Random) -> None:
    rig.daemon.kill()
    time.sleep(rng.uniform(0.0, DOWN_MAX_S))
    rig.daemon.start()


def both_killed(rig: Rig, rng: random.Random) -> None:
    """Either comes back first."""
    for kill in rng.sample([rig.target.kill, rig.daemon.kill], 2):
        kill()
    for start in rng.sample([rig.target.start, rig.daemon.start], 2):
        time.sleep(rng.uniform(0.0, DOWN_MAX_S / 2))
        start()


def service_stopped(rig: Rig, rng: random.Random) -> None:
    """In order."""
    rig.daemon.stop()
    time.sleep(rng.uniform(0.0, DOWN_MAX_S))
    rig.daemon.start()


KINDS = (target_killed, service_killed, both_killed, service_stopped)


def observed(rig: Rig, kind: Callable[[Rig, random.Random], None], rng: random.Random) -> dict[str, Any]:
    """``exported_s``: until all is as wanted; ``hits_s``: until every engine has loaded something that it asked for
    afterwards. Both from when what was killed has been started again. ``stayed``: engines with the same place at the
    service as before."""
    before = rig.holders()
    began_s = time.monotonic()
    kind(rig, rng)
    up_s = time.monotonic()
    until(rig.is_as_wanted, "what is exported is as it is wanted")
    exported_s = time.monotonic() - up_s
    stayed = len(before & rig.holders())
    until(lambda: rig.have_all_hit_since(up_s), "every engine has hits again")
    report = {
        "kind": kind.__name__,
        "down_s": round(up_s - began_s, 1),
        "exported_s": round(exported_s, 1),
        "hits_s": round(time.monotonic() - up_s, 1),
        "stayed": stayed,
    }
    print(report, file=sys.stderr, flush=True)
    time.sleep(rng.uniform(0.0, BETWEEN_MAX_S))
    return report


# ---- what is left --------------------------------------------------------------------------------------------------


def settled(rig: Rig, holders: int) -> dict[str, Any]:
    """When nothing is held or in doubt any more and ``holders`` are attached: all that a pool can hold."""

    def is_settled() -> bool:
        status = rig.status()
        return status is not None and (
            (status.lease_count, status.grant_count, status.pinned_bytes, status.segments_quarantined) == (0, 0, 0, 0)
            and (len(status.holders), status.exports_problem, status.transactions_pending) == (holders, "", 0)
        )

    try:
        took_s = until(is_settled, f"nothing is held, by {holders} holders")
    except AssertionError as error:
        raise AssertionError(f"{error}: {rig.status()}") from None
    status = rig.daemon.status()
    parts = (status.segments_free, status.segments_open, status.segments_sealed, status.segments_reclaiming)
    return {
        "took_s": round(took_s, 1),
        "segments": [*parts, status.segment_count],
        "adds_up": sum(parts) == status.segment_count,
        "chunks": status.committed_chunk_count,
        "saves_stopped": status.saves_stopped_reason,
        "hosts": len(rig.target.reach()),
        "is_as_wanted": rig.device is None
        or set(rig.target.reach()) == {host_nqn(status.pool_uuid, h.holder_id) for h in status.holders},
        "connected": len(rig.target.connected()),
    }


def overlaps(chunks: Sequence[api.ChunkRecord]) -> int:
    """Pairs of extents that share a block."""
    extents = sorted((s.extent.namespace, s.extent.lba, s.extent.lba_count) for chunk in chunks for s in chunk.shards)
    return sum(one[0] == other[0] and one[1] + one[2] > other[1] for one, other in pairwise(extents))


def mfctl(*arguments: str) -> tuple[int, Any]:
    command = [sys.executable, "-c", "from meshfusion.tools.mfctl.main import main; main()", *arguments]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def reread(rig: Rig, prompts: Sequence[int]) -> dict[str, Any]:
    """By an engine that has seen nothing of it: what is stored of each prompt, every byte compared."""
    seen = rig.reader.read(prompts)
    rig.reader.leave()
    ended = rig.reader.ended()
    return {
        "requests": len(ended),
        "loaded_tokens": sum(e.loaded_tokens for e in ended),
        "whole": sum(e.loaded_tokens >= e.prompt_tokens // 32 * 32 for e in ended),
        "mismatches": seen["counters"].get("digest_mismatches", 0),
    }


def run(rig: Rig, rounds: int) -> dict[str, Any]:
    rng = random.Random(rig.seed)
    rig.start_engines()
    began_s = time.monotonic()
    until(lambda: rig.have_all_hit_since(began_s), "every engine has hits")
    kinds = [kind for kind in KINDS for _ in range(rounds)]
    rng.shuffle(kinds)
    restarts = [observed(rig, kind, rng) for kind in kinds]
    seen = [engine.idle() for engine in rig.engines]
    idle = settled(rig, ENGINES)
    ended = [request for engine in rig.ended() for request in engine]
    for engine in rig.engines:
        engine.leave()
    alone = settled(rig, 0)
    chunks = rig.chunks()
    listed = {chunk.key.hex() for chunk in chunks}
    committed = {key for each in seen for key in each["committed"]}
    dropped = {key for each in seen for key in each["dropped"]}
    report = {
        "seed": rig.seed,
        "restarts": restarts,
        "requests": len(ended),
        "with_hits": sum(request.loaded_tokens > 0 for request in ended),
        "loaded_mib": sum(each["counters"].get("loaded_bytes", 0) for each in seen) >> 20,
        "counters": together(each["counters"] for each in seen),
        "told": together(each["told"] for each in seen),
        "holders": sum(len(each["holders"]) for each in seen),
        "idle": idle,
        "alone": alone,
        "committed": len(committed),
        "listed": len(listed),
        "lost": len(committed - listed),
        "dropped": len(dropped),
        "twice": len(chunks) - len(listed),
        "overlaps": overlaps(chunks),
        "reread": reread(rig, sorted({request.prompt for request in ended})),
        "check_served": mfctl("pool", "check", str(rig.daemon.pool)),
    }
    settled(rig, 0)
    rig.daemon.stop()
    report["check_stopped"] = mfctl("pool", "check", str(rig.daemon.pool))
    return report


def together(counters: Any) -> Mapping[str, int]:
    names = ("digest_mismatches", "failed_blocks", "loads_failed", "saves_in_doubt", "saves_repeated", "saves_failed")
    more = ("chunks_committed", "commits_refused", "lookups_without_path", "saves_dropped_service")
    wanted = {*names, *more, "Attached", "LeasesLost", "Committed", "Dropped"}
    total: Counter[str] = Counter()
    for each in counters:
        total.update({name: count for name, count in each.items() if name in wanted})
    return dict(sorted(total.items()))


def main(case: str, seed: int) -> dict[str, Any]:
    target, _, length = case.partition("-")
    is_long = length == "long"
    print(f"seed {seed}", file=sys.stderr, flush=True)
    rig = Rig(target, seed, fresh_s=FRESH_LONG_S if is_long else FRESH_S, is_local=length == "local")
    try:
        report = run(rig, ROUNDS_LONG if is_long else ROUNDS)
    except BaseException:
        print(rig.log(), file=sys.stderr)
        raise
    finally:
        rig.target.kill() if rig.device is not None else None
    return {**report, "left": [*remove_exports(), *remove_devices()] if rig.device is not None else []}


if __name__ == "__main__":
    drawn = random.SystemRandom().getrandbits(32)
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else drawn)))
