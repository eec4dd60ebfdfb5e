"""What the service itself writes to the pool's drives: its epoch, segments' headers and summaries; and deallocations.

One thread at a time uses it. Chunks are written by their holders; nothing here touches an extent that one may hold.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from meshfusion.dpu.api.types import ChunkRecord
from meshfusion.jbof.epoch_record import EpochRecord, encode_epoch_record, last_epoch
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.jbof.format import LBA_BYTES, OWNER_LBAS
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import DataFile, Place, open_data_file
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segment_format import (
    KEY_PREFIX_BYTES,
    SEGMENT_HEADER_LBAS,
    SegmentHeader,
    SegmentSummary,
    SummaryEntry,
    encode_segment_header,
    encode_summary,
)
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord

logger = logging.getLogger("meshfusion.medium")

Item = TypeVar("Item")


class BlockMedium(Protocol):
    """What is used of :class:`~meshfusion.jbof.media.file.DataFile`; numbers are logical blocks. What a method asks for
    is durable after the next :meth:`flush`. Raises :class:`~meshfusion.jbof.errors.MediaError`."""

    def read_blocks(self, lba: int, lba_count: int) -> bytes: ...

    def write_blocks(self, lba: int, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def deallocate(self, lba: int, lba_count: int) -> bool:
        """False: not supported."""
        ...

    @property
    def deallocated_reads_zeros(self) -> bool:
        """Is that promised?"""
        ...


class PoolMedium:
    """``epoch``: of this owner. ``counts``: what was done, by name, for the pool's status."""

    def __init__(self, medium: BlockMedium, label: Label, geometry: SegmentGeometry, epoch: int) -> None:
        self._medium = medium
        self._label = label
        self._geometry = geometry
        self._epoch = epoch
        self.counts: Counter[str] = Counter()

    def write_owner(self) -> None:
        """The epoch, durably: before anybody is served in it."""
        record = EpochRecord(self._epoch, self._label.pool_uuid, self._label.drive_uuid)
        self._medium.write_blocks(record.lba, encode_epoch_record(record))
        self._medium.flush()

    def open_segments(self, records: Iterable[SegmentRecord]) -> None:
        """Their headers, durably, and then nothing else in them. The index has these records already."""
        records = tuple(records)
        self.write_headers(records)
        for record in records:
            self._deallocate(record.segment)

    def write_headers(self, records: Iterable[SegmentRecord]) -> None:
        """Durably."""
        headers = [self._header(record) for record in records]
        for header in headers:
            self._medium.write_blocks(header.lba, encode_segment_header(header))
        if headers:
            self._medium.flush()

    def write_summaries(self, summaries: Iterable[tuple[SegmentRecord, Iterable[ChunkRecord]]]) -> None:
        """Durably. With each segment come the chunks that are committed in it."""
        count = 0
        for record, chunks in summaries:
            data = encode_summary(self._summary(record, chunks))
            lba = self._geometry.end_lba(record.segment) - len(data) // LBA_BYTES
            self._medium.write_blocks(lba, data)
            count += 1
        if count:
            self._medium.flush()

    def _header(self, record: SegmentRecord) -> SegmentHeader:
        return SegmentHeader(
            pool_uuid=self._label.pool_uuid,
            drive_uuid=self._label.drive_uuid,
            drive_number=self._label.drive_number,
            segment=record.segment,
            generation=record.generation,
            opened_seq=record.opened_seq,
            owner_epoch=self._epoch,
            lifetime_class=record.lifetime_class,
            lba=self._geometry.first_lba(record.segment),
        )

    def _summary(self, record: SegmentRecord, chunks: Iterable[ChunkRecord]) -> SegmentSummary:
        first_lba = self._geometry.first_lba(record.segment)
        entries = (
            SummaryEntry(shard.extent.lba - first_lba, shard.extent.lba_count, chunk.key[:KEY_PREFIX_BYTES])
            for chunk in chunks
            for shard in chunk.shards
            if shard.extent.segment == record.segment
        )
        return SegmentSummary(
            pool_uuid=self._label.pool_uuid,
            drive_uuid=self._label.drive_uuid,
            drive_number=self._label.drive_number,
            segment=record.segment,
            generation=record.generation,
            end_lba=self._geometry.end_lba(record.segment),
            entries=tuple(sorted(entries, key=lambda entry: entry.lba_offset)),
        )

    def _deallocate(self, segment: int) -> None:
        """All but the header. One that is not supported is passed over, one that fails is the opening's failure."""
        lba = self._geometry.first_lba(segment) + SEGMENT_HEADER_LBAS
        lba_count = self._geometry.segment_lba_count - SEGMENT_HEADER_LBAS
        if not self._medium.deallocate(lba, lba_count):
            self.counts["deallocations_unsupported"] += 1
            return
        self.counts["segments_deallocated"] += 1
        if self._medium.deallocated_reads_zeros:
            ends = (lba, lba + lba_count - 1)
            if any(any(self._medium.read_blocks(end, 1)) for end in ends):
                self.counts["deallocations_not_kept"] += 1
                logger.error("segment %d: deallocated blocks do not read as zeros, as the medium promises", segment)


