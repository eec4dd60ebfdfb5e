"""The service under simulation: hosts, messages, faults, and the account of who may still write where.

Everything that happens follows from one seed. The account (``unresolved``: who may still write; ``leased``: who reads)
is made from the messages alone; :mod:`tests.sim.checks` compares the service with it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.dpu.api import types as api
from meshfusion.dpu.export.desired import Export
from meshfusion.dpu.export.keeper import FencingTarget
from meshfusion.dpu.export.plan import TargetKind
from meshfusion.jbof.errors import StaleHolderError
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.sim import host as hosts
from tests.sim.checks import check_budgets, check_bundles, check_bytes, check_opening
from tests.sim.dialects import Dialect
from tests.sim.drive_changes import Removal, taken_out, what_left_stays_away
from tests.sim.exports import Drives, Exports, Holders, plan_of
from tests.sim.host import Host, Work
from tests.sim.medium import IndexModel, Medium, Token, must
from tests.sim.messages import Message, Post
from tests.sim.owner_changes import preempted
from tests.sim.owners import Owners
from tests.sim.reaching import host_nqn, new_target
from tests.sim.service import SHELVES, Rules, Service
from tests.sim.target import TargetModel
from tests.sim.tidying import TidyRun
from tests.sim.whims import REFUSAL_RATE


@dataclass(frozen=True)
class Leased:
    holder_id: str
    chunks: tuple[api.ChunkRecord, ...]
    expires_s: float


class World:
    """``now_s``: of hosts, messages and drives. ``clock_s``: the service's, which stands still while it is suspended,
    may leap, and never goes back."""

    def __init__(self, seed: int, rules: Rules | None = None, drive_count: int = 1) -> None:
        self.rng = random.Random(seed)
        self.rules = rules or Rules()
        self.drives = SHELVES[drive_count]
        self.has_several_drives = drive_count > 1
        self.now_s = self.clock_s = self.suspended_until_s = 0.0
        self.is_calm = False  # no faults for a while, so that the pool fills
        self.seen: Counter[str] = Counter()
        self.has_budgets = seed % 8 == 3
        self.refuses_some = seed % 8 == 1
        self.changes_owners = seed % 4 == 2 and drive_count == 1
        self.medium = Medium()
        self.owners = Owners(
            self.rng, lambda machine: preempted(self, machine), self.rules.take, checks_epoch=self.rules.checks_epoch
        )
        self.index.forgets_on_open = self.rules.forgets_on_open
        self.target_kind = (TargetKind.SPDK, TargetKind.NVMET)[seed // 8 % 2]
        self.target = new_target(self)
        self.tidying: TidyRun | None = None
        self.exports: Exports | None = None
        self.life = 0
        self.service: Service | None = None
        self.rival: tuple[int, str, Service] | None = None  # its life and machine; see :mod:`tests.sim.owners`
        self.failing_until_s = self.target_down_until_s = 0.0
        self.devices: Counter[int] = Counter()  # by drive: grows when what is behind its namespace is not what was
        self.left: set[int] = set()  # drives that were the pool's, and are others' now
        self.removal: Removal | None = None
        self.absent: set[int] = set()  # drives that have gone, whether the service has seen it or not
        self.post = Post(self.rng, self.seen)
        self.locks_taken: set[str] = set()
        self.unresolved: dict[str, tuple[str, Work]] = {}  # grant id -> (holder, work): it may still be written
        self.leased: dict[str, Leased] = {}
        self.bundles: list[list[Work]] = []  # what was sent to be committed together
        self.committed: set[str] = set()  # grants whose commit was accepted
        self.hosts: list[Host] = []
        self._host_count = 0
        self.fences_seen: set[str] = set()
        self.start_service()
        self.hosts = [self.new_host() for _ in range(hosts.HOST_COUNT)]

    @property
    def index(self) -> IndexModel:
        """The durable one, of the machine that serves."""
        return self.owners.index

    @property
    def awake(self) -> Service | None:
        """None while there is none, and while it is suspended."""
        return self.service if self.suspended_until_s <= self.now_s else None

    # ---- the service's life --------------------------------------------------------------------------------------

    def start_service(self, *, is_whole: bool = False) -> None:
        """``is_whole``: with all drives as they should be; else some may be away, and some only be read."""
        self.life += 1
        fates = {drive: self.rng.random() if self.has_several_drives and not is_whole else 1.0 for drive in self.drives}
        here = {drive: fate > 0.3 for drive, fate in fates.items() if fate > 0.15} or dict.fromkeys(self.drives, True)
        self.seen["lives without a drive"] += len(here) < len(self.drives)
        self.seen["lives with a drive that is only read"] += not all(here.values())
        if not self.has_several_drives:
            self.owners.begin()
        machine = self.owners.machine
        service = self.service = Service(
            self.rules,
            self.index,
            here,
            self.clock_s,
            self._on_opening,
            may_write=lambda: self.owners.may_write(machine),
            whims=random.Random(self.rng.random()),
            refusal_rate=REFUSAL_RATE if self.refuses_some else 0.0,
            has_budgets=self.has_budgets,
            all_numbers=[drive.drive_number for drive in self.drives],
        )
        self.tidying = TidyRun(
            service,
            self.medium,
            self.rng,
            lambda chunk: check_bytes(self, chunk) if self.service is service else None,
            self.absent,
            flushes=self.rules.flushes_moves,
        )
        self.exports = Exports(
            plan_of(self.target_kind),
            lambda desired: self._target_driver()(self.target, desired),
            Holders(
                service.store.holders.to_serve,
                service.store.holders.to_cut_off,
                lambda holder_id: self._cut_off(service, holder_id),
            ),
            Drives(service.showing.now, lambda number: taken_out(self, service, number)),
        )
        self.fences_seen.clear()
        self.probe()

    def crash_service(self) -> None:
        if self.service is None:
            return
        self.service.crash(self.rng)
        self.forget_service()
        self.post.lose_connections()
        self._forget_fenced()
        self.seen["service crashes"] += 1

    def forget_service(self) -> None:
        self.service = self.tidying = self.exports = self.removal = None
        self.suspended_until_s = 0.0
        self.absent.clear()  # they are there again, or the next life starts without them
        check_bundles(self)
        self.leased.clear()  # leases live in memory; a stale read is caught by its digest (rule 4)
        for host in self.hosts:
            host.is_attached = False
            host.leases.clear()
            host.asked = 0
            host.is_asking = False

    def suspend_service(self) -> None:
        """Nothing of it runs, and its clock stands still; everybody else goes on."""
        if self.service is not None:
            self.suspended_until_s = self.now_s + self.rng.choice((30.0, 300.0, 7200.0))
            self.seen["suspensions of the service"] += 1

    def leap(self) -> None:
        """The service's clock is further on than everybody else's, at once."""
        self.clock_s += self.rng.choice((60.0, 600.0, 7200.0))
        self.pass_time(0.0)
        self.seen["leaps of the service's clock"] += 1

    # ---- its rounds ----------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        if self.awake is not None and self.tidying is not None and self.tidying.step is not None:
            self.tidying.step(self.clock_s)
            self.seen["chunks moved"] += len(self.tidying.moves)

    def probe(self) -> None:
        service = self.awake
        if service is None:
            return
        for holder_id in service.store.holders.to_probe(self.clock_s):
            owner = next((h for h in self.hosts if h.holder_id == holder_id and h.lock_held), None)
            if owner is None:
                self.locks_taken.add(holder_id)
                service.submit(service.store.holder_is_gone(self.clock_s, holder_id), lambda _: None)

    def export(self) -> None:
        """The target is told what it shall allow; who must go is gone when none of its writes is left there."""
        self.target.is_down = self.now_s < self.target_down_until_s
        if self.awake is not None and self.exports is not None:
            problem = self.exports.go_round()
            self.seen["rounds of exports with a problem"] += bool(problem)
            what_left_stays_away(self)

    def _cut_off(self, service: Service, holder_id: str) -> None:
        """The keeper has it confirmed."""
        works = [work for host in self.hosts if host.holder_id == holder_id for work in host.in_flight]
        must(not works, "a host was called gone with writes in the target", holder_id, works)
        service.submit(service.store.holder_is_gone(self.clock_s, holder_id), lambda _: None)
        self.seen["cut off"] += 1

    def sync(self) -> None:
        if self.awake is not None:
            failing = self.now_s < self.failing_until_s and self.rng.random() < 0.7
            self.awake.sync(self.clock_s, self.rng, failing=failing)
            check_bundles(self)
            check_budgets(self)
            self._forget_fenced()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        if self.rng.random() < 0.02:
            self.is_calm = not self.is_calm
        if self.service is not None and self.awake is None:
            return
        self.clock_s += seconds
        if self.service is not None:
            self.service.store.tick(self.clock_s)
            self.service.store.tend(self.clock_s)
        for lease_id in [i for i, leased in self.leased.items() if leased.expires_s <= self.clock_s]:
            del self.leased[lease_id]

    def _target_driver(self) -> Callable[[TargetModel, Export], FencingTarget]:
        return self.rules.spdk if self.target_kind is TargetKind.SPDK else self.rules.nvmet

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, host: Host, kind: str, handle: Callable[[Service], None], *, bound: bool = True) -> None:
        """``bound``: it cannot outlive the connection to this life of the service."""
        self.post.send(Message(host, handle, kind, self.life if bound else None, self.now_s))

    def deliver(self) -> None:
        if (self.service is not None and self.awake is None) or (message := self.post.next_due(self.now_s)) is None:
            return
        service = self._asked(message)
        if service is None:
            return
        try:
            message.handle(service)
        except StaleHolderError:
            self.seen["refused as stale"] += 1
            host = message.host
            is_refused = message.kind == "attach" and host.is_alive and not host.is_leaving
            if message.life == self.life and (host.is_attached or is_refused):
                self.retire(host)

    def _asked(self, message: Message) -> Service | None:
        if message.host.machine != self.owners.machine:
            if self.rival is None or self.rival[1] != message.host.machine:
                return None
            self.seen["who was replaced was asked"] += 1
            return self.rival[2]
        return self.service if message.life in (None, self.life) else None

    def later(self, host: Host, handle: Callable[[Service], None]) -> None:
        """Steps of other callers may come between reading the index and deciding."""
        service = self.service if host.machine == self.owners.machine else self.rival and self.rival[2]
        if self.rng.random() < 0.3 and service is not None:
            handle(service)
        else:
            self.post.go_on(Message(host, handle, "", self.life, self.now_s))

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def new_host(self) -> Host:
        self._host_count += 1
        identity = self.rng.choices(hosts.IDENTITIES, (5, 1))[0]
        access = self.rng.choice(list(api.Access))
        dialect = self.rng.choices(list(Dialect), (16, 2, 1, 1))[0]
        host = Host(f"worker-{self._host_count}", identity, access, dialect, self.owners.machine)
        host.asks_for_drives = self._host_count % 7 != 0
        return host

    def replace(self, host: Host) -> None:
        if host.machine == self.owners.machine:
            self.hosts.append(self.new_host())

    def retire(self, host: Host) -> None:
        """The process goes on as a new incarnation; the old one drains its writes and then lets go of its lock."""
        host.is_leaving = True
        host.is_attached = False
        host.leases.clear()
        for work in host.works:
            work.planned.clear()
        host.works = [work for work in host.works if work.in_flight or work.to_replay]
        self.replace(host)

    def bury(self) -> None:
        for host in [h for h in self.hosts if h.is_leaving and not h.in_flight]:
            if host.is_drained or self.rng.random() < 0.2:
                self._end(host)
        self.hosts = [h for h in self.hosts if h.is_alive or h.in_flight or self.rng.random() < 0.6]

    def kill(self, host: Host) -> None:
        if host.is_alive:
            was_leaving = host.is_leaving
            self._end(host)
            self.seen["host crashes"] += 1
            if not was_leaving:
                self.replace(host)

    def _end(self, host: Host) -> None:
        host.die()
        if self.rng.random() < 0.7:  # else its machine is cut off, and the target does not notice
            self.target.lose(host_nqn(self, host))

    def land_write(self) -> None:
        """Writes land in any order, of silent hosts too, long after their grant expired."""
        in_flight = [work for host in self.hosts for work in host.in_flight]
        works = [work for work in in_flight if work.lands_from_s <= self.now_s]
        if not works:
            return
        work = self.rng.choice(works)
        for _ in range(min(len(work.in_flight), self.rng.randint(1, 6))):
            self.land(work, *work.in_flight.pop(self.rng.randrange(len(work.in_flight))))

    def land(self, work: Work, lba: int, token: Token) -> None:
        must(drive_of_segment(token.segment) not in self.left, "a write to a drive that left the pool", token)
        must(token.generation == self.owners.latest.generation(token.segment), "a write into another generation", token)
        self.medium.write(lba, token)
        self.seen["late writes"] += work.expires_s <= self.clock_s

    # ---- the account ---------------------------------------------------------------------------------------------

    def is_served(self, host: Host) -> bool:
        """By the machine that owns the drive; what others promise their hosts is worth nothing."""
        return host.machine == self.owners.machine

    def resolve(self, grant_id: str) -> None:
        self.unresolved.pop(grant_id, None)

    def resolve_all_of(self, holder_id: str) -> None:
        for grant_id in [g for g, (owner, _) in self.unresolved.items() if owner == holder_id]:
            del self.unresolved[grant_id]
        for lease_id in [i for i, leased in self.leased.items() if leased.holder_id == holder_id]:
            del self.leased[lease_id]

    def _forget_fenced(self) -> None:
        for record in self.index.holders.values():
            if record.fenced and record.holder_id not in self.fences_seen:
                self.fences_seen.add(record.holder_id)
                self.resolve_all_of(record.holder_id)

    def _on_opening(self, service: Service, segment: int) -> None:
        if service is self.service:
            check_opening(self, service, segment)
