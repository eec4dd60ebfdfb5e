"""Drives are added to and taken from a pool of several while it serves, and hosts of its target follow.

A removal goes as :class:`~meshfusion.dpu.drive_admin.ServedDriveAdmin` has it: nothing of the drive is offered, nobody
uses it, hosts lose it, the target confirms that, and only then has it left. What leaves is another tenant's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshfusion.dpu.api import types as api
from meshfusion.jbof.pool_addresses import MAX_DRIVE_NUMBER, drive_of_segment, namespace_of
from meshfusion.jbof.segments import SegmentGeometry
from tests.sim.host import Host, Work
from tests.sim.medium import must
from tests.sim.reaching import host_nqn
from tests.sim.service import Service

if TYPE_CHECKING:
    from tests.sim.world import World

MOST_DRIVES: Final = 3
_GIVEN_UP_AFTER_S: Final = 60.0


@dataclass
class Removal:
    """In one life of the service. ``ends_s``: then it is given up, and the drive stays."""

    service: Service
    drive: SegmentGeometry
    ends_s: float
    is_withdrawn: bool = False


# ---- taking one out --------------------------------------------------------------------------------------------------


def begin_removal(world: World) -> None:
    service = world.awake
    if service is None or world.removal is not None or len(service.drives) < 2:
        return
    drive = world.rng.choice(list(service.drives))
    if any(service.shelf.is_offered(other.drive_number) for other in service.drives if other is not drive):
        world.removal = Removal(service, drive, world.now_s + _GIVEN_UP_AFTER_S)
        service.leaving.add(drive.drive_number)
        service.use(drive)
        world.seen["removals begun"] += 1


def go_on_removing(world: World) -> None:
    removal, service = world.removal, world.awake
    if removal is None or service is None:
        return
    number = removal.drive.drive_number
    if world.now_s >= removal.ends_s:
        give_up_removal(world)
    elif not removal.is_withdrawn:
        if not service.shelf.is_pinned(number) and service.store.holders.all_current():
            removal.is_withdrawn = True
            service.withdrawn.add(number)
            service.use(removal.drive)
    elif service.showing.is_out(number) or not world.rules.waits_for_target:
        _remove(world, removal)


def give_up_removal(world: World) -> None:
    """The drive stays, as if nothing had been."""
    removal, world.removal = world.removal, None
    if removal is not None:
        number = removal.drive.drive_number
        removal.service.leaving.discard(number)
        removal.service.withdrawn.discard(number)
        removal.service.use(removal.drive)
        world.seen["removals given up"] += 1


def _remove(world: World, removal: Removal) -> None:
    """From here on it is somebody else's."""
    number = removal.drive.drive_number
    nobody_reaches(world, number)
    for owner, work in world.unresolved.values():
        must(number not in work.drives, "a drive left under a writer", number, owner, work)
    world.drives = tuple(drive for drive in world.drives if drive is not removal.drive)
    world.left.add(number)
    world.absent.discard(number)
    world.index.forget_drive(number)
    removal.service.remove(removal.drive)
    world.removal = None
    world.seen["drives removed"] += 1


def nobody_reaches(world: World, number: int) -> None:
    """Neither through the target as it is, nor with what it has accepted and not finished (rule 3)."""
    must(not world.target.shows(namespace_of(number)), "a drive is called out while hosts reach it", number)
    for host in world.hosts:
        if host.access is api.Access.NVMEOF and world.is_served(host):
            writes = [token for work in host.in_flight for _, token in work.in_flight]
            hit = any(drive_of_segment(token.segment) == number for token in writes)
            must(not hit, "a drive is called out with writes in the target", number, host)


def taken_out(world: World, service: Service, number: int) -> None:
    """The keeper has it confirmed."""
    nobody_reaches(world, number)
    world.seen["drives taken out of the target"] += 1
    if service.showing.taken_out(number) and service.shelf.is_offered(number):
        service.reach.has_come(number)


def what_left_stays_away(world: World) -> None:
    for number in world.left:
        must(not world.target.shows(namespace_of(number)), "what left the pool is shown again", number)


# ---- adding one ------------------------------------------------------------------------------------------------------


def add_drive(world: World) -> None:
    """With the next number: none is used twice."""
    service = world.awake
    number = max((*world.left, *(drive.drive_number for drive in world.drives))) + 1
    if service is None or len(world.drives) >= MOST_DRIVES or number > MAX_DRIVE_NUMBER:
        return
    like = world.drives[0]
    drive = SegmentGeometry(like.lba_bytes, like.data_start_lba, like.segment_lba_count, like.segment_count, number)
    world.drives = (*world.drives, drive)
    service.add(drive, world.clock_s)
    world.seen["drives added"] += 1


# ---- hosts -----------------------------------------------------------------------------------------------------------


def named_to(host: Host, service: Service) -> frozenset[int]:
    """The drives that it is told of when it attaches."""
    offered = {d.drive_number for d in service.drives if service.shelf.is_offered(d.drive_number)}
    is_local = host.access is api.Access.LOCAL
    return frozenset(number for number in offered if is_local or service.showing.is_shown(number))


def told(world: World, host: Host, service: Service, version: int, numbers: frozenset[int]) -> None:
    service.reach.told(host.holder_id, version, numbers)
    host.told_version, host.told = version, numbers
    host.named.update({number: world.devices[number] for number in numbers})


def ask_for_drives(world: World, host: Host) -> None:
    """They are reached in another way: how, attaching again as the same incarnation tells."""
    host.is_asking = True

    def handle(service: Service) -> None:
        host.is_asking = False
        known = service.store.holders.get(host.holder_id)
        if known is None or not service.store.holders.is_served(known):
            return
        version, numbers = service.reach.version, named_to(host, service)
        if host.access is api.Access.LOCAL:
            told(world, host, service, version, numbers)
        elif service is world.service and world.exports is not None:
            world.exports.admit(host.holder_id, lambda can: answered(service, version, numbers, can), numbers)

    def answered(service: Service, version: int, numbers: frozenset[int], can_connect: bool) -> None:
        if can_connect and host.is_alive and host.is_attached:
            told(world, host, service, version, numbers)
            world.seen["hosts told of other drives"] += 1

    world.send(host, "drives", handle)


def open_drives(world: World, host: Host) -> None:
    """Over the path that is open: what the target shows, and is the drive, is proven."""
    nqn = host_nqn(world, host)
    found = {n for n in host.told if n not in world.absent | world.left and world.target.reaches(nqn, namespace_of(n))}
    host.proven = {number: world.devices[number] for number in found}
    host.reached = api.Reached(host.told_version, tuple(namespace_of(number) for number in sorted(found)))
    world.seen["drives proven by a host"] += len(found)


def check_reach(world: World, host: Host, numbers: frozenset[int], what: str) -> None:
    """A host of a target has proven each of these as it is now; or it has said nothing yet, and was told of it so."""
    if host.access is not api.Access.NVMEOF or not world.is_served(host):
        return
    for number in numbers:
        known = {host.proven.get(number), None if host.has_said else host.named.get(number)}
        must(world.devices[number] in known, f"{what} a drive that the host does not reach", number, host)


def drives_of(works: list[Work]) -> frozenset[int]:
    return frozenset(number for work in works for number in work.drives)
