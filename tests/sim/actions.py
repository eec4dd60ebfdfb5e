"""What hosts do: each action sends a message; what the service does with it, and what the account makes of it."""

from __future__ import annotations

from collections.abc import Callable

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.effects import DeleteChunk
from meshfusion.dpu.store.steps import Step
from meshfusion.jbof.errors import StaleHolderError, UnsupportedError
from tests.sim import host as hosts
from tests.sim.checks import check_bytes, check_offer
from tests.sim.dialects import Dialect, commit_as_read, match_as_read, reserve_as_read
from tests.sim.host import Host, Work
from tests.sim.medium import must
from tests.sim.service import OPTIONS, Service
from tests.sim.world import Leased, World

REPLY_LOST = 0.03


def attach(world: World, host: Host) -> None:
    if not host.is_attached:  # in a new epoch: only with nothing outstanding may the same incarnation come back
        is_other = host.access is api.Access.NVMEOF or world.rng.random() < 0.5
        if not host.is_drained or (host.epoch and is_other):
            world.retire(host)
            return
        host.works.clear()
    host.asked += 1

    def handle(service: Service) -> None:
        step = _attach(world, host, service)
        if step is None:
            return
        _promise(world, host, service)
        service.submit(step, lambda _: listed(service), on_failure=lambda: None)

    def listed(service: Service) -> None:
        world.locks_taken.discard(host.holder_id)
        if host.access is api.Access.LOCAL:
            admitted(service)
        elif service is world.service and world.exports is not None:
            world.exports.admit(host.holder_id, lambda can_connect: answered(service, can_connect))

    def answered(service: Service, can_connect: bool) -> None:
        if not can_connect:
            service.store.holders.condemn(host.holder_id)
            world.seen["not let in by the target"] += 1
            if host.is_alive and not host.is_leaving:
                world.retire(host)
            return
        service.store.holders.answered(world.clock_s, host.holder_id)
        if host.is_alive:
            world.connect(host)
        admitted(service)

    def admitted(service: Service) -> None:
        if host.is_alive and not host.is_leaving:
            host.lock_held = host.access is api.Access.LOCAL
            host.is_attached = True
            host.epoch = service.store.epoch

    world.send(host, "attach", handle)


def _attach(world: World, host: Host, service: Service) -> Step[str] | None:
    """None: refused, for its version of the API."""
    record = service.index.holders.get(host.holder_id)
    try:
        step = service.store.attach(world.clock_s, hosts.attach_request(host))
    except UnsupportedError:
        must(host.dialect is Dialect.OLD, "an engine of this version was refused for its version", host)
        must(not service.store.holders.knows(host.holder_id), "who was refused is listed", host)
        world.seen["refused for an old version"] += 1
        if world.rng.random() < 0.3:  # its people notice
            world.kill(host)
        return None
    must(host.dialect is not Dialect.OLD, "an engine of another version was admitted", host)
    must(record is None or not record.fenced, "a fenced incarnation was admitted again", host)
    return step


def detach(world: World, host: Host) -> None:
    """It drains, lets go of its lock, and says goodbye; of a target's host that is not believed."""
    if not host.is_drained:
        return
    host.die()
    world.replace(host)

    def handle(service: Service) -> None:
        if host.access is api.Access.NVMEOF:
            service.store.holders.condemn(host.holder_id)
        elif service.store.holders.knows(host.holder_id):
            world.locks_taken.add(host.holder_id)
            step = service.store.detach(world.clock_s, api.DetachRequest(host.holder_id))
            if step.effects:
                world.resolve_all_of(host.holder_id)
            service.submit(step, lambda _: None)

    world.send(host, "detach", handle, bound=False)


def reserve(world: World, host: Host) -> None:
    items = hosts.random_items(world.rng)
    request = reserve_as_read(api.ReserveRequest(host.holder_id, host.epoch, items), host.dialect)

    def look(service: Service) -> None:
        stored = service.look_up([item.key for item in items])
        world.later(host, lambda service: decide(service, stored))

    def decide(service: Service, stored: dict[bytes, api.ChunkRecord]) -> None:
        must(host.dialect is not Dialect.OLD, "an engine of another version was served", host)
        step = service.store.reserve(world.clock_s, request, stored)
        expires_s = world.clock_s + OPTIONS.grant_ttl_s
        works = [
            hosts.make_work(host, item, result, expires_s)
            for item, result in zip(items, step.reply.results, strict=True)
            if result.outcome is api.ReserveOutcome.GRANTED
        ]
        for result in step.reply.results:
            world.seen[f"reserve {result.outcome.value}"] += 1
        grant_ids = tuple(work.grant_id for work in works)
        undo = api.AbortRequest(host.holder_id, host.epoch, grant_ids)
        service.submit(
            step, lambda _: granted(service, works), on_failure=lambda: service.store.abort(world.clock_s, undo)
        )

    def granted(service: Service, works: list[Work]) -> None:
        if world.rng.random() < REPLY_LOST or host.is_leaving or not host.is_alive:
            return  # nobody learns of them: they stay the store's burden until the holder leaves
        must(host.holder_id in service.index.holders, "a grant for a holder that a restart would not know", host)
        for work in works:
            if world.is_served(host):
                _check_alone(world, work)
                world.unresolved[work.grant_id] = (host.holder_id, work)
            host.works.append(work)

    world.send(host, "reserve", look)


