"""What a drive holds, found from the drive alone: one segment at a time, as generators that ask for reads. No I/O.

A generator yields :class:`Read`, is sent the blocks (or None when they cannot be read), and returns what it found. How
many reads it takes is bounded, whatever lies there in honest use:

- a segment's header: one;
- a segment with a summary: one for each block of it but the first two, which take two, and for each extent it names up
  to two;
- one without, which was open or is new: one for each ``SCAN_LBA_COUNT`` blocks, and for each extent one for its header
  and one for each unit, or for as many units as fit ``SCAN_LBA_COUNT`` blocks. No block is read more than twice.

What counts is what names this pool, this place and the segment's own generation. A chunk that a summary names was
committed: it was flushed, and its header is looked at. In a segment without one all units are compared with their
digests: what is whole counts, committed or not, since its key and its digests say what it is. A block of a generation
later than the header's shows that the header's write was lost: nothing there is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import (
    LBA_BYTES,
    ChunkHeader,
    decode_chunk_header,
    header_lba_count,
    peek_unit_count,
    shard_lba_count,
    unit_lba_count,
)
from meshfusion.jbof.label import Label
from meshfusion.jbof.segment_format import (
    SEGMENT_HEADER_LBAS,
    SegmentHeader,
    SummaryEntry,
    decode_segment_header,
    decode_summary,
    decode_summary_part,
    summary_lba_count,
)
from meshfusion.jbof.segments import SegmentGeometry

SCAN_LBA_COUNT: Final = 256

Found = TypeVar("Found")
DigestOf = Callable[[bytes], bytes]  # of one unit


@dataclass(frozen=True, slots=True)
class Read:
    """Of the drive that is looked at."""

    lba: int
    lba_count: int


Reading = Generator[Read, bytes | None, Found]


@dataclass(frozen=True, slots=True)
class Drive:
    """What is looked at."""

    label: Label
    geometry: SegmentGeometry


@dataclass(slots=True)
class SegmentContents:
    """``chunks``: by their place. ``highest_generation``: of all that was seen. ``is_stale``: the header is one of
    before, and nothing counts. ``refused``: extents that a summary or a header names and that are not what it says."""

    chunks: list[ChunkHeader] = field(default_factory=list)
    highest_generation: int = 0
    is_summarized: bool = False
    is_stale: bool = False
    refused: int = 0


def find_header(drive: Drive, segment: int) -> Reading[SegmentHeader | None]:
    """The segment's header; None when there is none that counts."""
    lba = drive.geometry.first_lba(segment)
    data = yield Read(lba, SEGMENT_HEADER_LBAS)
    try:
        header = decode_segment_header(data or b"")
    except FormatError:
        return None
    label = drive.label
    ours = (label.pool_uuid, label.drive_uuid, label.drive_number, segment, lba)
    theirs = (header.pool_uuid, header.drive_uuid, header.drive_number, header.segment, header.lba)
    return header if theirs == ours and header.generation and header.opened_seq else None


def find_contents(drive: Drive, header: SegmentHeader, digest_of: DigestOf) -> Reading[SegmentContents]:
    """What the segment of ``header`` holds. ``digest_of`` sees every unit of a segment without a summary."""
    contents = SegmentContents(highest_generation=header.generation)
    entries = yield from _summary_entries(drive, header, contents)
    if entries is None:
        yield from _scan(drive, header, digest_of, contents)
    else:
        contents.is_summarized = True
        for entry in entries:
            chunk = yield from _named_chunk(drive, header, entry)
            if chunk is None:
                contents.refused += 1
            else:
                contents.chunks.append(chunk)
    if contents.is_stale:
        contents.chunks.clear()
    return contents


def _summary_entries(
    drive: Drive, header: SegmentHeader, contents: SegmentContents
) -> Reading[tuple[SummaryEntry, ...] | None]:
    """None when there is no summary of this generation."""
    end_lba = drive.geometry.end_lba(header.segment)
    last = yield Read(end_lba - 1, 1)
    try:
        part = decode_summary_part(last or b"", end_lba - 1)
        found = part.summary
        if not _is_ours(drive, header, found.pool_uuid, found.segment) or found.drive_uuid != drive.label.drive_uuid:
            return None
        _note_generation(contents, header, found.generation)
        lba_count = summary_lba_count(part.entry_count)
        if found.generation != header.generation or lba_count >= drive.geometry.segment_lba_count:
            return None
        before = b""
        if lba_count > 1:
            before = (yield Read(end_lba - lba_count, lba_count - 1)) or b""
        summary = decode_summary(before + (last or b""), end_lba)
    except FormatError:
        return None
    return summary.entries


