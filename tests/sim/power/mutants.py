"""Planted bugs. Each breaks one rule of the medium in the way a mistake would; the simulation must find every one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from meshfusion.dpu import rebuild_shards
from meshfusion.dpu.pool_medium import PoolMedium, ShelfMedium
from meshfusion.dpu.rebuild_shards import ShardGatherer
from meshfusion.jbof import recovery
from meshfusion.jbof.format import ChunkHeader, decode_chunk_header
from meshfusion.jbof.segment_format import SegmentHeader, decode_summary_part
from meshfusion.jbof.segments import Allocation, SegmentRecord, SegmentTable, SummaryState
from tests.sim.power import recovery as recovery_checks
from tests.sim.power.drive import Drive
from tests.sim.power.recovery import Drives
from tests.sim.power.world import Rules


class HeaderIsNotFlushed(PoolMedium):
    def open_segments(self, records: Iterable[SegmentRecord]) -> None:
        with patch.object(self._medium, "flush", lambda: None):
            super().open_segments(records)


class HeaderAfterExtentsLeave(PoolMedium):
    """Left to the next opening."""

    _late: tuple[SegmentRecord, ...] = ()

    def open_segments(self, records: Iterable[SegmentRecord]) -> None:
        records = tuple(records)
        if records:
            super().open_segments(self._late)
            self._late = records


class DeallocatesBeforeTheHeader(PoolMedium):
    def open_segments(self, records: Iterable[SegmentRecord]) -> None:
        records = tuple(records)
        for record in records:
            self._deallocate(record.segment)
        with patch.object(self._medium, "deallocate", lambda lba, lba_count: False):
            super().open_segments(records)


class DeallocatesTheHeaderToo(PoolMedium):
    def _deallocate(self, segment: int) -> None:
        self._medium.deallocate(self._geometry.first_lba(segment), self._geometry.segment_lba_count)


class OwnerIsNotFlushed(PoolMedium):
    def write_owner(self) -> None:
        with patch.object(self._medium, "flush", lambda: None):
            super().write_owner()


class NamesAnotherGeneration(PoolMedium):
    def _header(self, record: SegmentRecord) -> SegmentHeader:
        return replace(super()._header(record), generation=1)


class SummarizesUnderWriters(SegmentTable):
    def settled(self) -> tuple[SegmentRecord, ...]:
        return tuple(replace(self._record(index), is_summarized=True) for index in sorted(self._due))

    def summarizing(self, record: SegmentRecord) -> None:
        self._segments[record.segment].summary = SummaryState.UNDERWAY
        self._due.discard(record.segment)


class SummarizesTheOpenSegment(SummarizesUnderWriters):
    def settled(self) -> tuple[SegmentRecord, ...]:
        open_now = () if self._current is None else (self._current,)
        return tuple(
            replace(self._record(index), is_summarized=True)
            for index in (*sorted(self._due), *open_now)
            if self._segments[index].summary in (SummaryState.DUE, SummaryState.NONE)
        )

    def summarized(self, record: SegmentRecord, *, worked: bool) -> None:
        pass


class KeepsNoRoomForTheSummary(SegmentTable):
    def allocate(self, lba_count: int) -> Allocation | None:
        if self._current is None:
            return None
        segment = self._segments[self._current]
        if segment.next_lba + lba_count > self.geometry.end_lba(self._current):
            return None
        found = Allocation(self._current, segment.next_lba, lba_count, segment.generation)
        segment.next_lba += lba_count
        segment.extent_count += 1
        return found


class SkipsGeneration(SegmentTable):
    def open_next(self, now_s: float, may_reclaim: Callable[[int], bool]) -> SegmentRecord | None:
        record = super().open_next(now_s, may_reclaim)
        if record is not None and record.generation > 1:
            self._segments[record.segment].generation -= 1
            return replace(record, generation=record.generation - 1)
        return record


@dataclass
class LiesAboutFlush(Drive):
    """A drive that confirms a flush and does nothing: ours must not pass on it, or the test is blind."""

    def flush(self) -> None:
        self.on_write()


def _is_whole_unproven(chunk: Any, digest_of: Any) -> recovery.Reading[bool]:
    yield from ()
    return True


def _note_nothing(contents: Any, header: SegmentHeader, generation: int) -> None:
    pass


@contextlib.contextmanager
def _proves_nothing() -> Iterator[None]:
    with patch.object(recovery, "_is_whole", _is_whole_unproven):
        yield


@contextlib.contextmanager
def _believes_stale_headers() -> Iterator[None]:
    """Takes every chunk header of this segment for one of its generation."""
    real = decode_chunk_header

    def renewed(data: bytes, **options: Any) -> Any:
        return replace(real(data, **options), generation=_Current.generation)

    real_scan = recovery._scan

    def scan(drive: Any, header: SegmentHeader, *rest: Any) -> recovery.Reading[None]:
        _Current.generation = header.generation
        yield from real_scan(drive, header, *rest)

    with patch.object(recovery, "decode_chunk_header", renewed), patch.object(recovery, "_scan", scan):
        yield


class _Current:
    generation = 0


@contextlib.contextmanager
def _believes_stale_summaries() -> Iterator[None]:
    real = decode_summary_part

    def renewed(data: bytes, lba: int) -> Any:
        part = real(data, lba)
        return replace(part, summary=replace(part.summary, generation=_Current.generation))

    real_entries = recovery._summary_entries

    def entries(drive: Any, header: SegmentHeader, contents: Any) -> Any:
        _Current.generation = header.generation
        return (yield from real_entries(drive, header, contents))

    with patch.object(recovery, "decode_summary_part", renewed), patch.object(recovery, "_summary_entries", entries):
        yield


@contextlib.contextmanager
def _rebuilds_without_a_flush() -> Iterator[None]:
    real = recovery_checks.rebuilt_index

    def unflushed(drives: Drives, drive_count: int) -> Any:
        with contextlib.ExitStack() as stack:
            for drive in drives.values():
                stack.enter_context(patch.object(drive, "flush", lambda: None))
            return real(drives, drive_count)

    with (
        patch.object(recovery_checks, "rebuilt_index", unflushed),
        patch("tests.sim.power.world.rebuilt_index", unflushed),
    ):
        yield


@contextlib.contextmanager
def _offers_part_of_a_chunk() -> Iterator[None]:
    """As if each shard were all of its chunk."""
    real = ShardGatherer.add

    def add(gatherer: ShardGatherer, header: ChunkHeader) -> Any:
        return real(gatherer, replace(header, shard_count=1, rank=0))

    with patch.object(ShardGatherer, "add", add):
        yield


@contextlib.contextmanager
def _mixes_writes() -> Iterator[None]:
    """Takes shards of one chunk for those of one write."""
    real = rebuild_shards._write_of

    def of_any(header: ChunkHeader) -> Any:
        return replace(real(header), first_lba=0, first_generation=0)

    with patch.object(rebuild_shards, "_write_of", of_any):
        yield


class FlushesHeadersOnOneDrive(ShelfMedium):
    def open_segments(self, records: Iterable[SegmentRecord]) -> None:
        with contextlib.ExitStack() as stack:
            for number, medium in self._media.items():
                if number:
                    stack.enter_context(patch.object(medium._medium, "flush", lambda: None))
            super().open_segments(records)


class OpensOneOfEach(ShelfMedium):
    """Of segments that are opened together, the headers of the first one's drive only."""

    def open_segments(self, records: Iterable[SegmentRecord]) -> None:
        records = tuple(records)
        super().open_segments(record for record in records if record.segment >> 24 == records[0].segment >> 24)


