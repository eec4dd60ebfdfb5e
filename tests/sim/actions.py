"""What hosts do: how they load, and what they choose to do next. Each action sends a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.effects import DeleteChunk
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.sim import host as hosts
from tests.sim.attending import attach, detach, fall_silent, heartbeat, rise_again
from tests.sim.checks import check_bytes, check_offer
from tests.sim.dialects import match_as_read
from tests.sim.drive_changes import check_reach, open_drives
from tests.sim.host import Host
from tests.sim.medium import must
from tests.sim.saving import REPLY_LOST, abort, commit, doubt, reserve, write
from tests.sim.service import OPTIONS, Service
from tests.sim.world import Leased, World


def match(world: World, host: Host) -> None:
    asked = api.MatchRequest(host.holder_id, "request", hosts.CHUNK_TOKENS, hosts.random_lookup(world.rng))
    request = match_as_read(asked, host.dialect)

    def look(service: Service) -> None:
        found = service.look_up([key for group in request.groups for key in group.keys])
        world.later(host, lambda service: decide(service, found))

    def decide(service: Service, found: Mapping[bytes, api.ChunkRecord]) -> None:
        shortened = service.store.counts["match_shortened_by_pins"]
        shown = frozenset(filter(service.shelf.is_offered, service.shelf.numbers))
        reply = service.store.match(world.clock_s, request, service.reach.known_to(host.holder_id, found, shown))
        offered = {drive_of_segment(shard.extent.segment) for chunk in reply.chunks for shard in chunk.shards}
        check_reach(world, host, frozenset(offered), "offered on")
        check_offer(world, host, request, reply, service)
        world.seen["chunks matched"] += len(reply.chunks)
        world.seen["several groups matched"] += len({chunk.group for chunk in reply.chunks}) > 1
        was_shortened = service.store.counts["match_shortened_by_pins"] > shortened
        world.seen["lower boundaries for the pins"] += was_shortened and reply.chunk_count > 0
        if reply.lease_id and world.is_served(host):
            chunks = tuple(reply.chunks)
            world.leased[reply.lease_id] = Leased(host.holder_id, chunks, world.clock_s + OPTIONS.lease_ttl_s)
            if host.is_attached and world.rng.random() > REPLY_LOST:
                host.leases[reply.lease_id] = chunks

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


Action = Callable[[World, Host], None]


def _choices(host: Host) -> dict[Action, int]:
    """What an attached host may do now, and how readily."""
    can_write = any(work.planned for work in host.works)
    written = sum(work.is_written for work in host.works)
    return {
        reserve: 20 if len(host.works) < 5 else 1,
        write: 40 * can_write,
        commit: 40 if written > 2 else 10 * written,  # several at once make bundles
        abort: 2 * bool(host.works),
        doubt: (host.access is api.Access.NVMEOF and bool(host.in_flight)) + any(w.is_doubtful for w in host.works),
        match: 20,
        read: 10 * bool(host.leases),
        release: 6 * bool(host.leases),
        drop: 4 * bool(host.read),
        heartbeat: 8,
        fall_silent: 1 + 4 * can_write,
        detach: 1,
        attach: 1,
        open_drives: 6 * (host.access is api.Access.NVMEOF and _is_behind(host)),
    }


def _is_behind(host: Host) -> bool:
    """Was it told of drives that it has not proven so? Of the only one there is nothing to be said."""
    has_several = len(host.told) > 1 or host.told_version > 0
    return has_several and (host.reached is None or host.reached.drives_version != host.told_version)


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
