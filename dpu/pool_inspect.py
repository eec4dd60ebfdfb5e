"""Looking at a pool without owning it: status and chunks read from the index, and a check that reads every byte.

Works while another process serves the pool: the index is read as a snapshot, and a chunk that does not match is only
called damaged when its entry is still the same afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.api import types as api
from meshfusion.dpu.index import Index, IndexTotals
from meshfusion.dpu.index_files import open_index
from meshfusion.dpu.index_proof import FIRST_LOOK_S, WHOLE_SCAN_S
from meshfusion.dpu.index_scan import IndexScan, scan_in_child
from meshfusion.dpu.pool_dir import PoolLayout, geometry_of
from meshfusion.dpu.pool_drives import PoolDrives, find_drives
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.jbof.format import FORMAT_VERSION, ChunkHeader, decode_chunk_header
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile, DirectMode, open_data_file
from meshfusion.jbof.pool_addresses import drive_of_segment, namespace_of, pool_lba
from meshfusion.jbof.segment_format import SEGMENT_HEADER_LBAS, decode_segment_header
from meshfusion.jbof.segments import SegmentRecord
from meshfusion.jbof.unit_digests import UnitDigests

PAGE_CHUNKS = 256
_HEADER_WAITS_S = (0.2, 1.0)

Data = Mapping[int, DataFile]  # by namespace


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What reading the whole pool found. ``damaged``: one line a chunk, its key first. ``index_damaged``: entries of
    the index itself that cannot be read. ``label_problems``: what is wrong with a copy of the label.
    ``segments_damaged``: one line a segment whose header is not what the index says, so that a rebuild would not find
    the chunks in it. ``chunks_away``: not checked, since a shard of each lies on a drive that is away."""

    chunks_checked: int
    bytes_checked: int
    damaged: tuple[str, ...]
    index_damaged: int
    label_problems: tuple[str, ...] = ()
    segments_damaged: tuple[str, ...] = ()
    chunks_away: int = 0


class Pace:
    """``rate_bytes_s``: None, any."""

    def __init__(self, rate_bytes_s: float | None) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._began_s = time.monotonic()

    def wait(self, done_bytes: int) -> None:
        """Until so much may have been read."""
        if self._rate_bytes_s:
            time.sleep(max(0.0, self._began_s + done_bytes / self._rate_bytes_s - time.monotonic()))


@contextlib.contextmanager
def open_for_reading(path: Path) -> Iterator[tuple[PoolLayout, PoolDrives, Index]]:
    """The parts of a pool, read-only. Raises FormatError or MediaError with a way out."""
    layout = PoolLayout(path.absolute())
    drives = find_drives(layout)
    with open_index(layout.index, drives.pool_uuid, drives.capacity_bytes, readonly=True) as index:
        yield layout, drives, index


def inspect_pool(path: Path) -> api.PoolStatus:
    """The pool's state as its index has it; leases, grants and pins live in the owner's memory and show as zero."""
    layout = PoolLayout(path.absolute())
    found = find_drives(layout)
    scan = IndexScan(layout.index, found.pool_uuid, found.capacity_bytes)
    totals = scan.wait(FIRST_LOOK_S)
    scan.stop()
    with open_for_reading(path) as (_, drives, index):
        if totals is None and not index.has_totals:
            totals = _scan(layout)
        geometries = [drive.geometry for drive in drives.here]
        used = sum(
            record.opened_seq > 0 and any(record.segment in geometry.segments for geometry in geometries)
            for record in index.segment_records()
        )
        segment_count = sum(geometry.segment_count for geometry in geometries)
        # A large index is not looked through for this: `check` does it.
        damaged = [] if totals is None else [("index_entries_damaged", totals.damaged_count)]
        counters = [*damaged, ("owned", int(is_owned(layout)))]
        if drives.absent:
            counters.append(("drives_away", len(drives.absent)))
        return api.PoolStatus(
            pool_uuid=drives.pool_uuid,
            path=str(layout.directory),
            format_version=FORMAT_VERSION,
            epoch=index.epoch(),
            lba_bytes=geometries[0].lba_bytes,
            segment_bytes=geometries[0].segment_bytes,
            segment_count=segment_count,
            segments_free=segment_count - used,
            segments_open=0,
            segments_sealed=used,
            segments_reclaiming=0,
            segments_quarantined=0,
            capacity_bytes=geometries[0].segment_bytes * segment_count,
            committed_chunk_count=index.chunk_count() if totals is None else totals.chunk_count,
            committed_payload_bytes=index.payload_bytes if totals is None else totals.payload_bytes,
            pinned_bytes=0,
            lease_count=0,
            grant_count=0,
            saves_stopped_reason="",
            holders=(),
            counters=tuple(counters),
        )


