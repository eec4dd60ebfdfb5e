"""A committed chunk as bytes: as the index stores it, and as it is sent to whoever can read it.

The same bytes in both places, so that a lookup passes on what it read: to take hundreds of chunks apart and to put them
together again took two thirds of its time. Every value ends with a CRC-32 over the rest, since LMDB itself checks
nothing. Another format is another number of the index's version and another field of the API.

======== ===== ==============================================================================
at       bytes
======== ===== ==============================================================================
0        32    key
32       32    identity
64       4     group
68       8     position_tokens
76       4     token_count
80       2     length of the tenant's name
82       2     number of shards
84       .     the tenant's name, UTF-8
.        .     each shard: 48 bytes (:data:`SHARD`), then 8 for the digest of each unit
.        4     CRC-32 of all before it
======== ===== ==============================================================================

Numbers are little-endian and unsigned.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

from meshfusion.dpu.api.types import IDENTITY_BYTES, KEY_BYTES, UNIT_DIGEST_BYTES, ChunkRecord, Extent, Shard

CHUNK: Final = struct.Struct(f"<{KEY_BYTES}s{IDENTITY_BYTES}sIQIHH")  # key identity group position tokens tenant shards
SHARD: Final = struct.Struct("<IIIQIQIIII")  # rank nsid segment lba lba_count generation payload unit_lbas bytes units
CRC: Final = struct.Struct("<I")
INTACT_CRC: Final = 0x2144DF1C  # of anything that ends with its own CRC-32


class PackedChunkError(ValueError):
    """These bytes are no chunk: they are damaged."""


def pack_chunk(record: ChunkRecord) -> bytes:
    tenant = record.tenant.encode()
    parts = [
        CHUNK.pack(
            record.key,
            record.identity,
            record.group,
            record.position_tokens,
            record.token_count,
            len(tenant),
            len(record.shards),
        ),
        tenant,
    ]
    for shard in record.shards:
        e = shard.extent
        parts.append(
            SHARD.pack(
                shard.rank,
                e.namespace,
                e.segment,
                e.lba,
                e.lba_count,
                e.generation,
                shard.payload_lba_offset,
                shard.unit_lba_count,
                shard.unit_bytes,
                len(shard.unit_digests),
            )
        )
        parts.extend(shard.unit_digests)
    body = b"".join(parts)
    return body + CRC.pack(zlib.crc32(body))


def unpack_chunk(value: bytes) -> ChunkRecord:
    """Raises :class:`PackedChunkError`."""
    if len(value) < CRC.size or zlib.crc32(value) != INTACT_CRC:
        raise PackedChunkError("its checksum is wrong")
    return _parse(value[: -CRC.size])


def has_its_length(value: bytes) -> bool:
    """Is a value, damaged or not, as long as its fields say?"""
    try:
        _parse(value[: -CRC.size])
    except PackedChunkError:
        return False
    return True


def _parse(body: bytes) -> ChunkRecord:
    try:
        key, identity, group, position, tokens, tenant_len, shard_count = CHUNK.unpack_from(body)
        at = CHUNK.size
        tenant = body[at : at + tenant_len].decode()
        at += tenant_len
        shards = []
        for _ in range(shard_count):
            rank, nsid, segment, lba, lbas, generation, payload, unit_lbas, unit_bytes, units = SHARD.unpack_from(
                body, at
            )
            at += SHARD.size
            end = at + units * UNIT_DIGEST_BYTES
            digests = tuple([body[i : i + UNIT_DIGEST_BYTES] for i in range(at, end, UNIT_DIGEST_BYTES)])
            at = end
            extent = Extent(nsid, segment, lba, lbas, generation)
            shards.append(Shard(rank, extent, payload, unit_lbas, unit_bytes, digests))
    except (struct.error, UnicodeDecodeError) as error:
        raise PackedChunkError("its fields do not fit into it") from error
    if at != len(body):
        raise PackedChunkError("it is longer or shorter than its fields say")
    return ChunkRecord(key, identity, tenant, group, position, tokens, tuple(shards))


class PackedChunks(Sequence[ChunkRecord]):
    """Chunks that are taken apart when somebody looks at them. ``values``: of each, proven to be intact."""

    __slots__ = ("_records", "values")

    def __init__(self, values: Iterable[bytes]) -> None:
        self.values = tuple(values)
        self._records: tuple[ChunkRecord, ...] | None = None

    @property
    def records(self) -> tuple[ChunkRecord, ...]:
        if self._records is None:
            self._records = tuple(map(unpack_chunk, self.values))
        return self._records

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> ChunkRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ChunkRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ChunkRecord | tuple[ChunkRecord, ...]:
        return self.records[index]

    def __iter__(self) -> Iterator[ChunkRecord]:
        return iter(self.records)

    def __eq__(self, other: object) -> bool:
        return self.records == tuple(other) if isinstance(other, PackedChunks | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.records)

    def __repr__(self) -> str:
        return repr(self.records)