class ShelfMedium:
    """The media of all drives of a pool that are here, by the drives' numbers, as one."""

    def __init__(self, media: Mapping[int, PoolMedium]) -> None:
        self._media = dict(media)
        self._failed: Callable[[int, MediaError], None] = lambda number, error: None
        self._worked: Callable[[int], None] = lambda number: None
        self._have_failed: set[int] = set()  # drives whose last command did
        self._use = threading.Lock()  # held while a drive is written: whoever puts another in its place waits
        self._past_counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        return sum((medium.counts for medium in tuple(self._media.values())), self._past_counts)

    def report_to(self, failed: Callable[[int, MediaError], None], worked: Callable[[int], None]) -> None:
        """``failed`` is told of every command that fails, ``worked`` of the first one that does not after that; in the
        thread that gave it."""
        self._failed, self._worked = failed, worked

    def put(self, number: int, medium: PoolMedium | None) -> None:
        """From now on this is the drive; None: it is gone for good. Nobody uses the former one any more."""
        with self._use:
            former = self._media.pop(number, None)
            if former is not None:
                self._past_counts += former.counts
            if medium is not None:
                self._media[number] = medium

    def open_segments(self, records: Iterable[SegmentRecord]) -> None:
        """As :meth:`PoolMedium.open_segments`, of each drive."""
        for number, its_records in _by_drive(records, lambda record: record.segment).items():
            with self._using(number) as medium:
                medium.open_segments(its_records)

    def write_summaries(self, summaries: Iterable[tuple[SegmentRecord, Iterable[ChunkRecord]]]) -> None:
        """As :meth:`PoolMedium.write_summaries`, of each drive."""
        for number, its_summaries in _by_drive(summaries, lambda summary: summary[0].segment).items():
            with self._using(number) as medium:
                medium.write_summaries(its_summaries)

    @contextlib.contextmanager
    def _using(self, number: int) -> Iterator[PoolMedium]:
        try:
            with self._use:
                yield self._media[number]
        except MediaError as error:
            self._have_failed.add(number)
            self._failed(number, error)
            raise
        if number in self._have_failed:
            self._have_failed.discard(number)
            self._worked(number)


def _by_drive(items: Iterable[Item], segment_of: Callable[[Item], int]) -> dict[int, list[Item]]:
    found: dict[int, list[Item]] = {}
    for item in items:
        found.setdefault(drive_of_segment(segment_of(item)), []).append(item)
    return found


def refuse_old_index(medium: BlockMedium, label: Label, index_epoch: int, directory: Path) -> None:
    """An index put back from a copy would hand out generations that were in use already (rule 2). The index knows an
    epoch before the drive does, so one that is behind the drive is not the one that was used last.

    Raises :class:`~meshfusion.jbof.errors.FormatError`.
    """
    known = last_epoch([medium.read_blocks(lba, 1) for lba in OWNER_LBAS], label)
    if known > index_epoch:
        raise FormatError(
            f"the index of {directory} is an old copy: it ends with epoch {index_epoch}, the drive with {known}",
            next_step=f"make it anew from what is on the drive: mfctl pool rebuild-index {directory}",
        )


class FileMedium:
    """A file or block device as a :class:`BlockMedium`, for several threads: what is under way when it is closed ends
    in the same file, and what comes later is a :class:`~meshfusion.jbof.media.faults.DataFileError`."""

    def __init__(self, data: DataFile) -> None:
        self._data = data
        self._counting = threading.Lock()
        self._users = 0
        self._is_closed = False

    @classmethod
    def open(cls, path: Path) -> FileMedium:
        """For writing; a drive that has become read-only, for reading: what it holds can still be served.

        Raises :class:`~meshfusion.jbof.media.faults.DataFileError`.
        """
        try:
            return cls(open_data_file(path, writable=True))
        except DataFileError as error:
            if error.fault is not MediaFault.READ_ONLY:
                raise
            logger.warning("%s; nothing can be saved", error.message)
            return cls(open_data_file(path, writable=False))

    @property
    def is_writable(self) -> bool:
        return self._data.writable

    @property
    def place(self) -> Place:
        with self._using() as data:
            return data.place

    def read_blocks(self, lba: int, lba_count: int) -> bytes:
        with AlignedBuffer(lba_count * LBA_BYTES) as buffer:
            self.read_into(lba, buffer.view)
            return bytes(buffer.view)

    def read_into(self, lba: int, buffer: memoryview) -> None:
        """``buffer``: of an :class:`~meshfusion.jbof.media.buffer.AlignedBuffer`, whole blocks."""
        with self._using() as data:
            data.read_into(lba, buffer)

    def write_from(self, lba: int, buffer: memoryview) -> None:
        """As :meth:`read_into`."""
        if not self._data.writable:
            raise DataFileError(MediaFault.READ_ONLY, "is read-only", self._data.path, offset_bytes=lba * LBA_BYTES)
        with self._using() as data:
            data.write_from(lba, buffer)

    def write_blocks(self, lba: int, data: bytes) -> None:
        with AlignedBuffer(len(data)) as buffer:
            buffer.view[:] = data
            self.write_from(lba, buffer.view)

    def flush(self) -> None:
        with self._using() as data:
            data.flush()

    def deallocate(self, lba: int, lba_count: int) -> bool:
        with self._using() as data:
            return data.deallocate(lba, lba_count)

    @property
    def deallocated_reads_zeros(self) -> bool:
        return not self._data.is_device

    def close(self) -> None:
        """At once, or when the last of those who use it is done: a drive that hangs holds up nobody here."""
        with self._counting:
            is_last = not self._users and not self._is_closed
            self._is_closed = True
        if is_last:
            self._data.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[DataFile]:
        """A descriptor that is closed meanwhile could be another file's by then."""
        with self._counting:
            if self._is_closed:
                raise DataFileError(MediaFault.MISSING, "is not in use any more", self._data.path)
            self._users += 1
        try:
            yield self._data
        finally:
            with self._counting:
                self._users -= 1
                is_last = self._is_closed and not self._users
            if is_last:
                self._data.close()
