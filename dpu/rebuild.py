"""An index made anew from what the drive holds: which effects it takes. Reads come from outside.

Segments are applied in the order in which they were opened, so of a chunk that lies in two the later one stays. A
segment without a header that counts holds nothing: it is free, and its generation becomes later than any that was seen
on the drive, as is every opening's number: no generation is larger than the number of the pool's openings.

Chunks of several shards are left out: they lie in segments that are found at different times, and one shard alone must
never stand for a chunk (rule 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from meshfusion.dpu.api.types import ChunkRecord, Extent, Shard
from meshfusion.dpu.store.effects import Effect, OpenSegment, PutChunk
from meshfusion.jbof.format import LBA_BYTES, ChunkHeader, header_lba_count, shard_lba_count, unit_lba_count
from meshfusion.jbof.label import Label
from meshfusion.jbof.recovery import (
    DigestOf,
    Drive,
    Reading,
    SegmentContents,
    find_contents,
    find_header,
)
from meshfusion.jbof.segment_format import SegmentHeader
from meshfusion.jbof.segments import SegmentRecord

Found = TypeVar("Found")


class RunAll(Protocol):
    """Lets readings run, several at a time if it likes; what they find comes in their order."""

    def __call__(self, readings: Iterable[Callable[[], Reading[Found]]]) -> Iterator[Found]: ...


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """``segments_with_summary`` and ``segments_scanned``: those with a header that counts; the others are free.
    ``chunks_refused``: named by a summary or a header, and not what that says. ``shards_left_out``: of chunks with
    several. ``last_epoch``: of the owners that opened these segments."""

    segments_with_summary: int = 0
    segments_scanned: int = 0
    segments_free: int = 0
    chunks_found: int = 0
    chunks_refused: int = 0
    shards_left_out: int = 0
    last_epoch: int = 0


def rebuild(
    drive: Drive,
    digest_of: DigestOf,
    run_all: RunAll,
    apply: Callable[[list[Effect]], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RebuildReport:
    """``apply`` gets the effects that make the index, a transaction at a time. ``progress(done, total)`` counts
    segments, twice."""
    count = drive.geometry.segment_count
    headers: list[SegmentHeader] = []
    highest = 0
    for segment, header in enumerate(run_all(partial(find_header, drive, i) for i in range(count))):
        progress(segment + 1, 2 * count)
        if header is not None:
            headers.append(header)
            highest = max(highest, header.generation, header.opened_seq)
    headers.sort(key=lambda header: header.opened_seq)
    report = RebuildReport(last_epoch=max((header.owner_epoch for header in headers), default=0))
    readings = (partial(find_contents, drive, header, digest_of) for header in headers)
    used: set[int] = set()
    for done, (header, contents) in enumerate(zip(headers, run_all(readings), strict=True)):
        progress(count + done + 1, 2 * count)
        highest = max(highest, contents.highest_generation)
        if contents.is_stale:
            continue
        used.add(header.segment)
        chunks = [chunk for chunk in contents.chunks if (chunk.rank, chunk.shard_count) == (0, 1)]
        report = _added(report, contents, len(chunks))
        apply([OpenSegment(_record(header, contents)), *(PutChunk(_chunk(drive.label, chunk)) for chunk in chunks)])
    free = [i for i in range(count) if i not in used]
    apply([OpenSegment(SegmentRecord(i, highest + 1, opened_seq=0)) for i in free])
    progress(2 * count, 2 * count)
    return replace(report, segments_free=len(free))


def _added(report: RebuildReport, contents: SegmentContents, chunk_count: int) -> RebuildReport:
    return replace(
        report,
        segments_with_summary=report.segments_with_summary + contents.is_summarized,
        segments_scanned=report.segments_scanned + (not contents.is_summarized),
        chunks_found=report.chunks_found + chunk_count,
        chunks_refused=report.chunks_refused + contents.refused,
        shards_left_out=report.shards_left_out + len(contents.chunks) - chunk_count,
    )


def _record(header: SegmentHeader, contents: SegmentContents) -> SegmentRecord:
    return SegmentRecord(
        header.segment, header.generation, header.opened_seq, header.lifetime_class, contents.is_summarized
    )


def _chunk(label: Label, header: ChunkHeader) -> ChunkRecord:
    lba_count = shard_lba_count(header.unit_bytes, header.unit_count, LBA_BYTES)
    shard = Shard(
        rank=header.rank,
        extent=Extent(label.drive_number + 1, header.segment, header.lba, lba_count, header.generation),
        payload_lba_offset=header_lba_count(header.unit_count, LBA_BYTES),
        unit_lba_count=unit_lba_count(header.unit_bytes, LBA_BYTES),
        unit_bytes=header.unit_bytes,
        unit_digests=header.unit_digests,
    )
    return ChunkRecord(
        header.key,
        header.identity,
        header.tenant,
        header.group,
        header.position_tokens,
        header.token_count,
        (shard,),
    )
