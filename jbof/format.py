"""The on-media format, version 1: pure codecs, no I/O. All numbers are little-endian.

**Label**: exactly one logical block (4096 bytes), at LBA 0 and again at LBA 1. A damaged or foreign copy beside a valid
one is told and passed over; copies of another version or that contradict each other make readers refuse. ::

    offset  size  field
         0     8  magic b"MESHFUSN"
         8     4  format_version: u32, 1
        12     4  flags: u32, 0 in version 1; a reader refuses bits that it does not know
        16    16  pool_uuid
        32     8  created_unix_s: u64
        40     4  lba_bytes: u32, 4096 in version 1
        44     4  segment_lba_count: u32, logical blocks of one segment
        48     4  segment_count: u32
        52     4  data_start_lba: u32, first block of segment 0 (256: the first MiB is for labels and their successors)
        56     4  crc32 (zlib) of bytes 0 to 55
        60  4036  zero

**Chunk header**: the first blocks of every shard's extent; units follow, each starting on a block boundary. Stored
next to the data so that the medium alone says what lies on it; the index remains what makes a chunk visible. ::

    offset  size  field
         0     8  magic b"MESHCHNK"
         8     4  header_version: u32, 1
        12     4  unit_count: u32
        16     4  unit_bytes: u32
        20     4  group: u32
        24     4  rank: u32
        28     4  segment: u32
        32     4  token_count: u32
        36     4  tenant_bytes: u32, at most 64
        40     8  position_tokens: u64, absolute token offset of the chunk
        48     8  generation: u64, of the segment when this was written
        56     8  lba: u64, of this header itself: a misdirected write is seen
        64    16  pool_uuid
        80    32  identity
       112    32  key
       144    64  tenant: UTF-8, then zero
       208   8*n  the n = unit_count unit digests (see meshfusion.jbof.digest)
     208+8n    4  crc32 (zlib) of everything before it
     212+8n       zero up to the next block boundary
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.envelope import (
    CRC_BYTES,
    FormatFault,
    MediumFormatError,
    check_magic,
    check_sealed,
    damaged,
    sealed,
)

FORMAT_VERSION: Final = 2  # 2: the digest sums in tiles
CHUNK_HEADER_VERSION: Final = 2
LBA_BYTES: Final = 4096
LABEL_LBAS: Final = (0, 1)
DATA_START_LBA: Final = 256
UUID_BYTES: Final = 16
IDENTITY_BYTES: Final = 32
KEY_BYTES: Final = 32
UNIT_DIGEST_BYTES: Final = 8
MAX_TENANT_BYTES: Final = 64
MAX_UNIT_COUNT: Final = 1 << 20

_LABEL_MAGIC: Final = b"MESHFUSN"
_LABEL: Final = struct.Struct("<8sII16sQIIII")
_CHUNK_MAGIC: Final = b"MESHCHNK"
_CHUNK: Final = struct.Struct("<8sIIIIIIIIQQQ16s32s32s64s")
assert _LABEL.size == 56
assert _CHUNK.size == 208


@dataclass(frozen=True, slots=True)
class Label:
    """What a pool is, for ever. ``pool_uuid``: 16 bytes."""

    pool_uuid: bytes
    created_unix_s: int
    segment_lba_count: int
    segment_count: int
    lba_bytes: int = LBA_BYTES
    data_start_lba: int = DATA_START_LBA

    @property
    def end_lba(self) -> int:
        """The first block after the last segment: what the medium must at least hold."""
        return self.data_start_lba + self.segment_lba_count * self.segment_count


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What one shard's extent holds. ``unit_digests``: 8 bytes for each unit; other bytes fields as in the layout."""

    pool_uuid: bytes
    identity: bytes
    key: bytes
    tenant: str
    group: int
    rank: int
    position_tokens: int
    token_count: int
    segment: int
    generation: int
    lba: int
    unit_bytes: int
    unit_digests: tuple[bytes, ...]

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


def encode_label(label: Label) -> bytes:
    """One logical block, to be written at each of ``LABEL_LBAS``."""
    assert len(label.pool_uuid) == UUID_BYTES
    assert label.lba_bytes == LBA_BYTES
    assert label.segment_lba_count > 0
    assert label.segment_count > 0
    assert label.data_start_lba > max(LABEL_LBAS)
    body = _LABEL.pack(
        _LABEL_MAGIC,
        FORMAT_VERSION,
        0,
        label.pool_uuid,
        label.created_unix_s,
        label.lba_bytes,
        label.segment_lba_count,
        label.segment_count,
        label.data_start_lba,
    )
    return sealed(body, LBA_BYTES)


