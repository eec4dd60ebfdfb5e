"""What happens to the drives of a pool of several while it serves, and that its service looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshfusion.jbof.pool_addresses import drive_of_segment

if TYPE_CHECKING:
    from tests.sim.world import World


def lose_drive(world: World) -> None:
    """While it is used. What it had not made durable may be gone; a write that was under way comes back as failed,
    or, of a host of a target, nobody knows."""
    service = world.service
    there = [] if service is None else [drive.drive_number for drive in service.drives]
    there = [number for number in there if number not in world.absent]
    if len(there) < 2:
        return
    number = world.rng.choice(there)
    world.absent.add(number)
    for work in (work for host in world.hosts for work in host.works if number in work.drives):
        for lba, token in [write for write in work.in_flight if drive_of_segment(write[1].segment) == number]:
            if world.rng.random() < 0.5:
                world.land(work, lba, token)
            work.in_flight.remove((lba, token))
            work.is_failed = True
    world.medium.pull(number, world.rng)
    world.seen["drives lost"] += 1


def see_drives(world: World) -> None:
    """The service looks: what is gone is not used, and what was gone is, if it is there again."""
    service = world.awake
    if service is None:
        return
    for drive in service.drives:
        number = drive.drive_number
        if number in world.absent and number not in service.gone:
            service.gone.add(number)
        elif number in world.absent and world.rng.random() < 0.3:
            world.absent.discard(number)
            service.gone.discard(number)
            world.devices[number] += 1
            world.seen["drives back"] += 1
        service.use(drive)


def change_use(world: World) -> None:
    """A drive turns read-only, slow or failing, or takes writes again."""
    if world.awake is not None and world.has_several_drives:
        drive = world.rng.choice(list(world.awake.drives))
        world.awake.drives[drive] = not world.awake.drives[drive]
        world.awake.use(drive)
        world.seen["drives used otherwise"] += 1


def empty_some(world: World) -> None:
    if world.awake is not None and world.has_several_drives:
        world.awake.forget_some(world.rng.choice(list(world.awake.drives)).drive_number)
