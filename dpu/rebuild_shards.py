"""Whole chunks from shards that are found one at a time, each on its drive. Pure.

A chunk is offered only when all its shards were found and are of one write (rule 1): two writes of one chunk may both
have left shards behind, whole and with right digests, and their bytes need not be the same. Shards of one write name
the same place of the first one, in the same generation (:mod:`meshfusion.jbof.format`), and say the same of their
chunk. Shards that do not say of which write they are stand for nothing.

What waits for other shards is held in memory. Shards of one write lie in segments that were opened at nearly the same
time, so that few wait at once; those whose others are gone wait to the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshfusion.dpu.api.types import ChunkRecord, Extent, Shard
from meshfusion.jbof.format import LBA_BYTES, ChunkHeader, header_lba_count, shard_lba_count, unit_lba_count
from meshfusion.jbof.pool_addresses import drive_of_segment, namespace_of, pool_lba


@dataclass(frozen=True, slots=True)
class _Write:
    """What the shards of one write say alike. ``first_lba`` is a pool LBA."""

    first_lba: int
    first_generation: int
    shard_count: int
    key: bytes
    identity: bytes
    tenant: str
    group: int
    position_tokens: int
    token_count: int


class ShardGatherer:
    """``left_out``: shards that stand for nothing, whatever is found yet."""

    def __init__(self) -> None:
        self._waiting: dict[_Write, dict[int, Shard]] = {}  # by rank
        self.left_out = 0

    @property
    def waiting(self) -> int:
        """Shards whose chunks are not whole yet."""
        return sum(map(len, self._waiting.values()))

    def add(self, header: ChunkHeader) -> ChunkRecord | None:
        """The chunk that is whole with this shard, if it is. ``header``: of a shard that is where it says."""
        shard = _shard_of(header)
        if header.shard_count == 1 and header.rank == 0:
            return _record(header, (shard,))
        write = _write_of(header)
        if not _may_be_of_several(header):
            self.left_out += 1
            return None
        found = self._waiting.setdefault(write, {})
        if found.setdefault(header.rank, shard) is not shard:  # one rank twice: one of them lies
            self.left_out += 1
            return None
        if len(found) < write.shard_count or 0 not in found:
            return None
        del self._waiting[write]
        return _record(header, (found[rank] for rank in sorted(found)))


def _write_of(header: ChunkHeader) -> _Write:
    return _Write(
        header.first_lba,
        header.first_generation,
        header.shard_count,
        header.key,
        header.identity,
        header.tenant,
        header.group,
        header.position_tokens,
        header.token_count,
    )


def _may_be_of_several(header: ChunkHeader) -> bool:
    """Does it say of which write it is, in a way that can be? No generation is 0; the first shard is rank 0's."""
    if header.shard_count == 1 or not header.first_generation:
        return False
    is_first = (header.first_lba, header.first_generation) == (_pool_lba_of(header), header.generation)
    return is_first == (header.rank == 0)


def _pool_lba_of(header: ChunkHeader) -> int:
    return pool_lba(namespace_of(drive_of_segment(header.segment)), header.lba)


def _shard_of(header: ChunkHeader) -> Shard:
    lba_count = shard_lba_count(header.unit_bytes, header.unit_count, LBA_BYTES)
    namespace = namespace_of(drive_of_segment(header.segment))
    return Shard(
        rank=header.rank,
        extent=Extent(namespace, header.segment, header.lba, lba_count, header.generation),
        payload_lba_offset=header_lba_count(header.unit_count, LBA_BYTES),
        unit_lba_count=unit_lba_count(header.unit_bytes, LBA_BYTES),
        unit_bytes=header.unit_bytes,
        unit_digests=header.unit_digests,
    )


def _record(header: ChunkHeader, shards: Iterable[Shard]) -> ChunkRecord:
    return ChunkRecord(
        header.key,
        header.identity,
        header.tenant,
        header.group,
        header.position_tokens,
        header.token_count,
        tuple(shards),
    )