def _check_alone(world: World, work: Work) -> None:
    """No two may write one chunk at a time: the second has nothing to do."""
    for _, other in world.unresolved.values() if len(world.drives) == 1 else ():
        is_over = other.epoch != work.epoch or other.expires_s <= world.clock_s or other.is_given_back
        must(is_over or other.item.key != work.item.key, "two live grants for one chunk", other, work)


def write(world: World, host: Host) -> None:
    if works := [work for work in host.works if work.planned]:
        work = world.rng.choice(works)
        if host.access is api.Access.NVMEOF and not _is_connected(world, host):
            work.planned.clear()  # the connection is gone, and with it what became of the write
            work.is_doubtful = True
        elif work.drives & world.absent or not world.owners.may_write(host.machine):
            work.planned.clear()
            work.is_failed = True
        else:
            is_slow = world.rng.random() < 0.1
            host.submit_writes(work, world.now_s + (world.rng.choice((5.0, 50.0, 500.0)) if is_slow else 0.0))


def _is_connected(world: World, host: Host) -> bool:
    if not world.is_served(host):
        return True  # to a target that has lost the drive
    world.connect(host)
    return world.target.can_write(world.host_nqn(host))


def doubt(world: World, host: Host) -> None:
    """A deadline passed, or the connection broke: the host says so, and its write may land all the same."""
    works = [work for work in host.works if not work.planned and (work.in_flight or work.is_doubtful)][:2]
    for work in works:
        work.is_doubtful = work.is_given_back = True
    host.works = [work for work in host.works if work not in works or work.in_flight or work.to_replay]
    doubtful = tuple(work.grant_id for work in works)
    request = api.AbortRequest(host.holder_id, host.epoch, (), doubtful)
    world.seen["writes in doubt"] += len(works)
    world.send(host, "abort", lambda service: service.store.abort(world.clock_s, request), bound=False)


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
    request = commit_as_read(api.CommitRequest(host.holder_id, host.epoch, items), host.dialect)
    bundles = [item.bundle for item in request.items]
    for work in works:
        work.is_given_back = True

    def handle(service: Service) -> None:
        step = service.store.commit(world.clock_s, request)
        if not world.is_served(host):
            return service.submit(step, lambda _: None)
        for bundle in set(bundles) - {0}:
            fates = [fate for fate, its in zip(step.reply.committed, bundles, strict=True) if its == bundle]
            must(len(set(fates)) == 1, "a bundle was accepted in part", fates, works)
            world.bundles.append([work for work, its in zip(works, bundles, strict=True) if its == bundle])
            world.seen[f"bundles {'accepted' if fates[0] else 'refused'}"] += len(fates) > 1
        for work, accepted in zip(works, step.reply.committed, strict=True):
            must(not accepted or world.clock_s < work.expires_s, "a commit was accepted after expiry", work)
            must(not accepted or work.grant_id not in world.committed, "a grant was committed twice", work)
            if accepted:
                world.committed.add(work.grant_id)
            _resolve(world, work)
            world.seen["commits accepted" if accepted else "commits refused"] += 1
        service.submit(step, lambda _: None)

    world.send(host, "commit", handle, bound=False)


def abort(world: World, host: Host) -> None:
    unstarted = [work for work in host.works if not work.is_started and not work.is_doubtful]
    settled = [work for work in host.works if work.is_failed and not (work.planned or work.in_flight)]
    works = [work for work in host.works if work.is_written or work in unstarted or work in settled][:2]
    host.works = [work for work in host.works if work not in works]
    for work in works:
        work.is_given_back = True
    request = api.AbortRequest(host.holder_id, host.epoch, tuple(work.grant_id for work in works))

    def handle(service: Service) -> None:
        service.store.abort(world.clock_s, request)
        for work in works:
            _resolve(world, work)

    world.send(host, "abort", handle, bound=False)


