"""The store under simulation: hosts, messages, faults, and the rules that must hold after every step.

Everything that happens follows from one seed. The world keeps its own account of who may still write where
(``unresolved``) and who reads what (``leased``), from the messages alone, and compares the store with it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.dpu.api import types as api
from meshfusion.jbof.errors import StaleHolderError
from meshfusion.jbof.policy.write_budget import BURST_SHARE, DAY_S
from meshfusion.jbof.pool_addresses import drive_of_segment, pool_lba
from tests.sim import host as hosts
from tests.sim.host import Host, Work
from tests.sim.medium import IndexModel, Medium, Token, must
from tests.sim.service import BUDGET_SEGMENTS, CAPACITY_BYTES, OPTIONS, SHELVES, Rules, Service
from tests.sim.tidying import TidyRun
from tests.sim.whims import REFUSAL_RATE

HOST_COUNT = 4


@dataclass(frozen=True)
class Message:
    """On its way to the service. ``life``: the service's life it was meant for, None when any will do."""

    host: Host
    handle: Callable[[Service], None]
    life: int | None
    due_s: float


@dataclass(frozen=True)
class Leased:
    holder_id: str
    chunks: tuple[api.ChunkRecord, ...]
    expires_s: float


class World:
    def __init__(self, seed: int, rules: Rules | None = None, drive_count: int = 1) -> None:
        self.rng = random.Random(seed)
        self.rules = rules or Rules()
        self.drives = SHELVES[drive_count]
        self.now_s = 0.0
        self.is_calm = False  # no faults for a while, so that the pool fills
        self.medium = Medium()
        self.index = IndexModel()
        self.index.forgets_on_open = self.rules.forgets_on_open
        self.tidying: TidyRun | None = None
        self.life = 0
        self.service: Service | None = None
        self.failing_until_s = 0.0
        self.has_budgets = seed % 8 == 3
        self.refuses_some = seed % 8 == 1
        self.absent: set[int] = set()  # drives that have gone, whether the service has seen it or not
        self.messages: list[Message] = []
        self.locks_taken: set[str] = set()
        self.reach_target: set[str] = set()  # what the target allows, whoever told it so
        self.unresolved: dict[str, tuple[str, Work]] = {}  # grant id -> (holder, work): it may still be written
        self.leased: dict[str, Leased] = {}
        self.bundles: list[list[Work]] = []  # what was sent to be committed together
        self.seen: Counter[str] = Counter()
        self._host_count = 0
        self.start_service()
        self.hosts = [self.new_host() for _ in range(HOST_COUNT)]

    # ---- the service's life --------------------------------------------------------------------------------------

    def start_service(self, *, is_whole: bool = False) -> None:
        """``is_whole``: with all drives as they should be; else some may be away, and some only be read."""
        self.life += 1
        fates = {drive: self.rng.random() if len(self.drives) > 1 and not is_whole else 1.0 for drive in self.drives}
        here = {drive: fate > 0.3 for drive, fate in fates.items() if fate > 0.15} or dict.fromkeys(self.drives, True)
        self.seen["lives without a drive"] += len(here) < len(self.drives)
        self.seen["lives with a drive that is only read"] += not all(here.values())
        self.service = Service(
            self.rules,
            self.index,
            here,
            self.now_s,
            self._on_opening,
            whims=random.Random(self.rng.random()),
            refusal_rate=REFUSAL_RATE if self.refuses_some else 0.0,
            has_budgets=self.has_budgets,
        )
        self.tidying = TidyRun(
            self.service, self.medium, self.rng, self.check_bytes, self.absent, flushes=self.rules.flushes_moves
        )
        self.probe()

    def crash_service(self) -> None:
        if self.service is None:
            return
        self.service.crash(self.rng)
        self.service = self.tidying = None
        self.absent.clear()  # they are there again, or the next life starts without them
        self.check_bundles()
        self.leased.clear()  # leases live in memory; a stale read is caught by its digest (rule 4)
        self.messages = [m for m in self.messages if m.life is None or self.rng.random() < 0.5]
        self._forget_fenced()
        for host in self.hosts:
            host.is_attached = False
            host.leases.clear()
            host.asked = 0
        self.seen["service crashes"] += 1

    # ---- drives --------------------------------------------------------------------------------------------------

    def lose_drive(self) -> None:
        """While it is used. What it had not made durable may be gone; a write that was under way comes back as failed,
        or, of a host of a target, nobody knows."""
        service = self.service
        there = [] if service is None else [drive.drive_number for drive in service.drives]
        there = [number for number in there if number not in self.absent]
        if len(there) < 2:
            return
        number = self.rng.choice(there)
        self.absent.add(number)
        for work in (work for host in self.hosts for work in host.works if number in work.drives):
            for lba, token in [write for write in work.in_flight if drive_of_segment(write[1].segment) == number]:
                if self.rng.random() < 0.5:
                    self._land(work, lba, token)
                work.in_flight.remove((lba, token))
                work.is_failed = True
        self.medium.pull(number, self.rng)
        self.seen["drives lost"] += 1

    def see_drives(self) -> None:
        """The service looks: what is gone is not used, and what was gone is, if it is there again."""
        if self.service is None:
            return
        for drive in self.service.drives:
            number = drive.drive_number
            if number in self.absent and number not in self.service.gone:
                self.service.gone.add(number)
            elif number in self.absent and self.rng.random() < 0.3:
                self.absent.discard(number)
                self.service.gone.discard(number)
                self.seen["drives back"] += 1
            self.service.use(drive)

    def change_use(self) -> None:
        """A drive turns read-only, slow or failing, or takes writes again."""
        if self.service is not None and len(self.drives) > 1:
            drive = self.rng.choice(list(self.service.drives))
            self.service.drives[drive] = not self.service.drives[drive]
            self.service.use(drive)
            self.seen["drives used otherwise"] += 1

    def empty_some(self) -> None:
        if self.service is not None and len(self.drives) > 1:
            self.service.forget_some(self.rng.choice(list(self.service.drives)).drive_number)

    def tidy(self) -> None:
        if self.tidying is not None and self.tidying.step is not None:
            self.tidying.step(self.now_s)
            self.seen["chunks moved"] += len(self.tidying.moves)

    def probe(self) -> None:
        service = self.service
        if service is None:
            return
        for holder_id in service.store.holders.to_probe(self.now_s):
            owner = next((h for h in self.hosts if h.holder_id == holder_id and h.lock_held), None)
            if owner is None:
                self.locks_taken.add(holder_id)
                service.submit(service.store.holder_is_gone(self.now_s, holder_id), lambda _: None)

    def export(self) -> None:
        """The target is told what it shall allow; who must go is gone when none of its writes is left there."""
        service = self.service
        if service is None:
            return
        self.reach_target = set(service.store.holders.to_serve())
        for holder_id in service.store.holders.to_cut_off():
            drained = not any(host.in_flight for host in self.hosts if host.holder_id == holder_id)
            if drained or not self.rules.waits_for_drain:
                service.submit(service.store.holder_is_gone(self.now_s, holder_id), lambda _: None)
                self.seen["cut off"] += 1

    def restart_target(self) -> None:
        """Of the writes it was at, some are done and some are not; nobody may reach it until it is told anew."""
        for host in self.hosts:
            if host.access is api.Access.NVMEOF:
                for work in host.in_flight:
                    for lba, token in work.in_flight:
                        if self.rng.random() < 0.5:
                            self._land(work, lba, token)
                    work.in_flight.clear()
                    work.is_doubtful = True
        self.reach_target.clear()
        self.seen["target restarts"] += 1

    def sync(self) -> None:
        if self.service is not None:
            failing = self.now_s < self.failing_until_s and self.rng.random() < 0.7
            self.service.sync(self.now_s, self.rng, failing=failing)
            self.check_bundles()
            self.check_budgets()
            self._forget_fenced()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        if self.rng.random() < 0.02:
            self.is_calm = not self.is_calm
        if self.service is not None:
            self.service.store.tick(self.now_s)
            self.service.store.tend(self.now_s)
        for lease_id in [i for i, leased in self.leased.items() if leased.expires_s <= self.now_s]:
            del self.leased[lease_id]

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, host: Host, handle: Callable[[Service], None], *, bound: bool = True) -> None:
        """``bound``: it cannot outlive the connection to this life of the service."""
        delay_s = self.rng.choice((1.0, 5.0)) if self.rng.random() < 0.1 else 0.0
        self.messages.append(Message(host, handle, self.life if bound else None, self.now_s + delay_s))

    def deliver(self) -> None:
        due = [i for i, message in enumerate(self.messages) if message.due_s <= self.now_s]
        if not due:
            return
        message = self.messages.pop(self.rng.choice(due))
        if self.service is None or (message.life is not None and message.life != self.life):
            return
        try:
            message.handle(self.service)
        except StaleHolderError:
            self.seen["refused as stale"] += 1
            if message.host.is_attached and message.life == self.life:
                self.retire(message.host)

    def later(self, host: Host, handle: Callable[[Service], None]) -> None:
        """Steps of other callers may come between reading the index and deciding."""
        if self.rng.random() < 0.3 and self.service is not None:
            handle(self.service)
        else:
            self.send(host, handle)

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def new_host(self) -> Host:
        self._host_count += 1
        identity = self.rng.choices(hosts.IDENTITIES, (5, 1))[0]
        return Host(f"worker-{self._host_count}", identity, self.rng.choice(list(api.Access)))

    def retire(self, host: Host) -> None:
        """The process goes on as a new incarnation; the old one drains its writes and then lets go of its lock."""
        host.is_leaving = True
        host.is_attached = False
        host.leases.clear()
        for work in host.works:
            work.planned.clear()
        host.works = host.in_flight
        self.hosts.append(self.new_host())

    def bury(self) -> None:
        for host in [h for h in self.hosts if h.is_leaving and not h.in_flight]:
            host.die()
        self.hosts = [h for h in self.hosts if h.is_alive or h.in_flight or self.rng.random() < 0.6]

    def kill(self, host: Host) -> None:
        if host.is_alive:
            was_leaving = host.is_leaving
            host.die()
            self.seen["host crashes"] += 1
            if not was_leaving:
                self.hosts.append(self.new_host())

    def land_write(self) -> None:
        """Writes land in any order, of silent hosts too, long after their grant expired."""
        in_flight = [work for host in self.hosts for work in host.in_flight]
        works = [work for work in in_flight if work.lands_from_s <= self.now_s]
        if not works:
            return
        work = self.rng.choice(works)
        for _ in range(min(len(work.in_flight), self.rng.randint(1, 6))):
            self._land(work, *work.in_flight.pop(self.rng.randrange(len(work.in_flight))))

    def _land(self, work: Work, lba: int, token: Token) -> None:
        must(token.generation == self.index.generation(token.segment), "a write into another generation", token)
        self.medium.write(lba, token)
        self.seen["late writes"] += work.expires_s <= self.now_s

    # ---- the account ---------------------------------------------------------------------------------------------

    def resolve(self, grant_id: str) -> None:
        self.unresolved.pop(grant_id, None)

    def resolve_all_of(self, holder_id: str) -> None:
        for grant_id in [g for g, (owner, _) in self.unresolved.items() if owner == holder_id]:
            del self.unresolved[grant_id]
        for lease_id in [i for i, leased in self.leased.items() if leased.holder_id == holder_id]:
            del self.leased[lease_id]

    def _forget_fenced(self) -> None:
        for record in self.index.holders.values():
            if record.fenced:
                self.resolve_all_of(record.holder_id)

    def _on_opening(self, segment: int) -> None:
        """The store decided to open this segment: nobody may write or read there any more."""
        for owner, work in self.unresolved.values():
            hit = any(extent.segment == segment for extent in work.extents)
            must(not hit, "opened under a writer", segment, owner, work)
        for leased in self.leased.values():
            hit = any(shard.extent.segment == segment for chunk in leased.chunks for shard in chunk.shards)
            must(not hit, "opened under a reader", segment, leased)
        for move in self.tidying.moves if self.tidying is not None else ():
            hit = any(shard.extent.segment == segment for shard in move.after.shards)
            must(not hit, "opened while a chunk was moved there", segment, move)
        self.seen["openings"] += 1
        self.seen["reclaims"] += segment in self.index.segments
        for drive in self.service.drives if self.service is not None else ():
            takes = self.service is not None and self.service.drives[drive]
            takes = takes and self.service is not None and drive.drive_number not in self.service.gone
            must(takes or segment not in drive.segments, "opened on a drive that takes no segments", segment)

    def check_budgets(self) -> None:
        """What was durably opened, and so may have been written, in all lives of the service."""
        burst = BUDGET_SEGMENTS * BURST_SHARE
        most = burst + (BUDGET_SEGMENTS - burst) * self.now_s / DAY_S
        for number, opened in self.index.opened.items() if self.has_budgets else ():
            must(opened <= most, "more was opened than a drive's budget", number, opened, most)
            self.seen["openings within a budget"] += 1

    def check_bundles(self) -> None:
        """Rule 1: what belongs together is in the index together, at every moment and after every crash."""
        unseen = []
        for bundle in self.bundles:
            places = [(work.item.key, extent) for work in bundle for extent in work.extents]
            durable = sum(place in self.index.was_durable for place in places)
            must(durable in (0, len(places)), "a bundle became visible in part", bundle)
            if not durable:
                unseen.append(bundle)
        self.bundles = unseen

    def check_offer(self, host: Host, request: api.MatchRequest, reply: api.MatchReply, service: Service) -> None:
        """Rules 1 and 5: a boundary is offered with all that every group needs there, and that is durable, complete,
        leased and what was asked for."""
        must(bool(reply.chunk_count) == bool(reply.chunks) == bool(reply.lease_id), "half an offer", reply)
        wanted = [
            (group.group, i * hosts.CHUNK_TOKENS, hosts.key(group.group, i))
            for group in request.groups
            for i in hosts.needed(group.group, reply.chunk_count)
            if reply.chunk_count and hosts.is_stored(group.group, i)
        ]
        offered = [(chunk.group, chunk.position_tokens, chunk.key) for chunk in reply.chunks]
        must(offered == wanted, "the offer is not what the boundary takes", reply.chunk_count, offered, wanted)
        for chunk in reply.chunks:
            must(chunk.identity == host.identity, "another identity was offered", host, chunk)
            for shard in chunk.shards:
                is_gone = drive_of_segment(shard.extent.segment) in service.gone
                must(not is_gone, "offered on a drive that is gone", chunk)
                must((chunk.key, shard.extent) in self.index.was_durable, "offered before it was durable", chunk)
                must(service.store.segments.pins(shard.extent.segment)[0] > 0, "offered without a lease", chunk)
            self.check_bytes(chunk)

    def check_bytes(self, chunk: api.ChunkRecord) -> None:
        for shard in chunk.shards:
            extent = shard.extent
            for offset in range(extent.lba_count):
                found = self.medium.durable.get(pool_lba(extent.namespace, extent.lba) + offset)
                must(found is not None, "an offered block was never flushed", chunk, offset)
                assert found is not None
                wanted = Token(
                    chunk.key,
                    chunk.identity,
                    chunk.position_tokens,
                    extent.segment,
                    extent.generation,
                    found.grant_id,
                    offset,
                )
                must(found == wanted, "an offered block holds something else", found, wanted)

    def check_counts(self) -> None:
        if self.service is None:
            return
        store = self.service.store
        counts = store.segments.counts()
        total = counts.free + counts.open + counts.sealed + counts.opening
        drives = self.service.drives
        must(total == sum(drive.segment_count for drive in drives), "segment counts do not add up", counts)
        reads: Counter[int] = Counter(s for lease in store.leases for s in lease.segments)
        writes: Counter[int] = Counter(e.segment for grant in store.grants for e in grant.extents)
        writes += store.own_pins()
        for segment in (segment for drive in drives for segment in drive.segments):
            pins = store.segments.pins(segment)
            must(pins == (reads[segment], writes[segment]), "pins do not match", segment, pins, reads, writes)
        must(store.leases.pinned_bytes <= OPTIONS.max_pinned_fraction * CAPACITY_BYTES, "pinned over the cap")
