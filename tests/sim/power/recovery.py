"""Both recoveries of what a power cut leaves, and what must be true of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from meshfusion.dpu.api.types import ChunkRecord, Extent, Shard
from meshfusion.dpu.rebuild import DriveReading, RebuildReport, rebuild
from meshfusion.jbof import recovery
from meshfusion.jbof.epoch_record import last_epoch
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LBA_BYTES, OWNER_LBAS, decode_chunk_header
from meshfusion.jbof.label import Label
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord, SegmentTable
from tests.sim.medium import IndexModel, must
from tests.sim.power.drive import Drive

Found = TypeVar("Found")

POOL_UUID = b"pool" * 4
SEGMENT_LBA_COUNT = 12
SEGMENT_COUNTS = {1: 5, 3: 3}  # of each drive, by how many drives there are
Drives = Mapping[int, Drive]  # by number
# Its header, the last block; of each extent its header twice, its units, and a piece of the scan.
READS_PER_SEGMENT = 2 + 4 * SEGMENT_LBA_COUNT


def geometry_of(number: int, drive_count: int) -> SegmentGeometry:
    return SegmentGeometry(LBA_BYTES, 4, SEGMENT_LBA_COUNT, SEGMENT_COUNTS[drive_count], number)


def label_of(geometry: SegmentGeometry) -> Label:
    return Label(
        pool_uuid=POOL_UUID,
        drive_uuid=b"driv" * 3 + geometry.drive_number.to_bytes(4, "big"),
        created_unix_s=0,
        segment_lba_count=geometry.segment_lba_count,
        segment_count=geometry.segment_count,
        data_start_lba=geometry.data_start_lba,
        drive_number=geometry.drive_number,
    )


def digest_of(unit: bytes) -> bytes:
    return hashlib.blake2b(unit, digest_size=8).digest()


class ModelIndex(IndexModel):
    """The index as the writer wants it."""

    def chunks_in(self, record: SegmentRecord) -> list[ChunkRecord] | None:
        if self.generation(record.segment) != record.generation:
            return None
        return [
            chunk
            for chunk in self.chunks.values()
            if any(shard.extent.segment == record.segment for shard in chunk.shards)
        ]

    def copy(self) -> ModelIndex:
        other = ModelIndex()
        other.chunks, other.segments = dict(self.chunks), dict(self.segments)
        other.holders, other.epoch = dict(self.holders), self.epoch
        return other


@dataclass(frozen=True)
class Expected:
    """``written``: everything that was ever written for a key, whole. ``handed_out``: the latest generation of each
    segment of which an extent left. ``epoch``: the last that served. ``is_sound``: the drives do what they say.
    ``drive_count``: of the pool."""

    written: dict[bytes, set[bytes]]
    handed_out: dict[int, int]
    epoch: int
    is_sound: bool
    drive_count: int

    def geometry(self, number: int) -> SegmentGeometry:
        return geometry_of(number, self.drive_count)

    def tables(self, index: ModelIndex, numbers: Iterable[int]) -> dict[int, SegmentTable]:
        geometries = map(self.geometry, numbers)
        return {
            geometry.drive_number: SegmentTable(
                geometry, (record for record in index.segments.values() if record.segment in geometry.segments)
            )
            for geometry in geometries
        }


def check_normal(drives: Drives, index: ModelIndex, expected: Expected, seen: Counter[str]) -> None:
    """The index survived: what it shows is there."""
    tables = expected.tables(index, drives)
    for chunk in index.chunks.values():
        must(_is_readable(tables, chunk), "a chunk of another generation is in the index", chunk)
        _check_chunk(drives, chunk, expected, seen)
    _check_capacity(tables)


def check_rebuilt(drives: Drives, index: ModelIndex, expected: Expected, seen: Counter[str]) -> ModelIndex:
    """The index is lost. ``index``: what it showed, all of which must be found again, but for what has a shard on a
    drive that is not in ``drives``."""
    for drive in drives.values():
        drive.reads = 0
    rebuilt, report = rebuilt_index(drives, expected.drive_count)
    reads = sum(drive.reads for drive in drives.values())
    reads_max = READS_PER_SEGMENT * SEGMENT_COUNTS[expected.drive_count] * len(drives)
    must(reads <= reads_max, "the rebuild's reads are not bounded", reads, reads_max)
    must(rebuilt.epoch > expected.epoch or not expected.is_sound, "an epoch came again", rebuilt.epoch, expected.epoch)
    for segment, generation in expected.handed_out.items():
        is_later = drive_of_segment(segment) not in drives or rebuilt.generation(segment) >= generation
        must(is_later or not expected.is_sound, "a generation came again", segment, generation)
    tables = expected.tables(rebuilt, drives)
    for chunk in rebuilt.chunks.values():
        must(_is_readable(tables, chunk), "a chunk of another generation was believed", chunk)
        _check_chunk(drives, chunk, expected, seen)
        seen["chunks of several shards found again"] += len(chunk.shards) > 1
    here = [key for key, chunk in index.chunks.items() if all(s.extent.namespace - 1 in drives for s in chunk.shards)]
    lost = set(here) - rebuilt.chunks.keys()
    must(not lost or not expected.is_sound, "committed chunks were not found again", [index.chunks[k] for k in lost])
    seen["chunks found again"] += len(rebuilt.chunks)
    seen["segments with a summary"] += report.segments_with_summary
    seen["segments scanned"] += report.segments_scanned
    seen["extents refused"] += report.chunks_refused
    seen["shards left out"] += report.shards_left_out
    _check_capacity(tables)
    return rebuilt


def rebuilt_index(drives: Drives, drive_count: int) -> tuple[ModelIndex, RebuildReport]:
    """As the service does it, but for the threads."""

    def run_all(readings: Iterable[DriveReading[Found]]) -> Iterator[Found]:
        for wanted in readings:
            reading, data = wanted.begin(), None
            try:
                while True:
                    asked = reading.send(data)
                    data = drives[wanted.drive_number].read_blocks(asked.lba, asked.lba_count)
            except StopIteration as ended:
                yield ended.value

    for drive in drives.values():
        drive.flush()
    index = ModelIndex()
    geometries = [geometry_of(number, drive_count) for number in drives]
    looked_at = [recovery.Drive(label_of(geometry), geometry) for geometry in geometries]
    report = rebuild(looked_at, digest_of, run_all, index.apply)
    for one in looked_at:
        copies = [drives[one.label.drive_number].read_blocks(lba, 1) for lba in OWNER_LBAS]
        index.epoch = max(index.epoch, last_epoch(copies, one.label))
    index.epoch = max(index.epoch, report.last_epoch) + 1
    return index, report


def _is_readable(tables: Mapping[int, SegmentTable], chunk: ChunkRecord) -> bool:
    extents = [shard.extent for shard in chunk.shards]
    assert all(extent.namespace - 1 == drive_of_segment(extent.segment) for extent in extents)
    return all(
        extent.namespace - 1 in tables and tables[extent.namespace - 1].is_readable(extent.segment, extent.generation)
        for extent in extents
    )


def bytes_of(drives: Drives, chunk: ChunkRecord) -> bytes | None:
    """The units of a chunk, of all its shards, as readers get them: None when some do not match their digests, and it
    is dropped."""
    each = [_bytes_of_shard(drives[shard.extent.namespace - 1], shard) for shard in chunk.shards]
    return None if None in each else b"".join(units for units in each if units is not None)


def _bytes_of_shard(drive: Drive, shard: Shard) -> bytes | None:
    extent = shard.extent
    data = b"".join(drive.read(extent.lba + i) for i in range(extent.lba_count))
    units = data[shard.payload_lba_offset * LBA_BYTES :]
    step = shard.unit_lba_count * LBA_BYTES
    found = [digest_of(units[i * step : i * step + shard.unit_bytes]) for i in range(len(shard.unit_digests))]
    return units if tuple(found) == shard.unit_digests else None


def _check_chunk(drives: Drives, chunk: ChunkRecord, expected: Expected, seen: Counter[str]) -> None:
    units = bytes_of(drives, chunk)
    if units is None:
        must(not expected.is_sound, "an offered chunk is not what was committed", chunk)
        seen["found by their digests"] += 1
        return
    must(units in expected.written.get(chunk.key, ()), "a chunk holds another's bytes", chunk)
    if expected.is_sound:
        for shard in chunk.shards:
            _check_header(drives[shard.extent.namespace - 1], chunk, shard.extent)


def _check_header(drive: Drive, chunk: ChunkRecord, extent: Extent) -> None:
    try:
        header = decode_chunk_header(drive.read(extent.lba))
    except FormatError as error:
        must(False, "an offered chunk has no header", chunk, error.message)
        raise
    told = (header.key, header.identity, header.segment, header.generation, header.lba)
    must(told == (chunk.key, chunk.identity, extent.segment, extent.generation, extent.lba), "another header", header)


def _check_capacity(tables: Mapping[int, SegmentTable]) -> None:
    """Every segment can be had once more, each in a later generation."""
    for table in tables.values():
        counts, count = table.counts(), table.geometry.segment_count
        must(counts.free + counts.sealed == count, "capacity does not add up", counts)
        got = set()
        for _ in range(count):
            record = table.open_next(1.0, lambda _: True)
            must(record is not None, "a segment was lost", counts)
            assert record is not None
            got.add(record.segment)
            table.opened(replace(record))
        must(len(got) == count, "a segment was handed out twice", got)
