"""Both recoveries of what a power cut leaves, and what must be true of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from meshfusion.dpu.api.types import ChunkRecord, Extent
from meshfusion.dpu.rebuild import RebuildReport, rebuild
from meshfusion.jbof import recovery
from meshfusion.jbof.epoch_record import last_epoch
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LBA_BYTES, OWNER_LBAS, decode_chunk_header
from meshfusion.jbof.label import Label
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord, SegmentTable
from tests.sim.medium import IndexModel, must
from tests.sim.power.drive import Drive

Found = TypeVar("Found")

GEOMETRY = SegmentGeometry(lba_bytes=LBA_BYTES, data_start_lba=4, segment_lba_count=12, segment_count=5)
LABEL = Label(
    pool_uuid=b"pool" * 4,
    drive_uuid=b"driv" * 4,
    created_unix_s=0,
    segment_lba_count=GEOMETRY.segment_lba_count,
    segment_count=GEOMETRY.segment_count,
    data_start_lba=GEOMETRY.data_start_lba,
)
# Its header, the last block; of each extent its header twice, its units, and a piece of the scan.
READS_PER_SEGMENT = 2 + 4 * GEOMETRY.segment_lba_count


def digest_of(unit: bytes) -> bytes:
    return hashlib.blake2b(unit, digest_size=8).digest()


class ModelIndex(IndexModel):
    """The index as the writer wants it."""

    def chunks_in(self, record: SegmentRecord) -> list[ChunkRecord] | None:
        if self.generation(record.segment) != record.generation:
            return None
        places = ((chunk, shard.extent.segment) for chunk in self.chunks.values() for shard in chunk.shards)
        return [chunk for chunk, segment in places if segment == record.segment]

    def copy(self) -> ModelIndex:
        other = ModelIndex()
        other.chunks, other.segments = dict(self.chunks), dict(self.segments)
        other.holders, other.epoch = dict(self.holders), self.epoch
        return other


@dataclass(frozen=True)
class Expected:
    """``written``: everything that was ever written for a key, whole. ``handed_out``: the latest generation of each
    segment of which an extent left. ``epoch``: the last that served. ``is_sound``: the drive does what it says."""

    written: dict[bytes, set[bytes]]
    handed_out: dict[int, int]
    epoch: int
    is_sound: bool


def check_normal(drive: Drive, index: ModelIndex, expected: Expected, seen: Counter[str]) -> None:
    """The index survived: what it shows is there."""
    table = SegmentTable(GEOMETRY, index.segments.values())
    for chunk in index.chunks.values():
        readable = all(table.is_readable(s.extent.segment, s.extent.generation) for s in chunk.shards)
        must(readable, "a chunk of another generation is in the index", chunk)
        _check_chunk(drive, chunk, expected, seen)
    _check_capacity(table)


def check_rebuilt(drive: Drive, index: ModelIndex, expected: Expected, seen: Counter[str]) -> ModelIndex:
    """The index is lost. ``index``: what it showed, all of which must be found again."""
    drive.reads = 0
    rebuilt, report = rebuilt_index(drive)
    reads_max = READS_PER_SEGMENT * GEOMETRY.segment_count
    must(drive.reads <= reads_max, "the rebuild's reads are not bounded", drive.reads, reads_max)
    must(rebuilt.epoch > expected.epoch or not expected.is_sound, "an epoch came again", rebuilt.epoch, expected.epoch)
    for segment, generation in expected.handed_out.items():
        is_later = rebuilt.generation(segment) >= generation
        must(is_later or not expected.is_sound, "a generation came again", segment, generation)
    table = SegmentTable(GEOMETRY, rebuilt.segments.values())
    for chunk in rebuilt.chunks.values():
        readable = all(table.is_readable(s.extent.segment, s.extent.generation) for s in chunk.shards)
        must(readable, "a chunk of another generation was believed", chunk)
        _check_chunk(drive, chunk, expected, seen)
    lost = index.chunks.keys() - rebuilt.chunks.keys()
    must(not lost or not expected.is_sound, "committed chunks were not found again", [index.chunks[k] for k in lost])
    seen["chunks found again"] += len(rebuilt.chunks)
    seen["segments with a summary"] += report.segments_with_summary
    seen["segments scanned"] += report.segments_scanned
    seen["extents refused"] += report.chunks_refused
    _check_capacity(table)
    return rebuilt


def rebuilt_index(drive: Drive) -> tuple[ModelIndex, RebuildReport]:
    """As the service does it, but for the threads."""

    def run_all(readings: Iterable[Callable[[], recovery.Reading[Found]]]) -> Iterator[Found]:
        for begin in readings:
            reading, data = begin(), None
            try:
                while True:
                    asked = reading.send(data)
                    data = drive.read_blocks(asked.lba, asked.lba_count)
            except StopIteration as ended:
                yield ended.value

    drive.flush()
    index = ModelIndex()
    report = rebuild(recovery.Drive(LABEL, GEOMETRY), digest_of, run_all, index.apply)
    epoch = last_epoch([drive.read_blocks(lba, 1) for lba in OWNER_LBAS], LABEL)
    index.epoch = max(epoch, report.last_epoch) + 1
    return index, report


def bytes_of(drive: Drive, chunk: ChunkRecord) -> bytes | None:
    """The units of a chunk as a reader gets them: None when they do not match their digests, and it drops it."""
    (shard,) = chunk.shards
    extent = shard.extent
    data = b"".join(drive.read(extent.lba + i) for i in range(extent.lba_count))
    units = data[shard.payload_lba_offset * LBA_BYTES :]
    step = shard.unit_lba_count * LBA_BYTES
    found = [digest_of(units[i * step : i * step + shard.unit_bytes]) for i in range(len(shard.unit_digests))]
    return units if tuple(found) == shard.unit_digests else None


def _check_chunk(drive: Drive, chunk: ChunkRecord, expected: Expected, seen: Counter[str]) -> None:
    units = bytes_of(drive, chunk)
    if units is None:
        must(not expected.is_sound, "an offered chunk is not what was committed", chunk)
        seen["found by their digests"] += 1
        return
    must(units in expected.written.get(chunk.key, ()), "a chunk holds another's bytes", chunk)
    if expected.is_sound:
        _check_header(drive, chunk, chunk.shards[0].extent)


def _check_header(drive: Drive, chunk: ChunkRecord, extent: Extent) -> None:
    try:
        header = decode_chunk_header(drive.read(extent.lba))
    except FormatError as error:
        must(False, "an offered chunk has no header", chunk, error.message)
        raise
    told = (header.key, header.identity, header.segment, header.generation, header.lba)
    must(told == (chunk.key, chunk.identity, extent.segment, extent.generation, extent.lba), "another header", header)


def _check_capacity(table: SegmentTable) -> None:
    """Every segment can be had once more, each in a later generation."""
    counts = table.counts()
    must(counts.free + counts.sealed == GEOMETRY.segment_count, "capacity does not add up", counts)
    got = set()
    for _ in range(GEOMETRY.segment_count):
        record = table.open_next(1.0, lambda _: True)
        must(record is not None, "a segment was lost", counts)
        assert record is not None
        got.add(record.segment)
        table.opened(replace(record))
    must(len(got) == GEOMETRY.segment_count, "a segment was handed out twice", got)
