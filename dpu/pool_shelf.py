"""The drives of a pool, opened: their media and the shelf of their segments."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.pool_drives import PoolDrive, PoolDrives
from meshfusion.dpu.pool_medium import FileMedium, PoolMedium, ShelfMedium, refuse_old_index
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError
from meshfusion.jbof.policy.write_budget import BURST_SHARE, WriteBudget
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentRecord, SegmentTable
from meshfusion.jbof.shelf import Shelf, ShelfDrive
from meshfusion.jbof.sizes import format_size

logger = logging.getLogger("meshfusion.pool")


@dataclass(frozen=True, slots=True)
class OpenDrive:
    """``takes_segments``: it can be written, and shall be."""

    drive: PoolDrive
    file: FileMedium
    takes_segments: bool


@dataclass(frozen=True, slots=True)
class OpenDrives:
    """It owns the files."""

    drives: tuple[OpenDrive, ...]
    numbers: frozenset[int]  # of all drives of the pool

    @classmethod
    def open(cls, found: PoolDrives) -> OpenDrives:
        """All drives that are here. One of several that cannot be opened is left out, and that is told; raises
        :class:`~meshfusion.jbof.media.faults.DataFileError` when none can."""
        for drive in found.absent:
            logger.error("drive %d is away, and what it holds is not found: %s", drive.number, drive.problem)
        drives: list[OpenDrive] = []
        errors: list[MediaError] = []
        for here in found.here:
            try:
                file = FileMedium.open(here.path)
            except MediaError as error:
                logger.error("drive %d is away, and what it holds is not found: %s", here.number, error)
                errors.append(error)
            else:
                drives.append(OpenDrive(here, file, file.is_writable and not here.is_draining))
        if not drives:
            raise errors[0]
        return cls(tuple(drives), found.numbers)

    def begin_epoch(self, epoch: int) -> tuple[ShelfMedium, OpenDrives]:
        """The medium for an owner of this epoch, which is now on every drive that is written to, durably.

        One of several that it cannot be written to takes no segments. Raises MediaError when it is the only one.
        """
        media = {
            one.drive.number: PoolMedium(one.file, one.drive.label, one.drive.geometry, epoch) for one in self.drives
        }
        drives = []
        for one in self.drives:
            takes_segments = one.takes_segments
            if one.file.is_writable:
                try:
                    media[one.drive.number].write_owner()
                except MediaError as error:
                    if len(self.drives) == 1:
                        raise
                    logger.error("drive %d is only read: %s", one.drive.number, error)
                    takes_segments = False
            drives.append(OpenDrive(one.drive, one.file, takes_segments))
        return ShelfMedium(media), OpenDrives(tuple(drives), self.numbers)

    def check(self, records: Sequence[SegmentRecord], index_epoch: int, directory: Path) -> None:
        """``records``: of the index. Raises :class:`FormatError` for segments that the pool's drives do not have, and
        for an index that is older than one of them."""
        for one in self.drives:
            refuse_old_index(one.file, one.drive.label, index_epoch, directory)
        unknown = {drive_of_segment(record.segment) for record in records} - self.numbers
        if unknown:
            numbers = ", ".join(map(str, sorted(unknown)))
            raise FormatError(
                f"the index names segments of drive {numbers}, which the pool's list of drives does not have",
                next_step="restore the list, or give up what these drives hold: mfctl jbof remove PATH NUMBER",
            )
        here = {one.drive.number: one.drive.geometry.segments for one in self.drives}
        its_drives = ((record.segment, here.get(drive_of_segment(record.segment))) for record in records)
        if any(segments is not None and segment not in segments for segment, segments in its_drives):
            raise FormatError(
                "the index names segments that its drive does not have",
                next_step="make the index anew from the medium: mfctl pool rebuild-index PATH",
            )

    def shelf(self, records: Sequence[SegmentRecord], budgets: Mapping[int, WriteBudget]) -> Shelf:
        """``records``: of all drives of the pool, as :meth:`check` has seen them. ``budgets``: by drive number."""
        last_seq = max((record.opened_seq for record in records), default=0)
        return Shelf(
            (
                ShelfDrive(_table(one, records), one.takes_segments, budget=budgets.get(one.drive.number))
                for one in self.drives
            ),
            last_seq,
        )

    def budgets(
        self, drive_writes_per_day: float, left_bytes: Mapping[int, int], now_s: float
    ) -> dict[int, WriteBudget]:
        """Each drive's, with what was left of it. Raises ConfigError for one that is less than a segment at a time."""
        found = {}
        for one in self.drives:
            geometry = one.drive.geometry
            bytes_per_day = geometry.capacity_bytes * drive_writes_per_day
            if bytes_per_day * BURST_SHARE < geometry.segment_bytes:
                least = geometry.segment_bytes / BURST_SHARE / geometry.capacity_bytes
                raise ConfigError(
                    f"drive_writes_per_day = {drive_writes_per_day:g}: a quarter of what drive {one.drive.number} "
                    f"may be written in a day is less than a segment of {format_size(geometry.segment_bytes)}, "
                    "so none could ever be opened",
                    next_step=f"use {math.ceil(least * 1000) / 1000:g} or more, or make the pool with smaller segments",
                )
            found[one.drive.number] = WriteBudget(bytes_per_day, now_s, left_bytes.get(one.drive.number))
        return found

    @property
    def counters(self) -> tuple[tuple[str, int], ...]:
        """For the pool's status; none for a pool of one drive that is as it should be."""
        read_only = sum(not one.takes_segments for one in self.drives)
        counts = {
            "drives": len(self.numbers) if len(self.numbers) > 1 else 0,
            "drives_away": len(self.numbers) - len(self.drives),
            "drives_only_read": read_only,
        }
        return tuple((name, count) for name, count in counts.items() if count)

    def close(self) -> None:
        for one in self.drives:
            one.file.close()


def _table(one: OpenDrive, records: Iterable[SegmentRecord]) -> SegmentTable:
    geometry = one.drive.geometry
    return SegmentTable(geometry, (record for record in records if record.segment in geometry.segments))
