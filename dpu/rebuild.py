"""An index made anew from what a pool's drives hold: which effects it takes. Reads come from outside.

Segments of all drives are applied in the order in which they were opened, so of a chunk that lies in two the later one
stays. A segment without a header that counts holds nothing: it is free, and its generation becomes later than any that
was seen on a drive, as is every opening's number: no generation is larger than the number of the pool's openings.

Chunks of several shards are offered when all of one write are found (:mod:`meshfusion.dpu.rebuild_shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Generic, Protocol, TypeVar

from meshfusion.dpu.api.types import ChunkRecord
from meshfusion.dpu.rebuild_shards import ShardGatherer
from meshfusion.dpu.store.effects import Effect, OpenSegment, PutChunk
from meshfusion.jbof.pool_addresses import drive_of_segment
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


@dataclass(frozen=True, slots=True)
class DriveReading(Generic[Found]):
    """A reading that is still to begin, and the number of the drive that it reads."""

    drive_number: int
    begin: Callable[[], Reading[Found]]


class RunAll(Protocol):
    """Lets readings run, several at a time if it likes; what they find comes in their order."""

    def __call__(self, readings: Iterable[DriveReading[Found]]) -> Iterator[Found]: ...


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """``segments_with_summary`` and ``segments_scanned``: those with a header that counts; the others are free.
    ``chunks_refused``: named by a summary or a header, and not what that says. ``shards_left_out``: of chunks with
    several, of which not all of one write were found. ``last_epoch``: of the owners that opened these segments."""

    segments_with_summary: int = 0
    segments_scanned: int = 0
    segments_free: int = 0
    chunks_found: int = 0
    chunks_refused: int = 0
    shards_left_out: int = 0
    last_epoch: int = 0


def rebuild(
    drives: Sequence[Drive],
    digest_of: DigestOf,
    run_all: RunAll,
    apply: Callable[[list[Effect]], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RebuildReport:
    """``drives``: of one pool, each with a number of its own. ``apply`` gets the effects that make the index, a
    transaction at a time. ``progress(done, total)`` counts segments of all drives, twice."""
    by_number = {drive.geometry.drive_number: drive for drive in drives}
    assert len(by_number) == len(drives), "two drives of one number"
    segments = _in_turn([drive.geometry.segments for drive in drives])
    total = 2 * len(segments)
    headers: list[SegmentHeader] = []
    for done, header in enumerate(run_all(_header_reading(by_number, segment) for segment in segments)):
        progress(done + 1, total)
        if header is not None:
            headers.append(header)
    headers.sort(key=lambda header: header.opened_seq)
    highest = max((max(header.generation, header.opened_seq) for header in headers), default=0)
    report = RebuildReport(last_epoch=max((header.owner_epoch for header in headers), default=0))
    gatherer = ShardGatherer()
    used: set[int] = set()
    readings = (_contents_reading(by_number, header, digest_of) for header in headers)
    for done, (header, contents) in enumerate(zip(headers, run_all(readings), strict=True)):
        progress(len(segments) + done + 1, total)
        highest = max(highest, contents.highest_generation)
        if contents.is_stale:
            continue
        used.add(header.segment)
        chunks = [chunk for found in contents.chunks if (chunk := gatherer.add(found)) is not None]
        report = _added(report, contents, chunks)
        apply([OpenSegment(_record(header, contents)), *map(PutChunk, chunks)])
    free = sorted(set(segments) - used)
    apply([OpenSegment(SegmentRecord(segment, highest + 1, opened_seq=0)) for segment in free])
    progress(total, total)
    return replace(report, segments_free=len(free), shards_left_out=gatherer.left_out + gatherer.waiting)


def _in_turn(each: Sequence[range]) -> list[int]:
    """The segments of all drives, one of each drive after the other, so that all of them have something to read."""
    return [segment for segment in chain.from_iterable(zip_longest(*each)) if segment is not None]


def _header_reading(drives: Mapping[int, Drive], segment: int) -> DriveReading[SegmentHeader | None]:
    number = drive_of_segment(segment)
    return DriveReading(number, partial(find_header, drives[number], segment))


def _contents_reading(
    drives: Mapping[int, Drive], header: SegmentHeader, digest_of: DigestOf
) -> DriveReading[SegmentContents]:
    return DriveReading(header.drive_number, partial(find_contents, drives[header.drive_number], header, digest_of))


def _added(report: RebuildReport, contents: SegmentContents, chunks: Sequence[ChunkRecord]) -> RebuildReport:
    return replace(
        report,
        segments_with_summary=report.segments_with_summary + contents.is_summarized,
        segments_scanned=report.segments_scanned + (not contents.is_summarized),
        chunks_found=report.chunks_found + len(chunks),
        chunks_refused=report.chunks_refused + contents.refused,
    )


def _record(header: SegmentHeader, contents: SegmentContents) -> SegmentRecord:
    return SegmentRecord(
        header.segment, header.generation, header.opened_seq, header.lifetime_class, contents.is_summarized
    )