def _named_chunk(drive: Drive, header: SegmentHeader, entry: SummaryEntry) -> Reading[ChunkHeader | None]:
    """The chunk that a summary names, when its header says the same."""
    lba = drive.geometry.first_lba(header.segment) + entry.lba_offset
    if lba + entry.lba_count > drive.geometry.end_lba(header.segment):
        return None
    data = (yield Read(lba, 1)) or b""
    chunk = yield from _chunk_header(lba, entry.lba_count, data)
    if chunk is None or not _is_ours(drive, header, chunk.pool_uuid, chunk.segment):
        return None
    is_named = chunk.key.startswith(entry.key_prefix) and _lba_count(chunk) == entry.lba_count
    return chunk if is_named and (chunk.generation, chunk.lba) == (header.generation, lba) else None


def _scan(drive: Drive, header: SegmentHeader, digest_of: DigestOf, contents: SegmentContents) -> Reading[None]:
    lba = drive.geometry.first_lba(header.segment) + SEGMENT_HEADER_LBAS
    end_lba = drive.geometry.end_lba(header.segment) - summary_lba_count(1)
    while lba < end_lba:
        lba_count = min(SCAN_LBA_COUNT, end_lba - lba)
        data = yield Read(lba, lba_count)
        at = lba
        while data is not None and at < lba + lba_count:
            block = data[(at - lba) * LBA_BYTES : (at - lba + 1) * LBA_BYTES]
            chunk = yield from _chunk_header(at, end_lba - at, block)
            is_here = chunk is not None and chunk.lba == at and _is_ours(drive, header, chunk.pool_uuid, chunk.segment)
            at += 1
            if chunk is None or not is_here:
                continue
            _note_generation(contents, header, chunk.generation)
            if chunk.generation != header.generation:
                continue
            if (yield from _is_whole(chunk, digest_of)):
                contents.chunks.append(chunk)
                at = chunk.lba + _lba_count(chunk)
            else:
                contents.refused += 1
        lba = max(at, lba + (lba_count if data is None else 0))


def _chunk_header(lba: int, room_lba_count: int, block: bytes) -> Reading[ChunkHeader | None]:
    """The chunk header that begins with ``block`` at ``lba``, of a shard of at most ``room_lba_count`` blocks."""
    try:
        lba_count = header_lba_count(peek_unit_count(block))
        if lba_count >= room_lba_count:
            return None
        if lba_count > 1:
            block = (yield Read(lba, lba_count)) or b""
        chunk = decode_chunk_header(block)
    except FormatError:
        return None
    return chunk if _lba_count(chunk) <= room_lba_count else None


def _is_whole(chunk: ChunkHeader, digest_of: DigestOf) -> Reading[bool]:
    """Does every unit match its digest?"""
    unit_lbas = unit_lba_count(chunk.unit_bytes)
    first_lba = chunk.lba + header_lba_count(chunk.unit_count)
    at_once = max(1, SCAN_LBA_COUNT // unit_lbas)
    for first in range(0, chunk.unit_count, at_once):
        digests = chunk.unit_digests[first : first + at_once]
        data = yield Read(first_lba + first * unit_lbas, len(digests) * unit_lbas)
        if data is None:
            return False
        for i, digest in enumerate(digests):
            start = i * unit_lbas * LBA_BYTES
            if digest_of(data[start : start + chunk.unit_bytes]) != digest:
                return False
    return True


def _is_ours(drive: Drive, header: SegmentHeader, pool_uuid: bytes, segment: int) -> bool:
    return (pool_uuid, segment) == (drive.label.pool_uuid, header.segment)


def _note_generation(contents: SegmentContents, header: SegmentHeader, generation: int) -> None:
    contents.highest_generation = max(contents.highest_generation, generation)
    contents.is_stale |= generation > header.generation


def _lba_count(chunk: ChunkHeader) -> int:
    return shard_lba_count(chunk.unit_bytes, chunk.unit_count)
