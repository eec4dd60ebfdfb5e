"""How much several paths move together, with requests enough for all of them, and what the loss of one costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.jbof.nvme.logs import AnaState
from tests.host.path.flexpath.sim.host import Host
from tests.host.path.flexpath.sim.memory import Extent
from tests.host.path.flexpath.sim.path import SimPath
from tests.host.path.flexpath.sim.world import SimulationFailed
from tests.jbof.nvme.sim.fabric import Clock
from tests.jbof.nvme.sim.rules import must

TIMEOUT_S = 10.0
KINDS = ("kill", "stall")
BACK_S = 1.0  # after the loss of a path, throughput is back
PART_MIN = 0.9  # of the sum of bandwidths
REENTRY_S = 3.0  # quarantine, reconnection and a share that grows


class Load:
    """A closed loop of ``count`` reads over paths of these bandwidths."""

    def __init__(self, seed: int, bandwidths_bytes_per_s: Sequence[float], count: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.clock = Clock()
        self.paths = [
            SimPath(
                number,
                self.clock,
                rng,
                self.seen,
                bandwidth_bytes_per_s=bandwidth,
                latency_s=rng.uniform(0.0001, 0.002),
            )
            for number, bandwidth in enumerate(bandwidths_bytes_per_s)
        ]
        self.host = Host(self.clock, rng, self.seen, self.paths, SpreadSettings())
        for path in self.paths:
            path.access = {1: AnaState.OPTIMIZED}
            path.connect()
        for blocks in range(1, 9):
            extent = Extent(1, blocks)
            extent.expected = bytes(extent.content)
            self.host.extents.append(extent)
        for _ in range(count):
            self._again()

    def _again(self) -> None:
        asked = self.host.read(TIMEOUT_S)
        assert asked is not None
        if asked.outcome:  # at once: it failed
            self.clock.after(0.001, self._again)
        else:
            asked.when_over = self._again

    def run(self, duration_s: float) -> None:
        self.clock.run_until(self.clock.now_s + duration_s)

    def rates(self, duration_s: float, do: Callable[[], None] | None = None) -> list[float]:
        """Bytes per second over each path during the next ``duration_s``, in which ``do`` happens first."""
        if do is not None:
            do()
        before = [path.moved_bytes for path in self.paths]
        self.run(duration_s)
        return [(path.moved_bytes - moved) / duration_s for path, moved in zip(self.paths, before, strict=True)]


def bandwidths(seed: int) -> list[float]:
    """Of two to six paths, up to ten times as fast as each other."""
    rng = random.Random(seed)
    return [rng.uniform(0.2e9, 2e9) for _ in range(rng.randint(2, 6))]


def check_throughput(seed: int, kind: str) -> None:
    """Raises :class:`SimulationFailed`."""
    try:
        _check_throughput(seed, kind)
    except (AssertionError, KeyError) as error:
        raise SimulationFailed(f"seed {seed}, {kind}: {type(error).__name__}: {error}") from error


def _check_throughput(seed: int, kind: str) -> None:
    speeds = bandwidths(seed)
    load = Load(seed, speeds, random.Random(seed).choice((16, 128)) * len(speeds))
    load.run(0.5)
    rates = load.rates(0.5)
    must(sum(rates) >= PART_MIN * sum(speeds), "paths do not add up:", rates, speeds)
    for rate, speed in zip(rates, speeds, strict=True):
        must(rate >= 0.8 * speed, "a path is not used in proportion to its bandwidth:", rates, speeds)
    lost = load.paths[load.rng.randrange(len(speeds))]
    lost.kill() if kind == "kill" else lost.stall()
    load.run(BACK_S)
    rates, left = load.rates(0.25), sum(speeds) - lost.bandwidth_bytes_per_s
    must(sum(rates) >= PART_MIN * left, "throughput does not come back:", rates, speeds)
    lost.revive() if kind == "kill" else lost.unstall()
    load.run(REENTRY_S)
    rates = load.rates(0.5)
    must(sum(rates) >= PART_MIN * sum(speeds), "the path does not come back:", rates, speeds)
