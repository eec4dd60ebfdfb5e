"""Chunk records as a service would offer them, made from numbers."""

from __future__ import annotations

from meshfusion.dpu.api import types as api
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, WholePrefix
from meshfusion.host.pool_events import StoredBoundary, StoredGroup

UNIT_BYTES = 32_768
UNIT_LBAS = 8


def one_group(*, block_tokens: int, blocks_per_chunk: int, unit_bytes: int = UNIT_BYTES) -> ChunkForm:
    """An engine with full attention alone."""
    plan = GroupPlan(0, WholePrefix(), block_tokens, block_tokens * blocks_per_chunk)
    return ChunkForm((plan,), (unit_bytes,))


def make_records(
    count: int,
    *,
    block_tokens: int,
    blocks_per_chunk: int,
    identity: bytes = b"\x11" * 32,
    first_number: int = 0,
) -> tuple[api.ChunkRecord, ...]:
    """``count`` leading chunks of a request. Chunk ``i`` has number ``first_number + i``: key and digests tell it."""
    chunk_tokens = block_tokens * blocks_per_chunk
    return tuple(
        api.ChunkRecord(
            key=number_key(first_number + i),
            identity=identity,
            tenant="default",
            group=0,
            position_tokens=i * chunk_tokens,
            token_count=chunk_tokens,
            shards=(_shard(first_number + i, blocks_per_chunk),),
        )
        for i in range(count)
    )


def make_stored(count: int, *, block_tokens: int, blocks_per_chunk: int, first_number: int = 0) -> StoredBoundary:
    """The same chunks as columns."""
    records = make_records(
        count, block_tokens=block_tokens, blocks_per_chunk=blocks_per_chunk, first_number=first_number
    )
    units = [(first_number + i, unit) for i in range(count) for unit in range(blocks_per_chunk)]
    group = StoredGroup(
        0,
        0,
        tuple(record.key for record in records),
        tuple(record.shards[0].extent for record in records),
        (tuple(unit_lba(number, unit) for number, unit in units),),
        (tuple(unit_digest(number, unit) for number, unit in units),),
    )
    return StoredBoundary(count, (group,))


def unit_lba(number: int, unit: int) -> int:
    return number * 64 + 1 + unit * UNIT_LBAS


def number_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def unit_digest(number: int, unit: int) -> bytes:
    return (number * 1000 + unit).to_bytes(8, "little")


def _shard(number: int, unit_count: int) -> api.Shard:
    extent = api.Extent(
        namespace=1, segment=number, lba=number * 64, lba_count=1 + unit_count * UNIT_LBAS, generation=7
    )
    digests = tuple(unit_digest(number, unit) for unit in range(unit_count))
    return api.Shard(0, extent, 1, UNIT_LBAS, UNIT_BYTES, digests)
