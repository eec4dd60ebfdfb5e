"""The on-media format, version 3: where things lie on a drive, and chunk headers. Pure codecs, no I/O.

All numbers are little-endian; every structure has the envelope of :mod:`meshfusion.jbof.envelope`. A drive's blocks of
4096 bytes are used so::

    block                  what
    0, 1                   the label, twice (meshfusion.jbof.label)
    2, 3                   the owner's epoch, in turn (meshfusion.jbof.epoch_record)
    4, 5                   kept for who owns the drive, where several machines reach it
    data_start_lba + i*n   segment i, of n = segment_lba_count blocks:
        first block        its header (meshfusion.jbof.segment_format)
        then               extents, one after another, each a chunk header and its units
        last blocks        its summary, once nothing is written into it any more, its first part in the last block

A pool's segments are numbered over all its drives: segment ``i`` of drive ``d`` is ``d << 24 | i`` in headers,
summaries and the index; LBAs are the drive's own.

Segments begin and end on multiples of the drive's ``alignment_lba_count``. The index says what is visible; all of it
can be found again from the medium alone (meshfusion.jbof.recovery).

A segment is opened in this order: its old chunks leave the index and its new generation enters it, in one transaction;
its header is written and flushed; all behind the header is deallocated; then its first extent is handed out. The header
comes before the deallocation, since a power cut may leave that half done: of a chunk of before, its header could be
left and its units not.

**Chunk header**: the first blocks of every shard's extent; units follow, each starting on a block boundary. ::

    offset  size  field
         0     8  magic b"MESHCHNK"
         8     4  header_version: u32, 3
        12     4  unit_count: u32
        16     4  unit_bytes: u32
        20     4  group: u32
        24     4  rank: u32
        28     4  segment: u32
        32     4  token_count: u32
        36     2  tenant_bytes: u16, at most 48
        38     2  shard_count: u16, shards of the whole chunk; no chunk is complete with fewer
        40     8  position_tokens: u64, absolute token offset of the chunk
        48     8  generation: u64, of the segment when this was written
        56     8  lba: u64, of this header itself: a misdirected write is seen
        64    16  pool_uuid
        80    32  identity
       112    32  key
       144    48  tenant: UTF-8, then zero
       192     8  first_lba: u64, where the chunk's first shard begins, as a pool LBA (meshfusion.jbof.pool_addresses)
       200     8  first_generation: u64, of that shard's segment
       208   8*n  the n = unit_count unit digests (see meshfusion.jbof.digest)
     208+8n    4  crc32 (zlib) of everything before it
     212+8n       zero up to the next block boundary

``first_lba`` and ``first_generation`` say which write a shard is of, since no place is handed out twice in one
generation: two shards that name the same are of one write. Both are zero where the chunk has one shard, and in shards
of several from before there were these fields, which had been the tenant's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.envelope import CRC_BYTES, check_magic, check_sealed, damaged, sealed

FORMAT_VERSION: Final = 3  # 2: the digest sums in tiles; 3: segments have headers and summaries
CHUNK_HEADER_VERSION: Final = 3
LBA_BYTES: Final = 4096
LABEL_LBAS: Final = (0, 1)
OWNER_LBAS: Final = (2, 3)
RESERVATION_RECORD_LBA: Final = 4  # and the next: who reserved the drive (jbof/drives/owner_record.py)
DATA_START_LBA: Final = 256  # the first MiB is for labels and their successors
UUID_BYTES: Final = 16
IDENTITY_BYTES: Final = 32
KEY_BYTES: Final = 32
UNIT_DIGEST_BYTES: Final = 8
MAX_TENANT_BYTES: Final = 48
MAX_UNIT_COUNT: Final = 1 << 20

_CHUNK_MAGIC: Final = b"MESHCHNK"
_CHUNK: Final = struct.Struct("<8sIIIIIIIHHQQQ16s32s32s48sQQ")
assert _CHUNK.size == 208


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What one shard's extent holds. ``unit_digests``: 8 bytes for each unit; other fields as in the layout."""

    pool_uuid: bytes
    identity: bytes
    key: bytes
    tenant: str
    group: int
    rank: int
    shard_count: int
    position_tokens: int
    token_count: int
    segment: int
    generation: int
    lba: int
    unit_bytes: int
    unit_digests: tuple[bytes, ...]
    first_lba: int = 0
    first_generation: int = 0

    @property
    def unit_count(self) -> int:
        return len(self.unit_digests)


def header_lba_count(unit_count: int, lba_bytes: int = LBA_BYTES) -> int:
    """Blocks of the chunk header of a shard with ``unit_count`` units."""
    return _blocks(_CHUNK.size + unit_count * UNIT_DIGEST_BYTES + CRC_BYTES, lba_bytes)


