"""A chunk to write, and how to read its units back."""

from __future__ import annotations

from collections.abc import Sequence

from meshfusion.dpu.api.types import Extent
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.shards import ShardWrite
from meshfusion.jbof.format import ChunkHeader, header_lba_count, shard_lba_count, unit_lba_count
from tests.host.support.kv_memory import BLOCK_TOKENS


def shard_write(unit_bytes: int, block_ids: Sequence[int], lba: int, save_id: int = 1) -> ShardWrite:
    """Of one chunk, a unit for each block."""
    header = ChunkHeader(
        pool_uuid=b"p" * 16,
        identity=b"i" * 32,
        key=save_id.to_bytes(32, "big"),
        tenant="default",
        group=0,
        rank=0,
        shard_count=1,
        position_tokens=0,
        token_count=BLOCK_TOKENS * len(block_ids),
        segment=0,
        generation=1,
        lba=lba,
        unit_bytes=unit_bytes,
        unit_digests=(),
    )
    extent = Extent(1, 0, lba, shard_lba_count(unit_bytes, len(block_ids)), 1)
    return ShardWrite((0, save_id), extent, header, tuple(block_ids))


def reads_of(write: ShardWrite, digests: Sequence[bytes], block_ids: Sequence[int] | None = None) -> list[UnitRead]:
    """Into the blocks that it was written from, unless others are named."""
    unit_bytes = write.header.unit_bytes
    first = write.extent.lba + header_lba_count(len(digests))
    return [
        UnitRead(first + i * unit_lba_count(unit_bytes), unit_bytes, block_id, digest)
        for i, (block_id, digest) in enumerate(zip(block_ids or write.block_ids, digests, strict=True))
    ]
