"""What the service answered, checked against what was asked and put into the form the scheduler needs. No I/O."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

from meshfusion.dpu.api import types as api
from meshfusion.host.pool_events import GrantedRun, Reserved, ReserveWish, StoredPrefix

logger = logging.getLogger("meshfusion.client")


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkForm:
    """What a chunk of ours is: its tokens and the one shard it has."""

    chunk_tokens: int
    shard: api.ShardSize


def stored_prefix(
    chunks: Sequence[api.ChunkRecord], keys: Sequence[bytes], identity: bytes, form: ChunkForm
) -> StoredPrefix:
    """The leading ``chunks`` that are what was asked for (rule 5, on our side too): key, identity, position, form."""
    if len(chunks) > len(keys):
        logger.error("the service offered %d chunks, %d were asked for", len(chunks), len(keys))
    believed: list[api.ChunkRecord] = []
    for i, (chunk, key) in enumerate(zip(chunks, keys, strict=False)):
        right = (
            chunk.key == key
            and chunk.identity == identity
            and chunk.position_tokens == i * form.chunk_tokens
            and chunk.token_count == form.chunk_tokens
            and [_size_of(shard) for shard in chunk.shards] == [form.shard]
        )
        if not right:
            logger.error("the service offered a chunk that was not asked for: %s", chunk.key.hex())
            break
        believed.append(chunk)
    lbas: list[int] = []
    digests: list[bytes] = []
    for chunk in believed:
        (shard,) = chunk.shards
        first = shard.extent.lba + shard.payload_lba_offset
        lbas += range(first, first + form.shard.unit_count * shard.unit_lba_count, shard.unit_lba_count)
        digests += shard.unit_digests
    return StoredPrefix(
        keys=tuple(chunk.key for chunk in believed),
        extents=tuple(chunk.shards[0].extent for chunk in believed),
        unit_lbas=tuple(lbas),
        unit_digests=tuple(digests),
    )


def reserve_items(wish: ReserveWish, keys: Sequence[bytes], form: ChunkForm) -> list[api.ReserveItem]:
    """One item for each chunk of the run."""
    return [
        api.ReserveItem(key, 0, wish.position_tokens + i * form.chunk_tokens, form.chunk_tokens, (form.shard,))
        for i, key in enumerate(keys)
    ]


def is_reserve_reply_sound(reply: api.ReserveReply, item_count: int) -> bool:
    """Does the reply answer every item, each granted one with one place?"""
    return len(reply.results) == item_count and all(len(result.extents) == 1 for result in granted_results(reply))


def granted_results(reply: api.ReserveReply) -> list[api.ReserveResult]:
    return [result for result in reply.results if result.outcome is api.ReserveOutcome.GRANTED]


def reserved(
    wish: ReserveWish, keys: Sequence[bytes], results: Sequence[api.ReserveResult], holder_id: str, epoch: int
) -> Reserved:
    """The answer for one run."""
    assert len(results) == len(keys) == wish.chunk_count, (len(results), len(keys), wish.chunk_count)
    granted = [i for i, result in enumerate(results) if result.outcome is api.ReserveOutcome.GRANTED]
    return Reserved(
        wish.run_id,
        Counter(result.outcome for result in results),
        tuple(i for i, result in enumerate(results) if result.outcome is api.ReserveOutcome.NO_SPACE),
        GrantedRun(
            holder_id,
            epoch,
            wish.identity,
            indexes=tuple(granted),
            keys=tuple(keys[i] for i in granted),
            grant_ids=tuple(results[i].grant_id for i in granted),
            extents=tuple(_fields_of(results[i].extents[0]) for i in granted),
        )
        if granted
        else None,
    )


def _size_of(shard: api.Shard) -> api.ShardSize:
    return api.ShardSize(shard.rank, shard.unit_bytes, len(shard.unit_digests))


def _fields_of(extent: api.Extent) -> tuple[int, int, int, int, int]:
    """As ``api.Extent(*fields)`` takes them."""
    return extent.namespace, extent.segment, extent.lba, extent.lba_count, extent.generation
