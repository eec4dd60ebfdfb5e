"""Run the simulation: ``python -m tests.sim.run --seed 7 --steps 2000``, or many seeds with ``--worlds``."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

from meshfusion.dpu.api import types as api
from meshfusion.jbof.policy.write_budget import DAY_S
from tests.sim import actions, drive_changes, drive_faults
from tests.sim import host as hosts
from tests.sim.arguments import at_least
from tests.sim.attending import heartbeat
from tests.sim.checks import check_counts
from tests.sim.dialects import Dialect
from tests.sim.medium import Violation, must
from tests.sim.owner_changes import change_owner, stir_rival
from tests.sim.progress import calm_down, check_progress, sync
from tests.sim.reaching import connect_one, restart_target
from tests.sim.service import MAX_EXTENT_LBA_COUNT, OPTIONS, Rules
from tests.sim.world import World

STEPS = 2000
PROGRESS_EVERY = 3  # of the worlds it is seen whether anybody starves


class SimulationFailed(AssertionError):
    """Names the seed that brings the failure back."""


def _lose_power(world: World) -> None:
    world.crash_service()
    for host in list(world.hosts):
        world.kill(host)
    world.medium.lose_power(world.rng)
    world.seen["power losses"] += 1


def _fail_for_a_while(world: World) -> None:
    world.failing_until_s = world.now_s + world.rng.choice((0.5, 5.0, 30.0))


def _let_time_pass(world: World) -> None:
    """Engines with nothing to do are heard of all the same; most of them, most times."""
    for _ in range(world.rng.choice((1, 4, 14))):
        for host in list(world.hosts):
            if host.is_attached and world.now_s >= host.silent_until_s and world.rng.random() < 0.9:
                heartbeat(world, host)
        for _ in world.hosts:
            world.deliver()
        world.pass_time(5.0)


def _give_up_one(world: World) -> None:
    if world.service is not None:
        world.service.give_up_one(world.rng)


EVENTS: dict[Callable[[World], None], float] = {
    lambda world: world.deliver(): 100,
    lambda world: actions.act(world, world.rng.choice(world.hosts)): 50,
    lambda world: world.land_write(): 36,
    lambda world: world.sync(): 24,
    lambda world: world.pass_time(world.rng.choice((0.01, 0.1, 1.0))): 8,
    _let_time_pass: 0.8,
    lambda world: world.probe(): 2,
    lambda world: world.export(): 6,
    connect_one: 8,
    lambda world: world.bury(): 4,
    lambda world: world.tidy(): 8,
}
FAULTS: dict[Callable[[World], None], float] = {
    _give_up_one: 1.0,
    lambda world: world.crash_service(): 0.15,
    lambda world: world.kill(world.rng.choice(world.hosts)): 0.3,
    _lose_power: 0.05,
    restart_target: 0.4,
    lambda world: world.suspend_service(): 0.05,
    lambda world: world.leap(): 0.05,
    change_owner: 0.2,
    stir_rival: 1,
    _fail_for_a_while: 0.1,
}
WATCH: dict[Callable[[World], None], float] = {drive_faults.see_drives: 8, drive_changes.go_on_removing: 4}
DRIVE_FAULTS: dict[Callable[[World], None], float] = {
    drive_faults.lose_drive: 0.4,
    drive_faults.change_use: 0.2,
    drive_faults.empty_some: 0.1,
    drive_changes.begin_removal: 0.3,
    drive_changes.add_drive: 0.5,
}
CALM, ROUGH = EVENTS, EVENTS | FAULTS
CALM_WITH_DRIVES, ROUGH_WITH_DRIVES = CALM | WATCH, ROUGH | WATCH | DRIVE_FAULTS


def step(world: World) -> None:
    if world.service is None and world.rng.random() < 0.2:
        world.start_service()
    if world.has_several_drives:
        events = CALM_WITH_DRIVES if world.is_calm else ROUGH_WITH_DRIVES
    else:
        events = CALM if world.is_calm else ROUGH
    world.rng.choices(list(events), list(events.values()))[0](world)
    check_counts(world)


def wind_down(world: World) -> None:
    """Everybody leaves, time passes: nothing may stay pinned, and the whole pool must be writable again."""
    service = calm_down(world)
    for host in world.hosts:
        host.die()
    while any(host.in_flight for host in world.hosts):
        world.now_s += 100.0
        world.land_write()
    for _ in range(3):
        sync(world)
        world.pass_time(OPTIONS.lease_ttl_s + OPTIONS.grant_ttl_s)
        world.probe()
        world.export()
    assert world.tidying is not None
    while not world.tidying.is_idle:
        world.tidy()
        world.sync()
    if world.has_budgets:
        world.pass_time(DAY_S)
    store = service.store
    must(len(store.leases) == len(store.grants) == store.leases.pinned_bytes == 0, "something outlived its holder")
    must(not store.holder_statuses(world.clock_s), "a holder stayed", store.holder_statuses(world.clock_s))
    must(not world.unresolved, "the account disagrees", world.unresolved)
    _fill(world)
    reason = store.saves_stopped_reason(world.clock_s)
    spent = world.has_budgets and "drive_writes_per_day" in reason  # the fill was all that may be written at once
    must(reason == "" or spent, "saves stay stopped", reason)
    check_counts(world)


def _fill(world: World) -> None:
    host = world.new_host()
    host.dialect = Dialect.OURS
    service = world.service
    assert service is not None
    outcomes: list[api.ReserveOutcome] = []
    service.submit(service.store.attach(world.clock_s, hosts.attach_request(host)), lambda _: None)
    segment_count = sum(drive.segment_count for drive in world.drives)
    for i in range(segment_count + 1):
        sync(world)
        item = hosts.item_of_size(b"fill" + bytes([i]) * 28, MAX_EXTENT_LBA_COUNT)
        request = api.ReserveRequest(host.holder_id, service.store.epoch, (item,))
        reserved = service.store.reserve(world.clock_s, request, {})
        outcomes.append(reserved.reply.results[0].outcome)
        service.submit(reserved, lambda _: None)
    full = [api.ReserveOutcome.GRANTED] * segment_count + [api.ReserveOutcome.NO_SPACE]
    must(outcomes == full, "the pool lost capacity", outcomes)


def run(seed: int, steps: int = STEPS, rules: Rules | None = None, *, drives: int = 1) -> Counter[str]:
    """One world from ``seed``, with 1 or 3 drives. Returns what happened how often; raises
    :class:`SimulationFailed`."""
    world = World(seed, rules, drives)
    done = 0
    try:
        while done < steps:
            step(world)
            done += 1
        if seed % PROGRESS_EVERY == 0:
            check_progress(world)
        wind_down(world)
    except AssertionError as error:  # a rule of ours, or an assertion of the code itself
        raise SimulationFailed(
            f"seed {seed}, step {done}: {error}\n"
            f"again: python -m tests.sim.run --seed {seed} --steps {steps} --drives {drives}"
        ) from error
    return world.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the first world")
    parser.add_argument("--steps", type=at_least(1), default=STEPS, help="of each world")
    parser.add_argument("--worlds", type=at_least(1), default=1, help="how many seeds, from --seed on")
    parser.add_argument("--drives", type=int, choices=(1, 3), default=1, help="of the pool")
    options = parser.parse_args()
    began_s = time.monotonic()
    seen: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.worlds):
        seen += run(seed, options.steps, drives=options.drives)
    for name, count in sorted(seen.items()):
        print(f"{count:>10}  {name}")
    steps, took_s = options.worlds * options.steps, time.monotonic() - began_s
    print(f"{steps} steps in {took_s:.1f} s, {steps / took_s:.0f} a second")


if __name__ == "__main__":
    main()

__all__ = ["STEPS", "SimulationFailed", "Violation", "run"]
