"""How hosts come and go, fall silent, and rise again."""

from __future__ import annotations

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.steps import Step
from meshfusion.jbof.errors import StaleHolderError, UnsupportedError
from tests.sim import host as hosts
from tests.sim.dialects import Dialect
from tests.sim.drive_changes import ask_for_drives, named_to, told
from tests.sim.host import Host
from tests.sim.medium import must
from tests.sim.reaching import connect
from tests.sim.saving import write
from tests.sim.service import OPTIONS, Service
from tests.sim.world import Leased, World


def attach(world: World, host: Host) -> None:
    if not host.is_attached:  # in a new epoch: only with nothing outstanding may the same incarnation come back
        is_other = host.access is api.Access.NVMEOF or world.rng.random() < 0.5
        if not host.is_drained or (host.epoch and is_other):
            world.retire(host)
            return
        host.works.clear()
    host.asked += 1

    def handle(service: Service) -> None:
        version, numbers = service.reach.version, named_to(host, service)
        step = _attach(world, host, service)
        if step is None:
            return
        _promise(world, host, service)
        service.submit(step, lambda _: listed(service, version, numbers), on_failure=lambda: None)

    def listed(service: Service, version: int, numbers: frozenset[int]) -> None:
        world.locks_taken.discard(host.holder_id)
        if host.access is api.Access.LOCAL:
            admitted(service, version, numbers)
        elif service is world.service and world.exports is not None:
            world.exports.admit(
                host.holder_id, lambda can_connect: answered(service, can_connect, version, numbers), numbers
            )

    def answered(service: Service, can_connect: bool, version: int, numbers: frozenset[int]) -> None:
        if not can_connect:
            service.store.holders.condemn(host.holder_id)
            world.seen["not let in by the target"] += 1
            if host.is_alive and not host.is_leaving:
                world.retire(host)
            return
        service.store.holders.answered(world.clock_s, host.holder_id)
        if host.is_alive:
            connect(world, host)
        admitted(service, version, numbers)

    def admitted(service: Service, version: int, numbers: frozenset[int]) -> None:
        told(world, host, service, version, numbers)
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


def heartbeat(world: World, host: Host) -> None:
    lease_ids = tuple(host.leases)

    reached = host.reached

    def handle(service: Service) -> None:
        request = api.HeartbeatRequest(host.holder_id, host.epoch, lease_ids, reached)
        lost = service.store.heartbeat(world.clock_s, request).lost_lease_ids
        if reached is not None:
            service.reach.says(host.holder_id, reached)
            host.has_said = True
        if service.reach.version != host.told_version and host.asks_for_drives and not host.is_asking:
            ask_for_drives(world, host)
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