def match(world: World, host: Host) -> None:
    asked = api.MatchRequest(host.holder_id, "request", hosts.CHUNK_TOKENS, hosts.random_lookup(world.rng))
    request = match_as_read(asked, host.dialect)

    def look(service: Service) -> None:
        found = service.look_up([key for group in request.groups for key in group.keys])
        world.later(host, lambda service: decide(service, found))

    def decide(service: Service, found: dict[bytes, api.ChunkRecord]) -> None:
        shortened = service.store.counts["match_shortened_by_pins"]
        reply = service.store.match(world.clock_s, request, found)
        check_offer(world, host, request, reply, service)
        world.seen["chunks matched"] += len(reply.chunks)
        world.seen["several groups matched"] += len({chunk.group for chunk in reply.chunks}) > 1
        was_shortened = service.store.counts["match_shortened_by_pins"] > shortened
        world.seen["lower boundaries for the pins"] += was_shortened and reply.chunk_count > 0
        if reply.lease_id and world.is_served(host):
            world.leased[reply.lease_id] = Leased(host.holder_id, reply.chunks, world.clock_s + OPTIONS.lease_ttl_s)
            if host.is_attached and world.rng.random() > REPLY_LOST:
                host.leases[reply.lease_id] = reply.chunks

    world.send(host, "match", look)


def read(world: World, host: Host) -> None:
    for lease_id, chunks in host.leases.items():
        if lease_id in world.leased:
            for chunk in chunks:
                check_bytes(world, chunk)
                world.seen["chunks read"] += 1
                host.read = [*host.read[-4:], chunk]


def release(world: World, host: Host) -> None:
    lease_ids = tuple(host.leases)[:2]
    for lease_id in lease_ids:
        del host.leases[lease_id]

    def handle(service: Service) -> None:
        service.store.release(world.clock_s, api.ReleaseRequest(host.holder_id, lease_ids))
        for lease_id in lease_ids:
            world.leased.pop(lease_id, None)

    world.send(host, "release", handle, bound=False)


def drop(world: World, host: Host) -> None:
    """Of what it has read, now or before: others may have written it anew since."""
    chunk = world.rng.choice(host.read)
    request = api.DropRequest(host.holder_id, chunk.key, chunk.shards[0].extent, "its digest did not match")

    def look(service: Service) -> None:
        found = service.look_up([chunk.key]).get(chunk.key)
        world.later(host, lambda service: decide(service, found))

    def decide(service: Service, found: api.ChunkRecord | None) -> None:
        step = service.store.drop(world.clock_s, request, found)
        named = all(isinstance(effect, DeleteChunk) and effect.extent == request.extent for effect in step.effects)
        must(named, "a chunk was dropped that has been written anew", request, step)
        service.submit(step, lambda _: None)

    world.send(host, "drop", look)


def heartbeat(world: World, host: Host) -> None:
    lease_ids = tuple(host.leases)

    def handle(service: Service) -> None:
        request = api.HeartbeatRequest(host.holder_id, host.epoch, lease_ids)
        lost = service.store.heartbeat(world.clock_s, request).lost_lease_ids
        for lease_id in lease_ids:
            leased = world.leased.get(lease_id)
            must(leased is None or lease_id not in lost, "a live lease was lost", lease_id)
            if leased is not None:
                renewed_s = world.clock_s + OPTIONS.lease_ttl_s
                world.leased[lease_id] = Leased(leased.holder_id, leased.chunks, renewed_s)

    world.send(host, "heartbeat", handle)


def fall_silent(world: World, host: Host) -> None:
    if world.rng.random() < 0.5:
        host.silent_s = world.rng.choice((20.0, 70.0, 70.0, 70.0))
        host.silent_until_s = world.now_s + host.silent_s
        if world.rng.random() < 0.7:  # and what it has begun lies in the target when it wakes up
            write(world, host)
            for work in host.works:
                work.lands_from_s = max(work.lands_from_s, host.silent_until_s + 300.0)
        world.seen["silences"] += 1


def rise_again(world: World, host: Host) -> None:
    """A late attach of an incarnation that is gone."""

    def handle(service: Service) -> None:
        record = service.index.holders.get(host.holder_id)
        try:
            step = _attach(world, host, service)
        except StaleHolderError:
            world.seen["fenced refused"] += record is not None and record.fenced
            return
        if step is not None:
            _promise(world, host, service)
            service.submit(step, lambda _: None)

    world.send(host, "attach", handle)


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
        drop: 4 * bool(host.read),
        heartbeat: 8,
        fall_silent: 1 + 4 * can_write,
        detach: 1,
        attach: 1,
    }


def act(world: World, host: Host) -> None:
    if not host.is_alive:
        if world.rng.random() < 0.2:
            rise_again(world, host)
    elif host.is_leaving or world.now_s < host.silent_until_s:
        return
    elif host.silent_s:
        is_in_target = host.access is api.Access.NVMEOF and bool(host.in_flight)
        world.seen["woke after a minute with a write in the target"] += host.silent_s > 60.0 and is_in_target
        host.silent_s = 0.0
    elif host.is_attached:
        choices = _choices(host)
        world.rng.choices(list(choices), list(choices.values()))[0](world, host)
    elif host.asked < 2 or world.rng.random() < 0.05:
        attach(world, host)
