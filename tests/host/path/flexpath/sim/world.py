"""One simulated world by one seed: hosts, paths that fail in every way, a medium. A failure names its seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.jbof.nvme.logs import AnaState
from tests.host.path.flexpath.sim.host import Host
from tests.host.path.flexpath.sim.path import MAX_KILL_S, SimPath
from tests.jbof.nvme.sim.fabric import Clock
from tests.jbof.nvme.sim.rules import Violation, must

STEPS = 1200
NSIDS = (1, 2)
_A = AnaState
_STATES = (_A.OPTIMIZED,) * 3 + (_A.NON_OPTIMIZED, _A.INACCESSIBLE, _A.CHANGE)


class SimulationFailed(AssertionError):
    """Names the seed that brings the failure back."""


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.clock = Clock()
        self.is_protected = rng.random() < 0.6
        self.paths = [
            SimPath(
                number,
                self.clock,
                rng,
                self.seen,
                bandwidth_bytes_per_s=rng.uniform(0.5e9, 5e9),
                latency_s=rng.uniform(0.0001, 0.002),
            )
            for number in range(rng.randint(1, 4))
        ]
        settings = SpreadSettings(
            max_outstanding_bytes=rng.choice((8 << 20, 64 << 20)), max_waiting=4096 if self.is_protected else 64
        )
        self.host = Host(self.clock, rng, self.seen, self.paths, settings, is_protected=self.is_protected)
        self.host.nsids = NSIDS
        for path in self.paths:
            path.max_kill_s = rng.choice((0.02, 0.02, MAX_KILL_S))
            path.access = dict.fromkeys(NSIDS, _A.OPTIMIZED)
            path.connect()

    def step(self) -> None:
        rng, host = self.rng, self.host
        self.clock.run_until(self.clock.now_s + rng.expovariate(100))
        timeout_s = rng.choice((0.2, 1.0, 10.0, 10.0))
        for _ in range(rng.choice((0, 1, 1, 1, 30)) if rng.random() < 0.3 else 1):
            if rng.random() < 0.3:
                host.write(timeout_s)
            else:
                host.read(timeout_s)
        if rng.random() < 0.1:
            host.recycle()
        if rng.random() < 0.03:
            self._fault(rng.choice(self.paths))
        if rng.random() < 0.01:
            self._operate(rng.choice(self.paths).number)
        if rng.random() < 0.01:  # a quiet time
            self.clock.run_until(self.clock.now_s + rng.uniform(0.5, 5))

    def _fault(self, path: SimPath) -> None:
        if self.is_protected and path.number == 0:
            return
        rng = self.rng
        fault = rng.choice(("kill", "stall", "flap", "lossy", "erring", "slow", "access", "access"))
        self.seen[fault] += 1
        away_s = rng.choice((0.02, 0.3, 2.0, 8.0))
        match fault:
            case "kill":
                path.kill()
                self._later(away_s, path.revive)
            case "stall":
                path.stall()
                self._later(away_s, path.unstall)
            case "flap":
                for i in range(rng.randint(2, 5)):
                    self._later(i * 1.5, path.kill)
                    self._later(i * 1.5 + 0.3, path.revive)
            case "lossy":
                path.loss_part = rng.choice((0.02, 0.3))
                self._later(away_s, lambda: setattr(path, "loss_part", 0.0))
            case "erring":
                path.error_part = rng.choice((0.05, 0.5, 1.0))
                self._later(away_s, lambda: setattr(path, "error_part", 0.0))
            case "slow":
                path.slowness = rng.choice((3.0, 30.0, 300.0))
                self._later(away_s, lambda: setattr(path, "slowness", 1.0))
            case "access":
                path.set_access(rng.choice(NSIDS), rng.choice(_STATES))

    def _operate(self, path: int) -> None:
        """What is good stays enabled: its reads may not fail."""
        if self.is_protected and path == 0:
            return
        self.seen["disable"] += 1
        self.host.disable(path)
        self._later(self.rng.choice((0.02, 0.3, 2.0, 8.0)), lambda: self.host.enable(path))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.clock.after(delay_s, action)

    def wind_down(self) -> None:
        """Faults stop: everything must end, and everything must be used again."""
        self.clock.run_until(self.clock.now_s + 20)  # faults that were begun end
        for path in self.paths:
            for nsid in NSIDS:
                path.set_access(nsid, _A.OPTIMIZED)
            if not path.is_connected:
                path.revive()
        self.clock.run_until(self.clock.now_s + 5)
        must(not self.host.open, "requests do not end")
        must(self.host.spread.open_count == 0, "requests stay open")
        must(all(lane.outstanding_bytes == 0 for lane in self.host.spread.lanes), "bytes stay under way")
        asked = self.host.write(10.0)  # whatever the paths' past is
        self.clock.run_until(self.clock.now_s + 1)
        must(asked.outcome == "done", "nothing is reached over paths that are all back:", asked.outcome)
        for _ in range(400):  # until after the longest quarantine
            self.clock.run_until(self.clock.now_s + 0.1)
            self.host.write(10.0)
            self.host.read(10.0)
        before = [path.moved_bytes for path in self.paths]
        for _ in range(300):
            self.host.write(10.0)
        self.clock.run_until(self.clock.now_s + 10)
        must(not self.host.open, "requests do not end")
        used = [path.moved_bytes > moved for path, moved in zip(self.paths, before, strict=True)]
        must(all(used), "paths that are good again are not used:", used)
        for extent in self.host.extents:
            must(bytes(extent.content) == extent.expected, "the medium holds other bytes than were written")


def run(seed: int, steps: int = STEPS) -> Counter[str]:
    """One world from ``seed``. Returns what happened how often; raises :class:`SimulationFailed`."""
    done = 0
    try:
        world = World(seed)
        while done < steps:
            world.step()
            done += 1
        world.wind_down()
    except (AssertionError, KeyError) as error:  # a rule of ours, or an assertion of the code itself
        raise SimulationFailed(f"seed {seed}, step {done}: {type(error).__name__}: {error}") from error
    return world.seen


__all__ = ["STEPS", "SimulationFailed", "Violation", "run"]
