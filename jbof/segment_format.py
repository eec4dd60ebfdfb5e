"""Headers and summaries of segments on the medium: pure codecs, no I/O.

**Segment header**: the first block of each segment that was ever opened. It is durable before any extent of the segment
leaves the service, and is overwritten only by that of the next generation: while a block lives, so does the generation.

::

    offset  size  field
         0     8  magic b"MESHSEGM"
         8     4  header_version: u32, 3
        12     4  segment: u32
        16     8  generation: u64
        24     8  opened_seq: u64, orders openings over the pool's life
        32     8  owner_epoch: u64, of the owner that opened it
        40     8  lba: u64, of this block itself: a misdirected write is seen
        48     2  drive_number: u16
        50     2  lifetime_class: u16
        52     4  zero
        56    16  pool_uuid
        72    16  drive_uuid
        88     4  crc32 (zlib) of bytes 0 to 87
        92  4004  zero

**Segment summary**: which extents of a segment were committed. Written once the segment is sealed and no writer is
left, into its last blocks: block 0 of the summary is the segment's last, block 1 the one before, and so on. ::

    offset  size  field
         0     8  magic b"MESHSUMM"
         8     4  summary_version: u32, 3
        12     4  segment: u32
        16     8  generation: u64
        24     8  lba: u64, of this block itself
        32     4  entry_count: u32, of the whole summary
        36     4  first_entry: u32, the number of this block's first entry
        40     4  entries_crc32: u32 (zlib), of all entries in order: blocks of one writing belong together
        44     2  drive_number: u16
        46     2  zero
        48    16  pool_uuid
        64    16  drive_uuid
        80  16*n  n = min(250, entry_count - first_entry) entries, by lba_offset
       ...     4  crc32 (zlib) of everything before it
       ...        zero up to the block's end

    entry:   0     4  lba_offset: u32, from the segment's first block to the extent's
             4     4  lba_count: u32
             8     8  the first bytes of the chunk's key
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from meshfusion.jbof.envelope import CRC_BYTES, check_magic, check_sealed, damaged, sealed
from meshfusion.jbof.format import LBA_BYTES, UUID_BYTES

SEGMENT_HEADER_VERSION: Final = 3
SEGMENT_HEADER_LBAS: Final = 1
SUMMARY_VERSION: Final = 3
KEY_PREFIX_BYTES: Final = 8

_HEADER_MAGIC: Final = b"MESHSEGM"
_HEADER: Final = struct.Struct("<8sIIQQQQHHI16s16s")
_SUMMARY_MAGIC: Final = b"MESHSUMM"
_SUMMARY: Final = struct.Struct("<8sIIQQIIIHH16s16s")
_ENTRY: Final = struct.Struct(f"<II{KEY_PREFIX_BYTES}s")
ENTRIES_PER_BLOCK: Final = (LBA_BYTES - _SUMMARY.size - CRC_BYTES) // _ENTRY.size
assert (_HEADER.size, _SUMMARY.size, _ENTRY.size, ENTRIES_PER_BLOCK) == (88, 80, 16, 250)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The UUIDs are 16 bytes each; ``lba``: where the header lies."""

    pool_uuid: bytes
    drive_uuid: bytes
    drive_number: int
    segment: int
    generation: int
    opened_seq: int
    owner_epoch: int
    lifetime_class: int
    lba: int


@dataclass(frozen=True, slots=True)
class SummaryEntry:
    """A committed extent: ``lba_offset`` from the segment's first block; ``key_prefix``: ``KEY_PREFIX_BYTES``."""

    lba_offset: int
    lba_count: int
    key_prefix: bytes


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """``entries`` by ``lba_offset``; no two overlap. ``end_lba``: the first block after the segment."""

    pool_uuid: bytes
    drive_uuid: bytes
    drive_number: int
    segment: int
    generation: int
    end_lba: int
    entries: tuple[SummaryEntry, ...]


@dataclass(frozen=True, slots=True)
class SummaryPart:
    """One block of a summary; ``entry_count`` and ``entries_crc32`` are the whole summary's."""

    summary: SegmentSummary  # with the entries of this block only
    entry_count: int
    first_entry: int
    entries_crc32: int


