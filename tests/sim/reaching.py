"""Hosts of a target: they connect, are cut off, and send again what was not answered."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from meshfusion.dpu.api import types as api
from meshfusion.jbof.pool_addresses import drive_of_segment, namespace_of
from tests.sim.exports import plan_of
from tests.sim.host import Host, Work
from tests.sim.medium import Token, must
from tests.sim.target import TargetModel

if TYPE_CHECKING:
    from tests.sim.world import World


def new_target(world: World) -> TargetModel:
    machine = world.owners.machine
    rng = random.Random(world.rng.random())
    return TargetModel(
        world.target_kind,
        rng,
        lambda nqn: any(host.in_flight for host in reaching(world, nqn, machine)),
        lambda nqn, nsid: any(
            _namespace_of(token) == nsid
            for host in reaching(world, nqn, machine)
            for work in host.in_flight
            for _, token in work.in_flight
        ),
        lambda nqn: connection_lost(world, nqn, machine),
    )


def restart_target(world: World) -> None:
    """Of the writes it was at, some are done and some are not. Who sent them may send them again when it is let in;
    nobody is until the target is told anew."""
    for host in world.hosts:
        if host.access is api.Access.NVMEOF and host.machine == world.owners.machine:
            break_connection(world, host)
            for work in host.in_flight:
                settle_some(world, work)
    world.target.restart()
    world.target_down_until_s = world.now_s + world.rng.choice((0.0, 0.0, 0.0, 5.0, 30.0))
    world.seen["target restarts"] += 1


def connect_one(world: World) -> None:
    """Initiators connect again and again, also of an engine that is silent."""
    others = [h for h in world.hosts if h.is_alive and h.access is api.Access.NVMEOF and h.epoch]
    if not others:
        return
    host = world.rng.choice(others)
    if world.rng.random() < 0.1:
        world.target.begin_connect(host_nqn(world, host))
    else:
        connect(world, host)


def connect(world: World, host: Host) -> None:
    """It sends again what was not answered; if it is let in."""
    if host.machine == world.owners.machine and world.target.connect(host_nqn(world, host)):
        record = world.index.holders.get(host.holder_id)
        must(record is None or not record.fenced, "the target let a fenced host in", host)
        for work in host.works:
            if work.to_replay:
                nqn, again = host_nqn(world, host), work.to_replay
                taken = [write for write in again if world.target.reaches(nqn, _namespace_of(write[1]))]
                work.in_flight, work.to_replay = work.in_flight + taken, []
                world.seen["writes sent again to a target"] += 1


def _namespace_of(token: Token) -> int:
    return namespace_of(drive_of_segment(token.segment))


def host_nqn(world: World, host: Host) -> str:
    return plan_of(world.target_kind).host_nqn(host.holder_id)


def reaching(world: World, nqn: str, machine: str) -> list[Host]:
    holder_id = nqn.rpartition(":")[2]
    return [host for host in world.hosts if host.holder_id == holder_id and host.machine == machine]


def connection_lost(world: World, nqn: str, machine: str) -> None:
    for host in reaching(world, nqn, machine):
        break_connection(world, host)


def break_connection(world: World, host: Host) -> None:
    """What was under way is not answered: it may be done, or be done yet, and its initiator keeps it to send it
    again."""
    for work in host.in_flight:
        work.is_doubtful = True
        if host.is_alive:
            work.to_replay = list(work.in_flight)


def settle_some(world: World, work: Work) -> None:
    for lba, token in work.in_flight:
        if world.rng.random() < 0.5:
            world.land(work, lba, token)
    work.in_flight.clear()