def is_owned(layout: PoolLayout) -> bool:
    """Does a process serve this pool right now?"""
    try:
        descriptor = os.open(layout.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def check_pool(path: Path, progress: Callable[[int, int], None], *, rate_bytes_s: float | None = None) -> CheckReport:
    """Read every committed chunk on the drives that are here and compare header and digests. ``progress(checked,
    total)`` counts chunks; ``rate_bytes_s``: no more is read, so that whoever serves the pool keeps the drive; None: as
    fast as it goes."""
    layout = PoolLayout(path.absolute())
    totals = _scan(layout)
    checked = checked_bytes = away = 0
    damaged: list[str] = []
    with open_for_reading(path) as (_, drives, index):
        checker, pace = ChunkChecker(drives.here[0].label), Pace(rate_bytes_s)
        with open_data(drives) as data:
            for record in all_chunks(index):
                if not is_here(record, data):
                    away += 1  # nobody is served it
                    continue
                problem = checker.problem_of(record, data)
                if problem and index.get_many((record.key,)).get(record.key) == record:
                    damaged.append(f"{record.key.hex()}: {problem}")
                checked += 1
                checked_bytes += sum(shard.payload_bytes for shard in record.shards)
                progress(checked, max(checked, totals.chunk_count))
                pace.wait(checked_bytes)
            segments = tuple(problem for _, problem in segment_problems(index, drives, data))
    return CheckReport(
        checked, checked_bytes, tuple(damaged), totals.damaged_count, drives.label_problems, segments, away
    )


@contextlib.contextmanager
def open_data(drives: PoolDrives) -> Iterator[Data]:
    """Of the drives that are here, read-only, by their namespaces."""
    with contextlib.ExitStack() as stack:
        yield {
            namespace_of(drive.number): stack.enter_context(
                open_data_file(drive.path, writable=False, direct=DirectMode.AUTO)
            )
            for drive in drives.here
        }


def is_here(record: api.ChunkRecord, data: Data) -> bool:
    """Are the drives of all its shards?"""
    return all(shard.extent.namespace in data for shard in record.shards)


class ChunkChecker:
    def __init__(self, label: Label) -> None:
        self._label = label
        self._digests = UnitDigests()

    def problem_of(self, record: api.ChunkRecord, data: Data) -> str:
        """What is wrong with the chunk's bytes, or "". All its drives are here."""
        for shard in record.shards:
            with contextlib.closing(AlignedBuffer(shard.extent.lba_count * self._label.lba_bytes)) as buffer:
                try:
                    data[shard.extent.namespace].read_into(shard.extent.lba, buffer.view)
                except MediaError as error:
                    return error.message
                problem = self.problem_in(record, shard, buffer)
            if problem:
                return problem
        return ""

    def problem_in(self, record: api.ChunkRecord, shard: api.Shard, buffer: AlignedBuffer) -> str:
        """What is wrong with the bytes of the shard's extent, or ""."""
        try:
            header = decode_chunk_header(bytes(buffer.view[: shard.payload_lba_offset * self._label.lba_bytes]))
        except FormatError as error:
            return error.message
        return self._header_problem(record, shard, header) or self._digest_problem(shard, buffer)

    def _header_problem(self, record: api.ChunkRecord, shard: api.Shard, header: ChunkHeader) -> str:
        expected = {
            "pool_uuid": self._label.pool_uuid,
            "identity": record.identity,
            "key": record.key,
            "tenant": record.tenant,
            "group": record.group,
            "position_tokens": record.position_tokens,
            "token_count": record.token_count,
            "rank": shard.rank,
            "shard_count": len(record.shards),
            "segment": shard.extent.segment,
            "generation": shard.extent.generation,
            "lba": shard.extent.lba,
            "unit_bytes": shard.unit_bytes,
            "unit_digests": shard.unit_digests,
        }
        if header.first_generation:  # else it is of before headers told of which write a shard is
            first = record.shards[0].extent
            expected |= {"first_lba": pool_lba(first.namespace, first.lba), "first_generation": first.generation}
        wrong = [name for name, value in expected.items() if getattr(header, name) != value]
        return f"its header disagrees with the index in {', '.join(wrong)}" if wrong else ""

    def _digest_problem(self, shard: api.Shard, buffer: AlignedBuffer) -> str:
        for unit, digest in enumerate(shard.unit_digests):
            start = (shard.payload_lba_offset + unit * shard.unit_lba_count) * self._label.lba_bytes
            if self._digests.digest_of(buffer.view[start : start + shard.unit_bytes]) != digest:
                return f"unit {unit} does not match its digest"
        return ""


def segment_problems(index: Index, drives: PoolDrives, data: Data) -> Iterator[tuple[SegmentRecord, str]]:
    """Segments with chunks, on drives that are here, whose header does not say what the index says.

    One is looked at again when it does not: the header follows the index within a moment.
    """
    labels = {drive.number: drive.label for drive in drives.here}
    for record in index.segment_records():
        number = drive_of_segment(record.segment)
        if number not in labels:
            continue
        for wait_s in (0.0, *_HEADER_WAITS_S):
            time.sleep(wait_s)
            problem = _header_problem(record, labels[number], data[namespace_of(number)])
            if not problem or not index.chunks_in(record):
                break
        else:
            yield record, f"segment {record.segment}: {problem}"


def _header_problem(record: SegmentRecord, label: Label, data: DataFile) -> str:
    lba = geometry_of(label).first_lba(record.segment)
    with AlignedBuffer(SEGMENT_HEADER_LBAS * label.lba_bytes) as buffer:
        try:
            data.read_into(lba, buffer.view)
            header = decode_segment_header(bytes(buffer.view))
        except (FormatError, MediaError) as error:
            return error.message
    told = (header.pool_uuid, header.drive_uuid, header.segment, header.lba, header.generation, header.opened_seq)
    known = (label.pool_uuid, label.drive_uuid, record.segment, lba, record.generation, record.opened_seq)
    return "" if told == known else f"its header is of generation {header.generation}, the index says {known[4]}"


def all_chunks(index: Index) -> Iterator[api.ChunkRecord]:
    after = b""
    while page := index.chunks_after(after, PAGE_CHUNKS):
        yield from page
        after = page[-1].key


def _scan(layout: PoolLayout) -> IndexTotals:
    drives = find_drives(layout)
    return scan_in_child(layout.index, drives.pool_uuid, drives.capacity_bytes, deadline_s=WHOLE_SCAN_S)
