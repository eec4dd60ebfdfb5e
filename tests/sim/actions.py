"""What hosts do: each action sends a message; what the service does with it, and what the account makes of it."""

from __future__ import annotations

from collections.abc import Callable

from meshfusion.dpu.api import types as api
from meshfusion.jbof.errors import StaleHolderError
from tests.sim import host as hosts
from tests.sim.host import Host, Work
from tests.sim.medium import must
from tests.sim.service import OPTIONS, Service
from tests.sim.world import Leased, World

REPLY_LOST = 0.03


def attach(world: World, host: Host) -> None:
    if not host.is_attached:  # in a new epoch: only with nothing outstanding may the same incarnation come back
        is_other = host.access is api.Access.NVMEOF or world.rng.random() < 0.5
        if host.in_flight or (host.epoch and is_other):
            world.retire(host)
            return
        host.works.clear()
    host.asked += 1

    def handle(service: Service) -> None:
        fenced = host.holder_id in world.index.holders and world.index.holders[host.holder_id].fenced
        step = service.store.attach(world.now_s, hosts.attach_request(host))
        must(not fenced, "a fenced incarnation was admitted again", host)
        _promise(world, host, service)
        service.submit(step, lambda _: admitted(service), on_failure=lambda: None)

    def admitted(service: Service) -> None:
        world.locks_taken.discard(host.holder_id)
        if host.access is api.Access.NVMEOF:
            if host.holder_id not in service.store.holders.to_serve():
                return  # condemned meanwhile: the target does not take it
            world.reach_target.add(host.holder_id)
        if host.is_alive and not host.is_leaving:
            host.lock_held = host.access is api.Access.LOCAL
            host.is_attached = True
            host.epoch = service.store.epoch

    world.send(host, handle)


def detach(world: World, host: Host) -> None:
    """It drains, lets go of its lock, and says goodbye; of a target's host that is not believed."""
    if host.in_flight:
        return
    host.die()
    world.hosts.append(world.new_host())

    def handle(service: Service) -> None:
        if host.access is api.Access.NVMEOF:
            service.store.holders.condemn(host.holder_id)
        elif service.store.holders.knows(host.holder_id):
            world.locks_taken.add(host.holder_id)
            step = service.store.detach(world.now_s, api.DetachRequest(host.holder_id))
            if step.effects:
                world.resolve_all_of(host.holder_id)
            service.submit(step, lambda _: None)

    world.send(host, handle, bound=False)


def reserve(world: World, host: Host) -> None:
    items = hosts.random_items(world.rng)
    request = api.ReserveRequest(host.holder_id, host.epoch, items)

    def look(service: Service) -> None:
        stored = service.look_up([item.key for item in items])
        world.later(host, lambda service: decide(service, stored))

    def decide(service: Service, stored: dict[bytes, api.ChunkRecord]) -> None:
        step = service.store.reserve(world.now_s, request, stored)
        expires_s = world.now_s + OPTIONS.grant_ttl_s
        works = [
            hosts.make_work(host, item, result, expires_s)
            for item, result in zip(items, step.reply.results, strict=True)
            if result.outcome is api.ReserveOutcome.GRANTED
        ]
        for result in step.reply.results:
            world.seen[f"reserve {result.outcome.value}"] += 1
        grant_ids = tuple(work.grant_id for work in works)
        undo = api.AbortRequest(host.holder_id, host.epoch, grant_ids)
        service.submit(step, lambda _: granted(works), on_failure=lambda: service.store.abort(world.now_s, undo))

    def granted(works: list[Work]) -> None:
        if world.rng.random() < REPLY_LOST or host.is_leaving or not host.is_alive:
            return  # nobody learns of them: they stay the store's burden until the holder leaves
        must(host.holder_id in world.index.holders, "a grant for a holder that a restart would not know", host)
        for work in works:
            world.unresolved[work.grant_id] = (host.holder_id, work)
            host.works.append(work)

    world.send(host, look)


def write(world: World, host: Host) -> None:
    if works := [work for work in host.works if work.planned]:
        work = world.rng.choice(works)
        if host.access is api.Access.NVMEOF and host.holder_id not in world.reach_target:
            work.planned.clear()  # the connection is gone, and with it what became of the write
            work.is_doubtful = True
        elif work.drives & world.absent:
            work.planned.clear()
            work.is_failed = True
        else:
            is_slow = world.rng.random() < 0.1
            host.submit_writes(work, world.now_s + (world.rng.choice((5.0, 50.0, 500.0)) if is_slow else 0.0))


