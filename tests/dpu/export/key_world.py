"""Histories of keys: hosts that connect and report, a service that ends anywhere, a target that forgets, a disk, and
clocks. What goes from one to another may be lost, come twice or late.

The service's part is the code itself: :class:`~meshfusion.dpu.export.keeper.ExportKeeper` with its keys, without its
thread. Violations are assertions; whoever lives through a history names its seed.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshfusion.dpu.api.service_types import KeyChange
from meshfusion.dpu.export.desired import Address, Listener
from meshfusion.dpu.export.drive_showing import DrivesNow
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.export.key_keeping import KeyKeeping
from meshfusion.dpu.export.keys import HostKeys, KeyKind
from meshfusion.dpu.export.plan import ExportPlan, TargetKind
from meshfusion.jbof.errors import MediaError, ServiceUnavailableError
from meshfusion.jbof.nvme.auth_keys import format_secret, key_id, new_secret, parse_secret
from tests.dpu.export.key_model import DiskModel, KeyedTarget
from tests.sim.target import NvmetOfModel, SpdkOfModel

FOLDER = Path("/holders")
POOL = uuid.UUID(int=7)
LISTENERS = frozenset({Listener(Address("rdma", "10.0.0.1"))})
HEARTBEAT_S = 5.0
PERIOD_S = 2.0
LIFETIME_S = 60.0
SLACK_S = 4 * HEARTBEAT_S


class Killed(BaseException):
    """The service's process ends here."""


@dataclass
class Engine:
    """``key``: with which it connects; ``is_old``: it does not say which one that is."""

    name: str
    nqn: str
    is_old: bool
    key: str = ""
    next_s: float = 0.0
    is_alive: bool = True
    late_replies: list[str] = field(default_factory=list)

    @property
    def says(self) -> str:
        return "" if self.is_old else key_id(self.key)


@dataclass(frozen=True)
class Parts:
    """Of the service: what a planted bug is in."""

    keys: Callable[[Path, KeyKind, DiskModel], HostKeys] = HostKeys
    keeping: type[KeyKeeping] = KeyKeeping
    plan: type[ExportPlan] = ExportPlan


class Life:
    """Of the service's process."""

    def __init__(self, world: World, parts: Parts) -> None:
        kind = KeyKind(".key", world.new_text, parse_secret)
        self.keys = parts.keys(FOLDER, kind, world.disk)
        plan = parts.plan(world.target.kind, f"nqn.2026-11.io.example:{POOL}", POOL, {}, LISTENERS, keys=self.keys)
        of_model = SpdkOfModel if world.target.kind is TargetKind.SPDK else NvmetOfModel
        self.keeper = ExportKeeper(of_model(world.target, plan.export(())), plan)
        self.keeping = parts.keeping(
            self.keys, world.lifetime_s, clock=lambda: world.now_s, wall_clock=lambda: world.now_s + world.wall_off_s
        )
        self.keeper._keys = self.keeping


