"""What must hold at every moment, as the world's own account has it: rules 1 to 5 of the design, and no leaks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.grants import GrantState
from meshfusion.jbof.policy.write_budget import BURST_SHARE, DAY_S
from meshfusion.jbof.pool_addresses import drive_of_segment, pool_lba
from tests.sim import host as hosts
from tests.sim.host import Host
from tests.sim.medium import Token, must
from tests.sim.service import BUDGET_SEGMENTS, CAPACITY_BYTES, OPTIONS, Service

if TYPE_CHECKING:
    from tests.sim.world import World


def check_opening(world: World, service: Service, segment: int) -> None:
    """The store decided to open this segment: nobody may write or read there any more."""
    for owner, work in world.unresolved.values():
        hit = any(extent.segment == segment for extent in work.extents)
        must(not hit, "opened under a writer", segment, owner, work)
    for leased in world.leased.values():
        hit = any(shard.extent.segment == segment for chunk in leased.chunks for shard in chunk.shards)
        must(not hit, "opened under a reader", segment, leased)
    for move in world.tidying.moves if world.tidying is not None else ():
        hit = any(shard.extent.segment == segment for shard in move.after.shards)
        must(not hit, "opened while a chunk was moved there", segment, move)
    world.seen["openings"] += 1
    world.seen["reclaims"] += segment in service.index.segments
    for drive, takes_segments in service.drives.items():
        takes = takes_segments and drive.drive_number not in service.gone
        must(takes or segment not in drive.segments, "opened on a drive that takes no segments", segment)


def check_budgets(world: World) -> None:
    """What was durably opened, and so may have been written, in all lives of the service. Its clock is what counts."""
    burst = BUDGET_SEGMENTS * BURST_SHARE
    most = burst + (BUDGET_SEGMENTS - burst) * world.clock_s / DAY_S
    for number, opened in world.index.opened.items() if world.has_budgets else ():
        must(opened <= most, "more was opened than a drive's budget", number, opened, most)
        world.seen["openings within a budget"] += 1


def check_bundles(world: World) -> None:
    """Rule 1: what belongs together is in the index together, at every moment and after every crash."""
    unseen = []
    for bundle in world.bundles:
        places = [(work.item.key, extent) for work in bundle for extent in work.extents]
        durable = sum(place in world.index.was_durable for place in places)
        must(durable in (0, len(places)), "a bundle became visible in part", bundle)
        if not durable:
            unseen.append(bundle)
    world.bundles = unseen


def check_offer(world: World, host: Host, request: api.MatchRequest, reply: api.MatchReply, service: Service) -> None:
    """Rules 1 and 5: a boundary is offered with all that every group needs there, and that is durable, complete,
    leased and what was asked for."""
    must(bool(reply.chunk_count) == bool(reply.chunks) == bool(reply.lease_id), "half an offer", reply)
    wanted = [
        (group.group, i * hosts.CHUNK_TOKENS, hosts.key(group.group, i))
        for group in request.groups
        for i in hosts.needed(group.group, reply.chunk_count)
        if reply.chunk_count and hosts.is_stored(group.group, i)
    ]
    offered = [(chunk.group, chunk.position_tokens, chunk.key) for chunk in reply.chunks]
    must(offered == wanted, "the offer is not what the boundary takes", reply.chunk_count, offered, wanted)
    for chunk in reply.chunks:
        must(chunk.identity == host.identity, "another identity was offered", host, chunk)
        for shard in chunk.shards:
            is_gone = drive_of_segment(shard.extent.segment) in service.gone
            must(not is_gone, "offered on a drive that is gone", chunk)
            must((chunk.key, shard.extent) in service.index.was_durable, "offered before it was durable", chunk)
            must(service.store.segments.pins(shard.extent.segment)[0] > 0, "offered without a lease", chunk)
        if world.is_served(host):  # what a service that was replaced offers, the reader's digest may refuse (rule 4)
            check_bytes(world, chunk)


def check_bytes(world: World, chunk: api.ChunkRecord) -> None:
    for shard in chunk.shards:
        extent = shard.extent
        for offset in range(extent.lba_count):
            found = world.medium.durable.get(pool_lba(extent.namespace, extent.lba) + offset)
            must(found is not None, "an offered block was never flushed", chunk, offset)
            assert found is not None
            wanted = Token(
                chunk.key,
                chunk.identity,
                chunk.position_tokens,
                extent.segment,
                extent.generation,
                found.grant_id,
                offset,
            )
            must(found == wanted, "an offered block holds something else", found, wanted)


def check_counts(world: World) -> None:
    """After every step: capacity adds up, and every pin is somebody's who is known."""
    service = world.service
    if service is None:
        return
    store = service.store
    counts = store.segments.counts()
    total = counts.free + counts.open + counts.sealed + counts.opening
    must(total == len(service.segment_numbers), "segment counts do not add up", counts)
    reads: Counter[int] = Counter()
    writes = store.own_pins()
    for lease in store.leases:
        # A fence that was reported as failed, and is durable all the same, is made again.
        is_held = lease.lease_id in world.leased or lease.holder_id in world.fences_seen
        must(is_held, "a lease outlived what holds it", lease)
        reads.update(lease.segments)
    for grant in store.grants:
        is_somebodys = grant.state is GrantState.COMMITTING or store.holders.knows(grant.holder_id)
        must(is_somebodys, "a grant outlived its holder", grant)
        for extent in grant.extents:
            writes[extent.segment] += 1
    for segment in service.segment_numbers:
        pins = store.segments.pins(segment)
        must(pins == (reads[segment], writes[segment]), "pins do not match", segment, pins, reads, writes)
    must(store.leases.pinned_bytes <= OPTIONS.max_pinned_fraction * CAPACITY_BYTES, "pinned over the cap")