def doubt(world: World, host: Host) -> None:
    """A deadline passed, or the connection broke: the host says so, and its write may land all the same."""
    works = [work for work in host.works if not work.planned and (work.in_flight or work.is_doubtful)][:2]
    for work in works:
        work.is_doubtful = True
    host.works = [work for work in host.works if work not in works or work.in_flight]
    doubtful = tuple(work.grant_id for work in works)
    request = api.AbortRequest(host.holder_id, host.epoch, (), doubtful)
    world.seen["writes in doubt"] += len(works)
    world.send(host, lambda service: service.store.abort(world.now_s, request), bound=False)


def commit(world: World, host: Host) -> None:
    written = [work for work in host.works if work.is_written and not work.drives & world.absent]
    works = written[: world.rng.randint(1, 5)]
    if not works:
        return
    world.medium.flush(world.absent)  # what was lost of it in between, the host cannot see
    host.works = [work for work in host.works if work not in works]
    bundles = [
        world.rng.choice((0, 1, 1, 1, 2)) for _ in works
    ]  # of several reserves, so that a part of one may expire
    items = tuple(map(hosts.commit_item, works, bundles))
    request = api.CommitRequest(host.holder_id, host.epoch, items)

    def handle(service: Service) -> None:
        step = service.store.commit(world.now_s, request)
        for bundle in set(bundles) - {0}:
            fates = [fate for fate, its in zip(step.reply.committed, bundles, strict=True) if its == bundle]
            must(len(set(fates)) == 1, "a bundle was accepted in part", fates, works)
            world.bundles.append([work for work, its in zip(works, bundles, strict=True) if its == bundle])
            world.seen[f"bundles {'accepted' if fates[0] else 'refused'}"] += len(fates) > 1
        for work, accepted in zip(works, step.reply.committed, strict=True):
            must(not accepted or world.now_s < work.expires_s, "a commit was accepted after expiry", work)
            _resolve(world, work)
            world.seen["commits accepted" if accepted else "commits refused"] += 1
        service.submit(step, lambda _: None)

    world.send(host, handle, bound=False)


def abort(world: World, host: Host) -> None:
    unstarted = [work for work in host.works if not work.is_started and not work.is_doubtful]
    settled = [work for work in host.works if work.is_failed and not (work.planned or work.in_flight)]
    works = [work for work in host.works if work.is_written or work in unstarted or work in settled][:2]
    host.works = [work for work in host.works if work not in works]
    request = api.AbortRequest(host.holder_id, host.epoch, tuple(work.grant_id for work in works))

    def handle(service: Service) -> None:
        service.store.abort(world.now_s, request)
        for work in works:
            _resolve(world, work)

    world.send(host, handle, bound=False)


def match(world: World, host: Host) -> None:
    request = api.MatchRequest(host.holder_id, "request", hosts.CHUNK_TOKENS, hosts.random_lookup(world.rng))

    def look(service: Service) -> None:
        found = service.look_up([key for group in request.groups for key in group.keys])
        world.later(host, lambda service: decide(service, found))

    def decide(service: Service, found: dict[bytes, api.ChunkRecord]) -> None:
        shortened = service.store.counts["match_shortened_by_pins"]
        reply = service.store.match(world.now_s, request, found)
        world.check_offer(host, request, reply, service)
        world.seen["chunks matched"] += len(reply.chunks)
        world.seen["several groups matched"] += len({chunk.group for chunk in reply.chunks}) > 1
        was_shortened = service.store.counts["match_shortened_by_pins"] > shortened
        world.seen["lower boundaries for the pins"] += was_shortened and reply.chunk_count > 0
        if reply.lease_id:
            world.leased[reply.lease_id] = Leased(host.holder_id, reply.chunks, world.now_s + OPTIONS.lease_ttl_s)
            if host.is_attached and world.rng.random() > REPLY_LOST:
                host.leases[reply.lease_id] = reply.chunks

    world.send(host, look)


def read(world: World, host: Host) -> None:
    for lease_id, chunks in host.leases.items():
        if lease_id in world.leased:
            for chunk in chunks:
                world.check_bytes(chunk)
                world.seen["chunks read"] += 1