class World:
    """``is_calm``: no faults from now on. ``listed``, ``gone``: durable; ``condemned`` is not."""

    def __init__(self, rng: random.Random, parts: Parts, kind: TargetKind) -> None:
        self.rng, self.parts = rng, parts
        self.now_s, self.wall_off_s = 0.0, 1e9
        self.lifetime_s = LIFETIME_S
        self.is_calm = False
        self.kill_rate = 0.0
        self.kill_at: int | None = None  # the number of a point
        self.points = 0
        self.is_nested = False
        self.disk = DiskModel(rng, self.point, self._may_write, lambda: self.now_s + self.wall_off_s)
        self.target = KeyedTarget(kind, rng, self.disk, self.point)
        self.life: Life | None = None
        self.engines: list[Engine] = []
        self.made = 0
        self.listed: list[str] = []
        self.condemned: set[str] = set()
        self.gone: set[str] = set()
        self.seen: dict[str, int] = {}  # changes at the target that the service has read
        self.next_round_s = 0.0
        self.born_s: dict[str, float] = {}  # by text of a key
        self.told: Counter[str] = Counter()  # what happened

    # ---- the service's surroundings ------------------------------------------------------------------------------

    def new_text(self) -> str:
        text = format_secret(new_secret(random_bytes=self.rng.randbytes))
        self.born_s[text] = self.now_s
        return text

    def _may_write(self, incarnation: str) -> bool:
        return incarnation not in self.gone

    def point(self, where: str) -> None:
        """Between two things that the service does."""
        self.points += 1
        self.check()
        if not self.is_nested and not self.is_calm and self.rng.random() < 0.1:
            self.is_nested = True
            self.stir_host()
            self.is_nested = False
        if self.kill_at == self.points or (not self.is_calm and self.rng.random() < self.kill_rate):
            self.told["killed"] += 1
            raise Killed(where)

    def start(self) -> None:
        self.life = Life(self, self.parts)
        self.condemned.clear()  # what was not confirmed is condemned again: they are silent
        self.seen.clear()
        self.serve(lambda life: life.keys.forget_all_but(one for one in self.listed if one not in self.gone))

    def lose_service(self) -> None:
        self.life = None

    def lose_power(self) -> None:
        """The machine of service and target."""
        self.lose_service()
        self.disk.lose_power()
        self.target.restart()
        self.told["power lost"] += 1

    def serve(self, what: Callable[[Life], None]) -> bool:
        """False: it refused, was killed meanwhile, or is not there."""
        if self.life is None:
            return False
        try:
            what(self.life)
        except Killed:
            self.lose_service()
            return False
        except MediaError:
            return False
        return True

    # ---- what the service does -----------------------------------------------------------------------------------

    def holders_to_serve(self) -> tuple[str, ...]:
        return tuple(one for one in self.listed if one not in self.gone | self.condemned)

    def holders_to_cut_off(self) -> tuple[str, ...]:
        return tuple(one for one in self.listed if one in self.condemned - self.gone)

    def holder_is_cut_off(self, incarnation: str) -> None:
        assert self.life is not None
        self.gone.add(incarnation)
        self.condemned.discard(incarnation)
        self.life.keys.forget(incarnation)

    def served(self) -> list[Engine]:
        """Those that are alive."""
        names = set(self.holders_to_serve())
        return [engine for engine in self.engines if engine.is_alive and engine.name in names]

    def drives_to_show(self) -> DrivesNow:
        return DrivesNow({0: Path("/drive")}, {})

    def drive_is_taken_out(self, number: int) -> None:
        raise AssertionError(number)

    def round(self) -> None:
        def go(life: Life) -> None:
            before = dict(self.target.changes)
            life.keeper._last = last = life.keeper._make_so(self, self)
            assert "DHHC" not in last.problem
            if not last.problem:  # then it was read after all changes
                self.seen = {**before, **self.target.changes}

        self.next_round_s = self.now_s + PERIOD_S
        self.serve(go)
        self.check()

    def rekey(self) -> None:
        def go(life: Life) -> None:
            served = self.holders_to_serve()
            asked = served if self.rng.random() < 0.5 else served[:1]
            changes = life.keeper.replace_keys(asked, deadline_s=0.0)
            assert KeyChange.DONE not in changes.values()
            self.told["asked for"] += 1

        self.serve(go)

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """A new incarnation, which comes to nothing if it cannot be admitted soon."""
        name = f"e{self.made}"
        self.made += 1

        def list_it(life: Life) -> None:
            life.keeper.prepare(name)
            self.point("before it is listed")
            self.listed.append(name)

        if not self.serve(list_it) or self.life is None:
            return
        engine = Engine(name, self.life.keeper._plan.host_nqn(name), is_old=self.rng.random() < 0.15)
        self.round()
        if not self._admit(engine):
            self.condemned.add(name)
            return
        engine.next_s = self.now_s + HEARTBEAT_S
        self.engines.append(engine)
        self.told["attached"] += 1

    def _admit(self, engine: Engine) -> bool:
        if self.life is None or engine.name in self.condemned | self.gone:
            return False
        try:
            reach = self.life.keeper.admit(engine.name, deadline_s=0.0)
        except ServiceUnavailableError:
            return False
        self._tell(engine, reach.host_key)
        return True

    def attach_again(self, engine: Engine) -> None:
        """As the same incarnation, to ask for drives."""
        if engine.is_alive and self._admit(engine):
            self.told["attached again"] += 1

    def _tell(self, engine: Engine, key: str) -> None:
        asked = self.target.ever_asked.get(engine.nqn, [])
        assert key in asked, f"{engine.name} is told a key that its target never asked for"
        if not self.is_calm and self.rng.random() < 0.1:
            engine.late_replies.append(key)
        engine.key = key

    def heartbeat(self, engine: Engine) -> None:
        """Requests and replies are lost, come twice, or late."""
        engine.next_s = self.now_s + HEARTBEAT_S
        if self.life is None or not engine.is_alive:
            return
        fate = 1.0 if self.is_calm else self.rng.random()
        if fate < 0.1:
            return
        if engine.name in self.condemned | self.gone:
            engine.is_alive = False  # the service does not know it any more
            self.target.lose(engine.nqn)
            return
        for _ in range(2 if fate < 0.2 else 1):
            reply = self.life.keeper.hear(engine.name, engine.says)
        assert not (engine.is_old and reply)
        if 0.2 <= fate < 0.3:
            engine.late_replies.append(reply)
            return
        if reply:
            self._tell(engine, reply)
            self.told["told a new key"] += 1
        if not engine.is_old and self.seen.get(engine.nqn) == self.target.changes.get(engine.nqn):
            asked = self.target.asked(engine.nqn)
            assert asked in ("", engine.key), f"{engine.name} has reported, and is locked out still"

    def come_late(self, engine: Engine) -> None:
        """An answer to what it asked long ago."""
        key = engine.late_replies.pop(0) if engine.late_replies else ""
        engine.key = key or engine.key

    def connect(self, engine: Engine) -> None:
        if not engine.is_alive:
            return
        if self.target.connect_with(engine.nqn, engine.key):
            self.told["connected"] += 1

    def disconnect(self, engine: Engine) -> None:
        self.target.lose(engine.nqn)

    def stir_host(self) -> None:
        if self.engines:
            ways = (self.connect, self.disconnect, self.heartbeat, self.come_late, self.attach_again)
            self.rng.choice(ways)(self.rng.choice(self.engines))

    # ---- what must hold at any time ------------------------------------------------------------------------------

    def check(self) -> None:
        for engine in self.engines:
            asked = self.target.asked(engine.nqn)
            if asked:
                assert asked == self.target.set_texts[engine.nqn], f"{engine.name} needs another key, and nobody set it"
                assert not engine.is_old or asked == engine.key, f"{engine.name} cannot learn of its new key"
            assert len(self.disk.files_of(engine.name)) <= 2, f"{engine.name} has a third key"
        let_in = {nqn.rsplit(":", 1)[1] for there in self.target.subsystems.values() for nqn in there.host_nqns}
        assert not let_in & self.gone, "let in again"

    def pass_time(self, up_to_s: float) -> None:
        self.now_s += self.rng.uniform(0.0, up_to_s)
        for engine in self.engines:
            if engine.next_s <= self.now_s:
                self.heartbeat(engine)
        if self.next_round_s <= self.now_s:
            self.round()
