"""A session over the simulated target in its calm, with a clock to turn by hand."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from meshfusion.jbof.nvme.controller_effects import (
    ControllerLost,
    ControllerState,
)
from meshfusion.jbof.nvme.session import Session
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.transport import TransportEffect
from tests.jbof.nvme.sim.fabric import Clock, Fabric
from tests.jbof.nvme.sim.memory import HostMemory, SimScratchPool
from tests.jbof.nvme.sim.subsystem import SUBSYSTEM_NQN, SimNamespace, Subsystem
from tests.jbof.nvme.sim.target import Capsule, SimController
from tests.jbof.nvme.sim.target_io import SimIoTarget

_S = ControllerState
TICK_S = 0.005
SETTINGS = ControllerSettings(
    SUBSYSTEM_NQN,
    "nqn.2026-01.com.example:host",
    uuid.UUID(int=7),
    "test",
    io_queue_count=2,
    connect_timeout_s=0.5,
    admin_timeout_s=1.0,
    keep_alive_timeout_s=2.0,
    backoff_first_s=0.1,
    backoff_max_s=1.0,
    loss_timeout_s=10.0,
    kill_alarm_s=1.0,
)


class Target(SimIoTarget):
    """``connect_result`` is or-ed into what Connect returns; ``refuses`` is the status of every Connect."""

    connect_result = 0
    refuses = 0
    never_ready = False
    fails = False

    def respond(self, capsule: Capsule, status: int = 0, result: int = 0) -> None:
        if capsule.opcode == 0x7F and capsule.data[4] == 0x01:
            status, result = self.refuses or status, result | self.connect_result
        super().respond(capsule, status, result)

    def _property(self, capsule: Capsule, controller: SimController) -> None:
        if capsule.data[4] == 0x04 and capsule.number(44, 4) == 0x1C and (self.never_ready or self.fails):
            super().respond(capsule, result=int(self.fails) << 1)
        else:
            super()._property(capsule, controller)


class Bench:
    def __init__(self, target: type[Target] = Target, **settings: Any) -> None:
        rng = random.Random(3)
        self.clock = Clock()
        self.admin, ranges = SimScratchPool(1 << 20, 8), SimScratchPool(1 << 30, 2)
        self.fabric = Fabric(self.clock, rng, HostMemory(self.admin.memory, ranges.memory))
        namespaces = {1: SimNamespace(1, 100)}
        self.subsystem = Subsystem(namespaces, mdts=1, descriptors=1, max_commands=0, has_limits=False)
        self.target = target(self.clock, rng, self.subsystem, Counter())
        self.target.pending = []
        self.fabric.target = self.target
        self.fabric.is_rough = self.target.is_rough = False
        self.fabric.tell = lambda event: self.act(self.session.handle(self.clock.now_s, event))
        self.events: list[tuple[float, Any]] = []
        self.session = Session(replace(SETTINGS, **settings), self.admin, ranges, lambda: 0.0, rng.randbytes)

    @property
    def state(self) -> ControllerState:
        return self.session.controller.state

    def act(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, TransportEffect):
                self.fabric.carry_out(effect)
            else:
                self.events.append((self.clock.now_s, effect))

    def run(self, duration_s: float) -> None:
        end_s = self.clock.now_s + duration_s
        while self.clock.now_s < end_s:
            self.clock.run_until(self.clock.now_s + TICK_S)
            self.act(self.session.tick(self.clock.now_s))

    def run_until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        end_s = self.clock.now_s + limit_s
        while not condition():
            assert self.clock.now_s < end_s, "it does not happen"
            self.run(TICK_S)

    def run_until_state(self, state: ControllerState) -> None:
        self.run_until(lambda: self.state is state)

    def connect(self) -> Self:
        self.act(self.session.connect(self.clock.now_s))
        self.run_until(lambda: self.state not in (_S.CONNECTING, _S.LOSING))
        return self

    def seen(self, kind: type) -> list[Any]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def times(self, kind: type) -> list[float]:
        return [now_s for now_s, event in self.events if isinstance(event, kind)]

    def error(self) -> Exception:
        assert self.state is _S.LOST
        [lost] = self.seen(ControllerLost)
        assert isinstance(lost.error, Exception)
        return lost.error
