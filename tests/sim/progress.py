"""Nobody starves: once nothing is wrong any more, who asks is served within a bounded time, beside one host that stays
silent for good and may still write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshfusion.dpu.api import types as api
from meshfusion.jbof.policy.write_budget import DAY_S
from tests.sim import host as hosts
from tests.sim.actions import release
from tests.sim.attending import heartbeat
from tests.sim.checks import check_counts
from tests.sim.dialects import Dialect
from tests.sim.drive_changes import give_up_removal
from tests.sim.host import Host, Work
from tests.sim.medium import must
from tests.sim.saving import abort, commit, doubt
from tests.sim.service import OPTIONS, Service

if TYPE_CHECKING:
    from tests.sim.world import World

ROUND_S = 10.0
# Until what hosts were granted, or never heard of, is over: grants expire, the silent are condemned and cut off, saves
# are tried again after a failure. Then it is asked so often before it counts as refused.
ROUNDS_TO_RECOVER = 12
ROUNDS_TO_SERVE = 3
assert OPTIONS.holder_silence_s > ROUND_S
assert OPTIONS.grant_ttl_s + OPTIONS.lease_ttl_s < ROUNDS_TO_RECOVER * ROUND_S


def check_progress(world: World) -> None:
    """From a world in any state."""
    service = calm_down(world)
    if world.has_budgets:
        world.pass_time(DAY_S)
    silent = _newcomer(world, service)
    held = _reserve(world, service, silent, b"held by who is silent")
    for _ in range(ROUNDS_TO_RECOVER):
        _go_round(world, service)
    if held is not None:
        must(service.store.quarantined_segment_count() > 0, "what a silent host may write is not quarantined", silent)
    asking = _newcomer(world, service)
    for _ in range(ROUNDS_TO_SERVE):
        work = _reserve(world, service, asking, b"asked for")
        if work is not None:
            break
        _go_round(world, service)
    else:
        reason = service.store.saves_stopped_reason(world.clock_s)
        must(False, "who keeps asking is never served", service.store.segments.counts(), reason)
    assert work is not None
    _save(world, service, asking, work)
    found = _look_up(world, service, asking, work)  # with another save under way
    must(found.chunk_count == 1, "what was saved is not found", work)
    world.seen["served beside a silent host"] += held is not None
    silent.die()
    asking.die()


def calm_down(world: World) -> Service:
    """From here on all works, and who was slow or silent is not."""
    world.failing_until_s = world.suspended_until_s = world.target_down_until_s = 0.0
    world.target.is_flawless = True
    world.post.clear()
    world.rival = None
    give_up_removal(world)
    is_whole = world.service is not None and world.service.drives == dict.fromkeys(world.drives, True)
    if world.service is None or world.absent or world.service.gone or not is_whole:
        world.crash_service()
        world.start_service(is_whole=True)
    service = world.service
    assert service is not None
    service.whims.refusal_rate = 0.0
    for host in list(world.hosts):
        host.silent_until_s = host.silent_s = 0.0
        if not host.is_attached or not world.is_served(host):
            world.kill(host)
        for work in host.works:
            work.lands_from_s = 0.0
    return service


def _go_round(world: World, service: Service) -> None:
    world.pass_time(ROUND_S)
    while any(host.in_flight for host in world.hosts):
        world.land_write()
    for host in [host for host in world.hosts if host.is_attached and host.is_alive]:
        _tend(world, service, host)
    while not world.post.is_empty:
        world.now_s += 1.0  # whatever is late arrives
        world.deliver()
    world.probe()
    world.export()
    world.bury()
    sync(world)
    check_counts(world)


def sync(world: World) -> None:
    while world.service is not None and world.service.is_busy:
        world.sync()


def _tend(world: World, service: Service, host: Host) -> None:
    """A host with nothing wrong: it is heard of, ends what it began, and begins anew when it has lost track."""
    # As the connector does (``save_pipeline.py``) when a write is in doubt: only the end of this incarnation frees it.
    if service.store.grants.count_of(host.holder_id) > sum(not work.is_given_back for work in host.works):
        world.retire(host)
        return
    heartbeat(world, host)
    release(world, host)
    for work in host.works:
        if work.planned:
            work.is_doubtful |= work.is_started
            work.is_failed |= not work.is_started
            work.planned.clear()
    commit(world, host)
    doubt(world, host)
    abort(world, host)


def _newcomer(world: World, service: Service) -> Host:
    host = world.new_host()
    host.access, host.dialect, host.lock_held = api.Access.LOCAL, Dialect.OURS, True
    world.hosts.append(host)
    service.submit(service.store.attach(world.clock_s, hosts.attach_request(host)), lambda _: None)
    sync(world)
    host.epoch = service.store.epoch
    return host


def _reserve(world: World, service: Service, host: Host, name: bytes) -> Work | None:
    """None: there is no place now."""
    item = hosts.item_of_size(name.ljust(api.KEY_BYTES), hosts.SMALLEST_LBA_COUNT)
    works: list[Work] = []

    def granted(reply: api.ReserveReply) -> None:
        (result,) = reply.results
        if result.outcome is api.ReserveOutcome.GRANTED:
            work = hosts.make_work(host, item, result, world.clock_s + OPTIONS.grant_ttl_s)
            world.unresolved[work.grant_id] = (host.holder_id, work)
            works.append(work)

    request = api.ReserveRequest(host.holder_id, host.epoch, (item,))
    service.submit(service.store.reserve(world.clock_s, request, {}), granted)
    sync(world)
    return works[0] if works else None


def _save(world: World, service: Service, host: Host, work: Work) -> None:
    host.submit_writes(work, 0.0)
    for lba, token in work.in_flight:
        world.land(work, lba, token)
    work.in_flight.clear()
    world.medium.flush()
    request = api.CommitRequest(host.holder_id, host.epoch, (hosts.commit_item(work, 0),))
    replies: list[api.CommitReply] = []
    service.submit(service.store.commit(world.clock_s, request), replies.append)
    world.resolve(work.grant_id)
    sync(world)
    must(replies == [api.CommitReply((True,))], "what was written in time is not committed", work, replies)


def _look_up(world: World, service: Service, host: Host, work: Work) -> api.MatchReply:
    other = hosts.item_of_size(b"under way".ljust(api.KEY_BYTES), hosts.SMALLEST_LBA_COUNT)
    reserve = api.ReserveRequest(host.holder_id, host.epoch, (other,))
    service.submit(service.store.reserve(world.clock_s, reserve, {}), lambda _: None)
    group = api.GroupKeys(0, (work.item.key,), (0,))
    request = api.MatchRequest(host.holder_id, "asked", hosts.CHUNK_TOKENS, (group,))
    reply = service.store.match(world.clock_s, request, service.look_up([work.item.key]))
    service.store.release(world.clock_s, api.ReleaseRequest(host.holder_id, (reply.lease_id,)))
    return reply