MUTANTS: dict[str, Rules] = {
    "a holder leaves the flush out": Rules(flushes=False),
    "the drive's flush does nothing": Rules(drive=LiesAboutFlush),
    "the header is not flushed": Rules(medium=HeaderIsNotFlushed),
    "the header is written after extents leave": Rules(medium=HeaderAfterExtentsLeave),
    "deallocates before the header": Rules(medium=DeallocatesBeforeTheHeader),
    "deallocates the header": Rules(medium=DeallocatesTheHeaderToo),
    "the owner's epoch is not flushed": Rules(medium=OwnerIsNotFlushed),
    "the header names another generation": Rules(medium=NamesAnotherGeneration),
    "summarizes under writers": Rules(segments=SummarizesUnderWriters),
    "summarizes the open segment": Rules(segments=SummarizesTheOpenSegment),
    "keeps no room for the summary": Rules(segments=KeepsNoRoomForTheSummary),
    "skips the generation": Rules(segments=SkipsGeneration),
}
DRIVES_MUTANTS: dict[str, Rules] = {
    "a holder flushes one of the drives that it wrote to": Rules(flushes_all=False),
    "headers are flushed on one drive only": Rules(shelf_medium=FlushesHeadersOnOneDrive),
    "of segments opened together only one drive's have headers": Rules(shelf_medium=OpensOneOfEach),
}
RECOVERY_MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "a scan does not compare digests": _proves_nothing,
    "a scan believes stale chunk headers": _believes_stale_headers,
    "believes stale summaries": _believes_stale_summaries,
    "rebuilds from what is not flushed": _rebuilds_without_a_flush,
}
SHARDS_MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "offers part of a chunk": _offers_part_of_a_chunk,
    "mixes writes": _mixes_writes,
}
