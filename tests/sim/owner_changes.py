"""The other machine takes the drive: what becomes of the service that is replaced, and of its hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.host import HOST_COUNT
from tests.sim.medium import must
from tests.sim.reaching import new_target, settle_some

if TYPE_CHECKING:
    from tests.sim.world import World


def change_owner(world: World) -> None:
    """The other machine takes the drive. Its service may begin only when nobody of its own is left who writes; the
    one that is replaced may be alive."""
    if not world.changes_owners:
        return
    machine = world.owners.machine
    for host in [h for h in world.hosts if h.machine != machine]:  # that machine starts anew
        world.kill(host)
    if world.service is not None:
        world.rival = (world.life, machine, world.service)
        world.post.lose_connections()
        attached = [host for host in world.hosts if host.is_attached]
        world.forget_service()
        for host in attached:  # they do not know
            host.is_attached = True
    world.owners.move()
    world.target = new_target(world)
    world.start_service()
    world.hosts += [world.new_host() for _ in range(HOST_COUNT)]
    world.seen["changes of the owner"] += 1


def stir_rival(world: World) -> None:
    """Who was replaced does what it has begun, sees that the drive is not its own, and ends."""
    if world.rival is None:
        return
    _, machine, service = world.rival
    if not service.is_busy and world.rng.random() < 0.3:
        world.rival = None
        return
    before = dict(service.index.segments)
    service.sync(world.clock_s, world.rng, failing=False)
    world.seen["openings of who was replaced, refused"] += before != service.index.segments
    must(machine != world.owners.machine and not world.owners.may_write(machine), "two owners may write", machine)


def preempted(world: World, machine: str) -> None:
    """Nothing that it began at the drive is under way any more: some is done, and some is not."""
    if not world.rules.aborts_when_preempted:
        return
    for host in [host for host in world.hosts if host.machine == machine]:
        for work in host.in_flight:
            settle_some(world, work)
            work.is_failed = True
        world.resolve_all_of(host.holder_id)
    world.unresolved.clear()  # of hosts that are dead and buried too