def summary_lba_count(entry_count: int) -> int:
    """Blocks of a summary of so many extents; an empty one has a block too."""
    assert entry_count >= 0
    return max(1, -(-entry_count // ENTRIES_PER_BLOCK))


def encode_segment_header(header: SegmentHeader) -> bytes:
    """One logical block, for ``header.lba``."""
    assert len(header.pool_uuid) == len(header.drive_uuid) == UUID_BYTES
    body = _HEADER.pack(
        _HEADER_MAGIC,
        SEGMENT_HEADER_VERSION,
        header.segment,
        header.generation,
        header.opened_seq,
        header.owner_epoch,
        header.lba,
        header.drive_number,
        header.lifetime_class,
        0,
        header.pool_uuid,
        header.drive_uuid,
    )
    return sealed(body, LBA_BYTES)


def decode_segment_header(data: bytes, *, where: str = "the segment header") -> SegmentHeader:
    """Raises :class:`~meshfusion.jbof.envelope.MediumFormatError`."""
    check_magic(data, _HEADER_MAGIC, SEGMENT_HEADER_VERSION, where, "segment header")
    if len(data) != LBA_BYTES:
        raise damaged(f"{where} is {len(data)} bytes long instead of {LBA_BYTES}")
    check_sealed(data, _HEADER.size, where)
    _, _, segment, generation, seq, epoch, lba, drive, lifetime, _, pool_uuid, drive_uuid = _HEADER.unpack_from(data)
    return SegmentHeader(pool_uuid, drive_uuid, drive, segment, generation, seq, epoch, lifetime, lba)


def encode_summary(summary: SegmentSummary) -> bytes:
    """``summary_lba_count(len(entries))`` whole blocks, in the order in which they lie before ``end_lba``."""
    assert len(summary.pool_uuid) == len(summary.drive_uuid) == UUID_BYTES
    assert _are_apart(summary.entries), summary.entries
    packed = [_ENTRY.pack(entry.lba_offset, entry.lba_count, entry.key_prefix) for entry in summary.entries]
    crc = zlib.crc32(b"".join(packed))
    blocks = []
    for number in range(summary_lba_count(len(packed))):
        first = number * ENTRIES_PER_BLOCK
        body = _SUMMARY.pack(
            _SUMMARY_MAGIC,
            SUMMARY_VERSION,
            summary.segment,
            summary.generation,
            summary.end_lba - 1 - number,
            len(packed),
            first,
            crc,
            summary.drive_number,
            0,
            summary.pool_uuid,
            summary.drive_uuid,
        )
        blocks.append(sealed(body + b"".join(packed[first : first + ENTRIES_PER_BLOCK]), LBA_BYTES))
    return b"".join(reversed(blocks))


def decode_summary_part(data: bytes, lba: int, *, where: str = "the segment summary") -> SummaryPart:
    """One block of a summary, which lies at ``lba``. Raises :class:`~meshfusion.jbof.envelope.MediumFormatError`."""
    check_magic(data, _SUMMARY_MAGIC, SUMMARY_VERSION, where, "segment summary")
    if len(data) != LBA_BYTES:
        raise damaged(f"{where} is {len(data)} bytes long instead of {LBA_BYTES}")
    _, _, segment, generation, its_lba, total, first, crc, drive, _, pool_uuid, drive_uuid = _SUMMARY.unpack_from(data)
    count = min(ENTRIES_PER_BLOCK, total - first)
    if count < 0 or first % ENTRIES_PER_BLOCK or (first and not count):
        raise damaged(f"{where} has an impossible size: entry {first} of {total}")
    check_sealed(data, _SUMMARY.size + count * _ENTRY.size, where)
    if its_lba != lba:
        raise damaged(f"{where} lies at block {lba} and was meant for block {its_lba}")
    raw = data[_SUMMARY.size : _SUMMARY.size + count * _ENTRY.size]
    entries = tuple(SummaryEntry(*fields) for fields in _ENTRY.iter_unpack(raw))
    end_lba = lba + 1 + first // ENTRIES_PER_BLOCK
    return SummaryPart(
        SegmentSummary(pool_uuid, drive_uuid, drive, segment, generation, end_lba, entries), total, first, crc
    )


def decode_summary(data: bytes, end_lba: int, *, where: str = "the segment summary") -> SegmentSummary:
    """A whole summary from the blocks before ``end_lba``. Raises :class:`~meshfusion.jbof.envelope.MediumFormatError`,
    also when they are not of one writing."""
    assert data
    assert len(data) % LBA_BYTES == 0
    parts = [
        decode_summary_part(data[at : at + LBA_BYTES], end_lba - (len(data) - at) // LBA_BYTES, where=where)
        for at in range(len(data) - LBA_BYTES, -1, -LBA_BYTES)
    ]
    first = parts[0]
    entries = tuple(entry for part in parts for entry in part.summary.entries)
    one_writing = all(
        (part.entry_count, part.entries_crc32, part.first_entry) == (first.entry_count, first.entries_crc32, at)
        and _place(part.summary) == _place(first.summary)
        for part, at in zip(parts, range(0, len(parts) * ENTRIES_PER_BLOCK, ENTRIES_PER_BLOCK), strict=True)
    )
    crc = zlib.crc32(b"".join(_ENTRY.pack(e.lba_offset, e.lba_count, e.key_prefix) for e in entries))
    if not one_writing or len(entries) != first.entry_count or crc != first.entries_crc32 or not _are_apart(entries):
        raise damaged(f"{where} is damaged: its blocks do not belong together")
    return SegmentSummary(*_place(first.summary), entries)


def _place(summary: SegmentSummary) -> tuple[bytes, bytes, int, int, int, int]:
    """All but the entries."""
    return (
        summary.pool_uuid,
        summary.drive_uuid,
        summary.drive_number,
        summary.segment,
        summary.generation,
        summary.end_lba,
    )


def _are_apart(entries: Sequence[SummaryEntry]) -> bool:
    """In order, none empty, none over another."""
    in_order = all(a.lba_offset + a.lba_count <= b.lba_offset for a, b in pairwise(entries))
    return in_order and all(entry.lba_count > 0 for entry in entries)
