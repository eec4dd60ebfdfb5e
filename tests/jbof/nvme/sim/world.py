"""One simulated world: a host, a target, and a fabric that misbehave until they do not, by one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from meshfusion.jbof.nvme.controller_effects import ControllerState
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.session import Session
from tests.jbof.nvme.sim.fabric import Clock, Fabric
from tests.jbof.nvme.sim.host import TICK_S, Host
from tests.jbof.nvme.sim.memory import HostMemory
from tests.jbof.nvme.sim.rules import Violation, must
from tests.jbof.nvme.sim.subsystem import CHANGE, INACCESSIBLE, NON_OPTIMIZED, OPTIMIZED, SimNamespace, Subsystem
from tests.jbof.nvme.sim.target_admin import ANA, NAMESPACES
from tests.jbof.nvme.sim.target_io import SimIoTarget

STEPS = 1500
SETTLE_S = 5.0
CALM_S = 10.0
_S = ControllerState


class SimulationFailed(AssertionError):
    """Names the seed that brings the failure back."""


PLACEMENT_IDS = ((), (), (0,), (0, 1), (0x100, 0x101, 0x102))


class World:
    def __init__(self, seed: int, make: Callable[..., Session]) -> None:
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.clock = Clock()
        self.fabric = Fabric(self.clock, self.rng, HostMemory())
        subsystem = Subsystem.random(self.rng)
        subsystem.placement_ids = PLACEMENT_IDS[seed % len(PLACEMENT_IDS)]
        self.target = SimIoTarget(self.clock, self.rng, subsystem, self.seen)
        self.target.pending = []
        self.fabric.target = self.target
        self.next_tick_s = TICK_S
        key_scope = KeyScope.COMMAND if seed % 2 else KeyScope.REGION
        self.host = Host(self.rng, self.fabric, self.target, self.seen, make, key_scope)

    # ---- time ----------------------------------------------------------------------------------------------------

    def pass_time(self, duration_s: float) -> None:
        end_s = self.clock.now_s + duration_s
        while self.next_tick_s <= end_s:
            self.clock.run_until(self.next_tick_s)
            self.host.tick()
            self.next_tick_s += TICK_S
        self.clock.run_until(end_s)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        end_s = self.clock.now_s + timeout_s
        while not condition():
            must(self.clock.now_s < end_s, what, self.host.state, self.host.log[-8:])
            self.pass_time(0.05)

    # ---- what happens --------------------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        if self.host.state in (_S.LOST, _S.CLOSED):
            self.seen["sessions given up"] += self.host.state is _S.LOST
            must(not self.host.open, "transfers outlive their session")
            self.host.new_session()
        if rng.random() < (0.7 if self.host.state is _S.LIVE else 0.02):
            self.host.act()
        if rng.random() < 0.005 and self.host.state is _S.LIVE:
            self.seen["bursts"] += 1
            self.target.silent_until_s = self.clock.now_s + rng.choice((0.0, 0.3))
            for _ in range(40):
                self.host.act()
        if rng.random() < 0.02:
            self._change_access(rng.choice((OPTIMIZED,) * 5 + (NON_OPTIMIZED, INACCESSIBLE, CHANGE)))
        if rng.random() < 0.01:
            self._change_namespaces()
        if rng.random() < 0.001:
            self.seen["storms"] += 1
            self.target.storm()
        if rng.random() < 0.0012:
            self._restart(rng.choice((0.0, 0.3, 3.0, 8.0)))
        if rng.random() < 0.0008:
            self.seen["silences"] += 1
            self.target.silent_until_s = self.clock.now_s + rng.choice((0.1, 1.0, 4.0))
        if rng.random() < 0.0015 and self.fabric.links:
            link = rng.choice(list(self.fabric.links.values()))
            if link.is_up and not link.is_killed:
                self.seen["links broken"] += 1
                link.break_off("broken")
        if rng.random() < 0.001:
            self.host.on_effects(self.host.session.disconnect(self.clock.now_s, orderly=rng.random() < 0.7))
        self.pass_time(rng.choice((0.0005, 0.002, 0.01, 0.03)))

    def _change_access(self, state: int) -> None:
        self.rng.choice(list(self.target.subsystem.namespaces.values())).ana_state = state
        self.target.changed(ANA)

    def _change_namespaces(self) -> None:
        """One comes or goes that nobody uses."""
        namespaces = self.target.subsystem.namespaces
        if 8 in {n.nsid for n in namespaces.values()} and not any(c.nsid == 8 for c in self.host.cells):
            del namespaces[8]
        elif 8 not in namespaces:
            namespaces[8] = SimNamespace(8, self.rng.randrange(1, 5000))
        self.target.changed(NAMESPACES)

    def _restart(self, away_s: float) -> None:
        self.seen["restarts"] += 1
        self.target.restart(away_s)
        self.host.on_power_loss()

    # ---- the end -------------------------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """Faults stop: everything must come to rest, then work, then end."""
        host, target = self.host, self.target
        self.fabric.is_rough = target.is_rough = False
        target.silent_until_s = 0.0
        target.away_until_s = 0.0
        for namespace in target.subsystem.namespaces.values():
            namespace.ana_state = OPTIMIZED
        target.changed(ANA)
        self.pass_time(SETTLE_S)  # the last faults show their effects
        must(not host.open, "transfers do not end")
        if host.state in (_S.LOST, _S.CLOSED) or self._ends_anyway():
            self.wait_for(lambda: host.state in (_S.LOST, _S.CLOSED), "does not close")
            host.new_session()
        self.wait_for(lambda: host.state is _S.LIVE or host.state is _S.LOST, "does not reconnect")
        if host.state is _S.LOST:  # the faults came while it connected
            host.new_session()
            self.wait_for(lambda: host.state is _S.LIVE, "does not connect")
        lost = self.seen["ConnectionLost"]
        for _ in range(8):  # one change while another is looked at
            self._change_access(INACCESSIBLE)
            self.pass_time(self.rng.uniform(0.001, 0.2))
        for namespace in target.subsystem.namespaces.values():
            self.pass_time(self.rng.uniform(0.001, 0.02))
            namespace.ana_state = OPTIMIZED
            target.changed(ANA)
        self.pass_time(CALM_S)
        self._check_rest(lost)
        for _ in range(20):
            host.act(is_patient=True)
            self.pass_time(0.01)
        self.wait_for(lambda: not host.open, "transfers do not end")
        must(self.seen["ConnectionLost"] == lost, "the connection was lost without a fault")
        host.on_effects(host.session.disconnect(self.clock.now_s, orderly=True))
        self.wait_for(lambda: host.state is _S.CLOSED, "does not close")
        must(not self.fabric.links, "links outlive their session")
        self.wait_for(lambda: not target.controllers, "the target keeps a controller")
        host.on_effects([])

    def _ends_anyway(self) -> bool:
        return self.host.state in (_S.SHUTTING_DOWN, _S.CLOSING)

    def _check_rest(self, lost: int) -> None:
        host, target = self.host, self.target
        must(host.state is _S.LIVE and self.seen["ConnectionLost"] == lost, "the connection was lost without a fault")
        must(host.memory.in_use_count == 0, "memory is kept")
        must(host.admin_scratch.memory.in_use_count == 0, "scratch memory of the admin queue is kept")
        must(host.range_scratch.memory.in_use_count == 0, "scratch memory for ranges is kept")
        must(host.session.transfers.open_count == 0, "transfers stay open")
        (controller,) = target.controllers.values()
        must(len(controller.requests) == min(3, target.subsystem.event_requests), "event requests are missing")
        inventory = host.session.controller.inventory
        namespaces = target.subsystem.namespaces
        must(set(inventory.namespaces) == set(namespaces), "the inventory is old")
        must(all(inventory.namespaces[n].info.nsze == namespaces[n].lba_count for n in namespaces), "old sizes")
        states = {nsid: host.session.controller.ana_state(nsid) for nsid in namespaces}
        must(set(states.values()) == {OPTIMIZED}, "the access states are old", states)


def run(seed: int, steps: int = STEPS, make: Callable[..., Session] = Session) -> Counter[str]:
    """One world from ``seed``. Returns what happened how often; raises :class:`SimulationFailed`."""
    done = 0
    try:
        world = World(seed, make)
        while done < steps:
            world.step()
            done += 1
        world.wind_down()
    except (AssertionError, KeyError) as error:  # a rule of ours, or an assertion of the code itself
        raise SimulationFailed(f"seed {seed}, step {done}: {type(error).__name__}: {error}") from error
    return world.seen


__all__ = ["STEPS", "SimulationFailed", "Violation", "run"]