def decode_label(data: bytes, *, where: str = "the pool", name: str = "its label") -> Label:
    """Read one copy of the label. Raises :class:`MediumFormatError`, whose message names the medium as ``where`` and
    the copy as ``name``."""
    what = f"{where}: {name}"
    check_magic(data, _LABEL_MAGIC, FORMAT_VERSION, what, "pool's label")
    if len(data) != LBA_BYTES:
        raise damaged(f"{what} is {len(data)} bytes long instead of {LBA_BYTES}")
    check_sealed(data, _LABEL.size, what)
    _, _, flags, pool_uuid, created, lba_bytes, segment_lbas, segments, data_start = _LABEL.unpack_from(data)
    if flags or lba_bytes != LBA_BYTES:
        raise MediumFormatError(
            FormatFault.VERSION,
            f"{what} has flags {flags:#x} and lba_bytes {lba_bytes}; this MeshFusion knows flags 0x0 and "
            f"lba_bytes {LBA_BYTES}",
            next_step="Open the pool with the MeshFusion version that wrote it, or create a new pool elsewhere.",
        )
    if not segment_lbas or not segments or data_start <= max(LABEL_LBAS):
        raise damaged(
            f"{what} has impossible sizes: segment_lba_count {segment_lbas}, segment_count {segments}, "
            f"data_start_lba {data_start}"
        )
    return Label(pool_uuid, created, segment_lbas, segments, lba_bytes, data_start)


def decode_label_copies(copies: Sequence[bytes], *, where: str = "the pool") -> Label:
    """The label as :func:`examine_label_copies` finds it."""
    return examine_label_copies(copies, where=where)[0]


def examine_label_copies(copies: Sequence[bytes], *, where: str = "the pool") -> tuple[Label, tuple[str, ...]]:
    """The label, and what is wrong with those of its ``copies`` that are damaged or foreign.

    Raises :class:`MediumFormatError` when no copy is valid, and also when one is of another version or two valid ones
    differ. Beside a valid copy, a torn or overwritten one says only that something wrote there: the checksum of the
    other proves what this pool is. But a whole label of another version means that another MeshFusion took this medium
    for its own, and what it changed besides is not known; of two valid labels, neither proves itself. So when unsure,
    refuse: only cached chunks are at stake.
    """
    assert len(copies) == len(LABEL_LBAS)
    labels: list[Label] = []
    errors: list[MediumFormatError] = []
    for data, lba, ordinal in zip(copies, LABEL_LBAS, ("first", "second"), strict=True):
        try:
            labels.append(
                decode_label(data, where=where, name=f"the {ordinal} copy of its label (byte {lba * LBA_BYTES})")
            )
        except MediumFormatError as error:
            errors.append(error)
    telling = list(FormatFault)
    worst = max(errors, key=lambda error: telling.index(error.fault), default=None)
    if worst is not None and (not labels or worst.fault is FormatFault.VERSION):
        raise worst
    if any(label != labels[0] for label in labels):
        raise damaged(f"{where}: the two copies of its label are both valid and contradict each other")
    return labels[0], tuple(error.message for error in errors)


def encode_chunk_header(header: ChunkHeader, lba_bytes: int = LBA_BYTES) -> bytes:
    """``header_lba_count(unit_count, lba_bytes)`` whole logical blocks."""
    tenant = header.tenant.encode()
    assert len(tenant) <= MAX_TENANT_BYTES
    assert len(header.pool_uuid) == UUID_BYTES
    assert len(header.identity) == IDENTITY_BYTES
    assert len(header.key) == KEY_BYTES
    assert header.unit_bytes > 0
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
        header.position_tokens,
        header.generation,
        header.lba,
        header.pool_uuid,
        header.identity,
        header.key,
        tenant,
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
    position_tokens, generation, lba, pool_uuid, identity, key, tenant_field = rest
    if tenant_bytes > MAX_TENANT_BYTES or not unit_bytes:
        raise damaged(f"{where} has impossible sizes: tenant_bytes {tenant_bytes}, unit_bytes {unit_bytes}")
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
        position_tokens=position_tokens,
        token_count=token_count,
        segment=segment,
        generation=generation,
        lba=lba,
        unit_bytes=unit_bytes,
        unit_digests=tuple(data[i : i + UNIT_DIGEST_BYTES] for i in range(_CHUNK.size, digests_end, UNIT_DIGEST_BYTES)),
    )


def _blocks(length_bytes: int, lba_bytes: int) -> int:
    assert length_bytes >= 0
    assert lba_bytes > 0
    return -(-length_bytes // lba_bytes)
