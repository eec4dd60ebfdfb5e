"""How hosts save: each action sends a message; what the service does with it, and what the account makes of it."""

from __future__ import annotations

from collections.abc import Mapping

from meshfusion.dpu.api import types as api
from meshfusion.jbof.pool_addresses import namespace_of
from tests.sim import host as hosts
from tests.sim.dialects import Dialect, commit_as_read, reserve_as_read
from tests.sim.drive_changes import check_reach, drives_of
from tests.sim.host import Host, Work
from tests.sim.medium import must
from tests.sim.reaching import connect, host_nqn
from tests.sim.service import OPTIONS, Service
from tests.sim.world import World

REPLY_LOST = 0.03


def reserve(world: World, host: Host) -> None:
    items = hosts.random_items(world.rng)
    request = reserve_as_read(api.ReserveRequest(host.holder_id, host.epoch, items), host.dialect)

    def look(service: Service) -> None:
        stored = service.look_up([item.key for item in items])
        world.later(host, lambda service: decide(service, stored))

    def decide(service: Service, stored: Mapping[bytes, api.ChunkRecord]) -> None:
        must(host.dialect is not Dialect.OLD, "an engine of another version was served", host)
        step = service.store.reserve(world.clock_s, request, stored, service.reach.places_of(host.holder_id))
        expires_s = world.clock_s + OPTIONS.grant_ttl_s
        works = [
            hosts.make_work(host, item, result, expires_s)
            for item, result in zip(items, step.reply.results, strict=True)
            if result.outcome is api.ReserveOutcome.GRANTED
        ]
        check_reach(world, host, drives_of(works), "granted on")
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
    for _, other in world.unresolved.values() if not world.has_several_drives else ():
        is_over = other.epoch != work.epoch or other.expires_s <= world.clock_s or other.is_given_back
        must(is_over or other.item.key != work.item.key, "two live grants for one chunk", other, work)


def write(world: World, host: Host) -> None:
    if works := [work for work in host.works if work.planned]:
        work = world.rng.choice(works)
        if host.access is api.Access.NVMEOF and not _is_connected(world, host):
            work.planned.clear()  # the connection is gone, and with it what became of the write
            work.is_doubtful = True
        elif not _is_taken(world, host, work):
            work.planned.clear()
            work.is_failed = True
        else:
            is_slow = world.rng.random() < 0.1
            host.submit_writes(work, world.now_s + (world.rng.choice((5.0, 50.0, 500.0)) if is_slow else 0.0))


def _is_connected(world: World, host: Host) -> bool:
    if not world.is_served(host):
        return True  # to a target that has lost the drive
    connect(world, host)
    return world.target.can_write(host_nqn(world, host))


def _is_taken(world: World, host: Host, work: Work) -> bool:
    """By the drives, and by the target for them."""
    if work.drives & world.absent or not world.owners.may_write(host.machine):
        return False
    if host.access is api.Access.LOCAL or not world.is_served(host):
        return True
    nqn = host_nqn(world, host)
    return all(world.target.reaches(nqn, namespace_of(number)) for number in work.drives)


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


def _resolve(world: World, work: Work) -> None:
    if world.unresolved.get(work.grant_id, ("", None))[1] is work:
        world.resolve(work.grant_id)
