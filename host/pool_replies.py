"""What the service answered, checked against what was asked and put into the form the scheduler needs. No I/O."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshfusion.dpu.api import types as api
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.pool_events import (
    ALONE,
    NOTHING_STORED,
    GrantedRun,
    Reserved,
    ReserveWish,
    StoredBoundary,
    StoredGroup,
)
from meshfusion.jbof.pool_addresses import is_on_a_drive, pool_lba

logger = logging.getLogger("meshfusion.client")

_NOT_NOW = (api.ReserveOutcome.NO_SPACE, api.ReserveOutcome.DECLINED)


def stored_boundary(
    reply: api.MatchReply, asked: Sequence[api.GroupKeys], identity: bytes, form: ChunkForm
) -> StoredBoundary:
    """What the reply promises, if it is what was asked for (rule 5, on our side too): for every KV group just the
    chunks that the boundary needs, of our identity, at their positions and in our form. Else nothing of it counts."""
    chunks = iter(reply.chunks)
    groups = []
    for keys in asked:
        group = _stored_group(chunks, keys, reply.chunk_count, identity, form)
        if group is None:
            return NOTHING_STORED
        groups.append(group)
    if next(chunks, None) is not None:
        logger.error("the service offered more chunks than were asked for")
        return NOTHING_STORED
    return StoredBoundary(reply.chunk_count, tuple(groups)) if reply.chunk_count else NOTHING_STORED


def _stored_group(
    chunks: Iterator[api.ChunkRecord], asked: api.GroupKeys, boundary: int, identity: bytes, form: ChunkForm
) -> StoredGroup | None:
    """Takes the group's chunks from ``chunks``. None: they are not what was asked for."""
    if not 0 <= boundary <= len(asked.keys):
        logger.error("the service offered a boundary after %d chunks, of %d asked for", boundary, len(asked.keys))
        return None
    plan = form.plans[asked.group]
    first_chunk, needed = plan.first_needed_chunk(boundary), plan.needed_blocks(boundary)
    keys: list[bytes] = []
    extents: list[api.Extent] = []
    lbas: list[list[int]] = [[] for _ in range(form.shard_count(asked.group))]
    digests: list[list[bytes]] = [[] for _ in lbas]
    for index in range(first_chunk, boundary):
        chunk = next(chunks, None)
        if chunk is None or not _is_right(chunk, asked.group, index, asked.keys[index], identity, form):
            logger.error("the service did not offer chunk %d of group %d, or offered another", index, asked.group)
            return None
        kept = plan.kept_blocks(index)
        skipped = max(0, needed.start - kept.start)
        for number, shard in enumerate(chunk.shards):
            first = pool_lba(shard.extent.namespace, shard.extent.lba) + shard.payload_lba_offset
            lbas[number] += range(first, first + len(kept) * shard.unit_lba_count, shard.unit_lba_count)[skipped:]
            digests[number] += shard.unit_digests[skipped:]
        keys.append(chunk.key)
        extents.append(chunk.shards[0].extent)
    return StoredGroup(
        first_chunk,
        needed.start,
        tuple(keys),
        tuple(extents),
        tuple(tuple(column) for column in lbas),
        tuple(tuple(column) for column in digests),
    )


def _is_right(chunk: api.ChunkRecord, group: int, index: int, key: bytes, identity: bytes, form: ChunkForm) -> bool:
    return (
        chunk.key == key
        and chunk.identity == identity
        and chunk.group == group
        and chunk.position_tokens == index * form.chunk_tokens
        and chunk.token_count == form.chunk_tokens
        and tuple(map(_size_of, chunk.shards)) == form.shards_of(group, index)
        and all(_is_on_a_drive(shard.extent) for shard in chunk.shards)
    )


def reserve_items(wish: ReserveWish, keys: Sequence[bytes], form: ChunkForm) -> list[api.ReserveItem]:
    """One item for each chunk of the run."""
    return [
        api.ReserveItem(
            key,
            group,
            index * form.chunk_tokens,
            form.chunk_tokens,
            form.shards_of(group, index),
            request_id=wish.request_id,
        )
        for group, index, key in zip(wish.groups, wish.indexes, keys, strict=True)
    ]


def is_reserve_reply_sound(reply: api.ReserveReply, items: Sequence[api.ReserveItem]) -> bool:
    """Does the reply answer every item, each granted one with a place for each shard that a pool can have?"""
    return len(reply.results) == len(items) and all(
        len(result.extents) == len(item.shards) and all(map(_is_on_a_drive, result.extents))
        for item, result in zip(items, reply.results, strict=True)
        if result.outcome is api.ReserveOutcome.GRANTED
    )


def granted_results(reply: api.ReserveReply) -> list[api.ReserveResult]:
    return [result for result in reply.results if result.outcome is api.ReserveOutcome.GRANTED]


class ReservedRun(NamedTuple):
    """``answer``: for the scheduler; ``spare_grant_ids``: places that the run will not use, to be given back."""

    answer: Reserved
    spare_grant_ids: tuple[str, ...]


def reserved(
    wish: ReserveWish,
    keys: Sequence[bytes],
    results: Sequence[api.ReserveResult],
    holder_id: str,
    epoch: int,
    form: ChunkForm,
) -> ReservedRun:
    """The answer for one run. A chunk of which another group got no place is not written either: its boundary could
    not be resumed at, and it is asked for again with the other."""
    assert len(results) == len(keys) == wish.chunk_count, (len(results), len(keys), wish.chunk_count)
    outcomes = [result.outcome for result in results]
    bundles = [index + 1 if len(form.plans) > 1 else ALONE for index in wish.indexes]
    broken = {b for b, outcome in zip(bundles, outcomes, strict=True) if outcome in _NOT_NOW}
    spare = [
        i
        for i, outcome in enumerate(outcomes)
        if outcome is api.ReserveOutcome.GRANTED and bundles[i] in broken - {ALONE}
    ]
    for i in spare:
        outcomes[i] = api.ReserveOutcome.NO_SPACE
    granted = [i for i, outcome in enumerate(outcomes) if outcome is api.ReserveOutcome.GRANTED]
    answer = Reserved(
        wish.run_id,
        Counter(outcomes),
        tuple(i for i, outcome in enumerate(outcomes) if outcome in _NOT_NOW),
        GrantedRun(
            holder_id,
            epoch,
            wish.identity,
            indexes=tuple(granted),
            keys=tuple(keys[i] for i in granted),
            grant_ids=tuple(results[i].grant_id for i in granted),
            extents=tuple(_fields_of(extent) for i in granted for extent in results[i].extents),
            bundles=tuple(bundles[i] for i in granted),
        )
        if granted
        else None,
    )
    return ReservedRun(answer, tuple(results[i].grant_id for i in spare))


def _is_on_a_drive(extent: api.Extent) -> bool:
    return is_on_a_drive(extent.namespace, extent.lba, extent.lba_count)


def _size_of(shard: api.Shard) -> api.ShardSize:
    return api.ShardSize(shard.rank, shard.unit_bytes, len(shard.unit_digests))


def _fields_of(extent: api.Extent) -> tuple[int, int, int, int, int]:
    """As ``api.Extent(*fields)`` takes them."""
    return extent.namespace, extent.segment, extent.lba, extent.lba_count, extent.generation