def unit_lba_count(unit_bytes: int, lba_bytes: int = LBA_BYTES) -> int:
    """Blocks from the start of one unit to the start of the next."""
    return _blocks(unit_bytes, lba_bytes)


def shard_lba_count(unit_bytes: int, unit_count: int, lba_bytes: int = LBA_BYTES) -> int:
    """Blocks of a whole shard: its header, then its units, each starting on a block boundary."""
    return header_lba_count(unit_count, lba_bytes) + unit_count * unit_lba_count(unit_bytes, lba_bytes)


def encode_chunk_header(header: ChunkHeader, lba_bytes: int = LBA_BYTES) -> bytes:
    """``header_lba_count(unit_count, lba_bytes)`` whole logical blocks."""
    tenant = header.tenant.encode()
    assert len(tenant) <= MAX_TENANT_BYTES
    assert len(header.pool_uuid) == UUID_BYTES
    assert len(header.identity) == IDENTITY_BYTES
    assert len(header.key) == KEY_BYTES
    assert header.unit_bytes > 0
    assert header.shard_count > 0
    assert 0 < header.unit_count <= MAX_UNIT_COUNT
    assert all(len(digest) == UNIT_DIGEST_BYTES for digest in header.unit_digests)
    body = _CHUNK.pack(
        _CHUNK_MAGIC,
        CHUNK_HEADER_VERSION,
        header.unit_count,
        header.unit_bytes,
        header.group,
        header.rank,
        header.segment,
        header.token_count,
        len(tenant),
        header.shard_count,
        header.position_tokens,
        header.generation,
        header.lba,
        header.pool_uuid,
        header.identity,
        header.key,
        tenant,
        header.first_lba,
        header.first_generation,
    )
    body += b"".join(header.unit_digests)
    return sealed(body, header_lba_count(header.unit_count, lba_bytes) * lba_bytes)


def peek_unit_count(data: bytes, *, where: str = "the chunk header") -> int:
    """The unit count a header claims, from its first block, unproven: how much to read before decoding it."""
    check_magic(data, _CHUNK_MAGIC, CHUNK_HEADER_VERSION, where, "chunk header")
    if len(data) < _CHUNK.size:
        raise damaged(f"{where} is truncated to {len(data)} bytes")
    unit_count = int(_CHUNK.unpack_from(data)[2])
    if not 0 < unit_count <= MAX_UNIT_COUNT:
        raise damaged(f"{where} claims {unit_count} units; 1 to {MAX_UNIT_COUNT} are possible")
    return unit_count


def decode_chunk_header(data: bytes, *, lba_bytes: int = LBA_BYTES, where: str = "the chunk header") -> ChunkHeader:
    """Read a header from its blocks (more may follow in ``data``). Raises :class:`MediumFormatError`."""
    unit_count = peek_unit_count(data, where=where)
    length_bytes = header_lba_count(unit_count, lba_bytes) * lba_bytes
    if len(data) < length_bytes:
        raise damaged(f"{where} is truncated: {len(data)} bytes of {length_bytes}")
    digests_end = _CHUNK.size + unit_count * UNIT_DIGEST_BYTES
    check_sealed(data[:length_bytes], digests_end, where)
    _, _, _, unit_bytes, group, rank, segment, token_count, tenant_bytes, *rest = _CHUNK.unpack_from(data)
    (
        shard_count,
        position_tokens,
        generation,
        lba,
        pool_uuid,
        identity,
        key,
        tenant_field,
        first_lba,
        first_generation,
    ) = rest
    if tenant_bytes > MAX_TENANT_BYTES or not unit_bytes or not shard_count:
        raise damaged(
            f"{where} has impossible sizes: tenant_bytes {tenant_bytes}, unit_bytes {unit_bytes}, "
            f"shard_count {shard_count}"
        )
    try:
        tenant = tenant_field[:tenant_bytes].decode()
    except UnicodeDecodeError:
        raise damaged(f"{where}: its tenant is not UTF-8") from None
    return ChunkHeader(
        pool_uuid=pool_uuid,
        identity=identity,
        key=key,
        tenant=tenant,
        group=group,
        rank=rank,
        shard_count=shard_count,
        position_tokens=position_tokens,
        token_count=token_count,
        segment=segment,
        generation=generation,
        lba=lba,
        unit_bytes=unit_bytes,
        unit_digests=tuple(data[i : i + UNIT_DIGEST_BYTES] for i in range(_CHUNK.size, digests_end, UNIT_DIGEST_BYTES)),
        first_lba=first_lba,
        first_generation=first_generation,
    )


def _blocks(length_bytes: int, lba_bytes: int) -> int:
    assert length_bytes >= 0
    assert lba_bytes > 0
    return -(-length_bytes // lba_bytes)