def release(world: World, host: Host) -> None:
    lease_ids = tuple(host.leases)[:2]
    for lease_id in lease_ids:
        del host.leases[lease_id]

    def handle(service: Service) -> None:
        service.store.release(world.now_s, api.ReleaseRequest(host.holder_id, lease_ids))
        for lease_id in lease_ids:
            world.leased.pop(lease_id, None)

    world.send(host, handle, bound=False)


def drop(world: World, host: Host) -> None:
    chunks = [chunk for chunks in host.leases.values() for chunk in chunks]
    if not chunks or world.rng.random() < 0.7:
        return
    chunk = world.rng.choice(chunks)
    request = api.DropRequest(host.holder_id, chunk.key, chunk.shards[0].extent, "its digest did not match")

    def look(service: Service) -> None:
        found = service.look_up([chunk.key]).get(chunk.key)
        world.later(host, lambda service: decide(service, found))

    def decide(service: Service, found: api.ChunkRecord | None) -> None:
        service.submit(service.store.drop(world.now_s, request, found), lambda _: None)

    world.send(host, look)


def heartbeat(world: World, host: Host) -> None:
    lease_ids = tuple(host.leases)

    def handle(service: Service) -> None:
        request = api.HeartbeatRequest(host.holder_id, host.epoch, lease_ids)
        lost = service.store.heartbeat(world.now_s, request).lost_lease_ids
        for lease_id in lease_ids:
            leased = world.leased.get(lease_id)
            must(leased is None or lease_id not in lost, "a live lease was lost", lease_id)
            if leased is not None:
                renewed_s = world.now_s + OPTIONS.lease_ttl_s
                world.leased[lease_id] = Leased(leased.holder_id, leased.chunks, renewed_s)

    world.send(host, handle)


def fall_silent(world: World, host: Host) -> None:
    if world.rng.random() < 0.3:
        host.silent_until_s = world.now_s + world.rng.choice((20.0, 70.0, 300.0))
        world.seen["silences"] += 1


def rise_again(world: World, host: Host) -> None:
    """A late attach of an incarnation that is gone."""

    def handle(service: Service) -> None:
        fenced = host.holder_id in world.index.holders and world.index.holders[host.holder_id].fenced
        try:
            step = service.store.attach(world.now_s, hosts.attach_request(host))
        except StaleHolderError:
            world.seen["fenced refused"] += fenced
            return
        must(not fenced, "a fenced incarnation was admitted again", host)
        _promise(world, host, service)
        service.submit(step, lambda _: None)

    world.send(host, handle)


def _promise(world: World, host: Host, service: Service) -> None:
    """Who attaches promises that its writes of earlier epochs are over."""
    for grant_id, (owner, work) in list(world.unresolved.items()):
        if owner == host.holder_id and work.epoch < service.store.epoch:
            world.resolve(grant_id)


def _resolve(world: World, work: Work) -> None:
    if world.unresolved.get(work.grant_id, ("", None))[1] is work:
        world.resolve(work.grant_id)


Action = Callable[[World, Host], None]


def _choices(host: Host) -> dict[Action, int]:
    """What an attached host may do now, and how readily."""
    can_write = any(work.planned for work in host.works)
    written = sum(work.is_written for work in host.works)
    return {
        reserve: 20 if len(host.works) < 5 else 1,
        write: 25 * can_write,
        commit: 25 if written > 2 else 6 * written,  # several at once make bundles
        abort: 3 * bool(host.works),
        doubt: 2 * (host.access is api.Access.NVMEOF and bool(host.in_flight)) + any(w.is_doubtful for w in host.works),
        match: 20,
        read: 10 * bool(host.leases),
        release: 6 * bool(host.leases),
        drop: bool(host.leases),
        heartbeat: 8,
        fall_silent: 1,
        detach: 1,
        attach: 1,
    }


def act(world: World, host: Host) -> None:
    if not host.is_alive:
        if world.rng.random() < 0.2:
            rise_again(world, host)
    elif host.is_leaving or world.now_s < host.silent_until_s:
        return
    elif host.is_attached:
        choices = _choices(host)
        world.rng.choices(list(choices), list(choices.values()))[0](world, host)
    elif host.asked < 2 or world.rng.random() < 0.05:
        attach(world, host)
