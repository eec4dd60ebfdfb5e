"""The drives of a pool, opened: their media and the shelf of their segments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshfusion.dpu.budgets import Budgets
from meshfusion.dpu.pool_drives import AbsentDrive, PoolDrive, PoolDrives
from meshfusion.dpu.pool_medium import FileMedium, PoolMedium, ShelfMedium, refuse_old_index
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentRecord, SegmentTable
from meshfusion.jbof.shelf import Shelf, ShelfDrive

logger = logging.getLogger("meshfusion.pool")


@dataclass(frozen=True, slots=True)
class OpenDrive:
    """``takes_segments``: it can be written, and shall be. ``is_owned``: nobody else writes it. ``has_epoch``: that of
    its owner is on it."""

    drive: PoolDrive
    file: FileMedium
    takes_segments: bool
    is_owned: bool = True
    has_epoch: bool = False


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
            logger.error("%s", drive.told)
        opened, failed = cls.examine(found)
        for drive in failed:
            logger.error("%s", drive.told)
        return opened

    @classmethod
    def examine(cls, found: PoolDrives) -> tuple[OpenDrives, tuple[AbsentDrive, ...]]:
        """As :meth:`open`, for whoever only wants to know; and those that are here and cannot be opened."""
        drives: list[OpenDrive] = []
        failed: list[AbsentDrive] = []
        for here in found.here:
            try:
                file = FileMedium.open(here.path)
            except MediaError as error:
                failed.append(AbsentDrive(here.number, error, here.label.drive_name))
            else:
                drives.append(OpenDrive(here, file, file.is_writable and not here.is_draining))
        if not drives:
            raise failed[0].problem
        return cls(tuple(drives), found.numbers), tuple(failed)

    def owned(self, take: Callable[[int, Path], None]) -> OpenDrives:
        """Those that may be written, taken with ``take``. One of several that cannot be asked is only read.

        Raises what ``take`` raises: :class:`~meshfusion.jbof.drives.ownership.DriveOwnedError` for a drive of somebody
        else, and MediaError when it is the only one.
        """
        drives = []
        for one in self.drives:
            is_owned = one.file.is_writable
            try:
                if is_owned:
                    take(one.drive.number, one.drive.path)
            except MediaError as error:
                if len(self.drives) == 1:
                    raise
                logger.error("drive %d is only read: %s", one.drive.number, error)
                is_owned = False
            drives.append(replace(one, is_owned=is_owned, takes_segments=one.takes_segments and is_owned))
        return OpenDrives(tuple(drives), self.numbers)

    def begin_epoch(self, epoch: int) -> tuple[ShelfMedium, OpenDrives]:
        """The medium for an owner of this epoch, which is now on every drive that is written to, durably.

        One of several that it cannot be written to takes no segments. Raises MediaError when it is the only one.
        """
        media = {
            one.drive.number: PoolMedium(one.file, one.drive.label, one.drive.geometry, epoch) for one in self.drives
        }
        drives = []
        for one in self.drives:
            takes_segments, has_epoch = one.takes_segments, one.file.is_writable and one.is_owned
            if has_epoch:
                try:
                    media[one.drive.number].write_owner()
                except MediaError as error:
                    if len(self.drives) == 1:
                        raise
                    logger.error("drive %d is only read: %s", one.drive.number, error)
                    takes_segments = has_epoch = False
            drives.append(replace(one, takes_segments=takes_segments, has_epoch=has_epoch))
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

    def shelf(self, records: Sequence[SegmentRecord], budgets: Budgets, now_s: float) -> Shelf:
        """``records``: of all drives of the pool, as :meth:`check` has seen them. Raises ConfigError for budgets that
        are too small."""
        last_seq = max((record.opened_seq for record in records), default=0)
        geometries = [one.drive.geometry for one in self.drives]
        budgets.check(*geometries)
        return Shelf(
            (
                ShelfDrive(_table(one, records), one.takes_segments, budget=budgets.of(geometry, now_s))
                for one, geometry in zip(self.drives, geometries, strict=True)
            ),
            last_seq,
        )

    def close(self) -> None:
        for one in self.drives:
            one.file.close()


def _table(one: OpenDrive, records: Iterable[SegmentRecord]) -> SegmentTable:
    geometry = one.drive.geometry
    return SegmentTable(geometry, (record for record in records if record.segment in geometry.segments))
