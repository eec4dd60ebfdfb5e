"""The drives of a pool: which are here, and what keeps the others away.

A pool of one drive needs it: an error names it where it is away. Of several, those that are here are enough to start
with: what lies on the others is not found until they are back, and nothing is ever written to a drive whose label is
not the one that was listed.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.drive_list import DriveList, ListedDrive, read_drive_list
from meshfusion.dpu.encryption.note import read_note, refuse_erased
from meshfusion.dpu.pool_dir import (
    PoolLayout,
    check_is_pool,
    check_was_pool,
    geometry_of,
    read_data_label,
    read_label_at,
    read_only_label,
    step_without,
)
from meshfusion.dpu.pool_place import DATA_POINTER, DRIVE_LIST
from meshfusion.jbof.errors import FormatError, MeshFusionError
from meshfusion.jbof.label import Label
from meshfusion.jbof.segments import SegmentGeometry


@dataclass(frozen=True, slots=True)
class PoolDrive:
    """One that is here. ``label_problems``: what is wrong with a copy of its label that is not needed."""

    path: Path
    label: Label
    label_problems: tuple[str, ...] = ()
    is_draining: bool = False

    @property
    def number(self) -> int:
        return self.label.drive_number

    @property
    def geometry(self) -> SegmentGeometry:
        return geometry_of(self.label)


@dataclass(frozen=True, slots=True)
class AbsentDrive:
    """``name``: its serial, or what else it has for that; empty: not known."""

    number: int
    problem: MeshFusionError
    name: str = ""

    @property
    def known_as(self) -> str:
        return f"{self.number} ({self.name})" if self.name else str(self.number)

    @property
    def told(self) -> str:
        """For whoever starts the pool, or may."""
        return f"drive {self.known_as} is away, and what it holds is not found: {self.problem}"


@dataclass(frozen=True, slots=True)
class PoolDrives:
    """``here``: by number, at least one. ``capacity_bytes``: of all, also those that are absent."""

    here: tuple[PoolDrive, ...]
    absent: tuple[AbsentDrive, ...]
    capacity_bytes: int

    @property
    def pool_uuid(self) -> str:
        return str(uuid.UUID(bytes=self.here[0].label.pool_uuid))

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(drive.path for drive in self.here)

    @property
    def numbers(self) -> frozenset[int]:
        """Of all drives."""
        return frozenset(drive.number for drive in self.here) | {drive.number for drive in self.absent}

    @property
    def geometries(self) -> tuple[SegmentGeometry, ...]:
        """Of those that are here."""
        return tuple(drive.geometry for drive in self.here)

    @property
    def label_problems(self) -> tuple[str, ...]:
        return tuple(problem for drive in self.here for problem in drive.label_problems)


class WrongDriveError(FormatError):
    """At a drive's path lies another one: another pool's, or another of this pool."""


def find_drives(layout: PoolLayout) -> PoolDrives:
    """Raises what :func:`~meshfusion.dpu.pool_dir.read_label_copies` raises when this is no pool or no drive of it is
    here."""
    check_is_pool(layout)
    listed = read_drive_list(layout.directory)
    _check_encryption(layout, listed)
    if listed is None:
        return _only_drive(layout)
    return _look(listed, lambda drive: _usable(layout, listed, drive))


def find_drives_to_index(layout: PoolLayout) -> PoolDrives:
    """Of a pool whose index is to be made anew, and may be gone.

    Raises as :func:`find_drives` does, and :class:`WrongDriveError`: where a drive is in another's place, the one that
    belongs there is probably at hand, and must not be left out."""
    check_was_pool(layout)
    listed = read_drive_list(layout.directory)
    _check_encryption(layout, listed)
    if listed is None:
        return _only_drive(layout)
    return _look(listed, lambda drive: _found(layout, listed, drive), fatal=WrongDriveError)


def list_of_one(drives: PoolDrives) -> DriveList:
    """What the list of a pool of one drive would say, if it had one."""
    (drive,) = drives.here
    label = drive.label
    listed = listed_drive(label, drive.path)
    return DriveList(drives.pool_uuid, drive.geometry.segment_bytes, drive.number + 1, (listed,))


def listed_drive(label: Label, path: Path) -> ListedDrive:
    """As a pool's list has the drive of this label."""
    return ListedDrive(
        label.drive_number,
        path.absolute(),
        label.drive_uuid.hex(),
        label.segment_count,
        name=label.drive_name,
    )


def _check_encryption(layout: PoolLayout, listed: DriveList | None) -> None:
    """Is its key there, and has somebody opened its drives? Else they would be told to be missing. Raises
    FormatError."""
    note = read_note(layout)
    refuse_erased(layout, note)
    if note is None or listed is None or any(drive.path.exists() for drive in listed.drives):
        return
    devices = ", ".join(str(one.device) for one in note.slices)
    raise FormatError(
        f"the pool {layout.directory} is encrypted, and its drives, on {devices}, are not open",
        next_step="let its service open them, by mfctl service run, and point engines at it; or look at the pool with "
        "mfctl, as a user who may read its key file",
    )


def _only_drive(layout: PoolLayout) -> PoolDrives:
    label, problems, _ = read_data_label(layout)
    return PoolDrives((PoolDrive(layout.data, label, problems),), (), geometry_of(label).capacity_bytes)


def _look(
    listed: DriveList, find: Callable[[ListedDrive], PoolDrive], *, fatal: type[MeshFusionError] | tuple[()] = ()
) -> PoolDrives:
    """``find`` raises what keeps a drive away, or what is ``fatal`` to all."""
    here: list[PoolDrive] = []
    absent: list[AbsentDrive] = []
    for drive in listed.drives:
        try:
            here.append(find(drive))
        except fatal:
            raise
        except MeshFusionError as error:
            absent.append(AbsentDrive(drive.number, error, drive.name))
    if not here:
        raise absent[0].problem
    return PoolDrives(tuple(here), tuple(absent), listed.capacity_bytes)


def _usable(layout: PoolLayout, listed: DriveList, drive: ListedDrive) -> PoolDrive:
    found = _found(layout, listed, drive)
    if drive.is_unindexed:
        path = shlex.quote(str(layout.directory))
        raise FormatError(
            f"the index was made anew while {drive.path} was away, and knows nothing of what it holds",
            next_step=f"make it anew with the drive: mfctl pool rebuild-index {path}; or give the drive up: "
            f"mfctl jbof remove {path} {drive.number}, then mfctl jbof add",
        )
    return found


def _found(layout: PoolLayout, listed: DriveList, drive: ListedDrive) -> PoolDrive:
    if listed.only is None:
        remove = f"mfctl jbof remove {shlex.quote(str(layout.directory))} {drive.number}"
        step = f"attach it, or give it up with what it holds: {remove}"
        label, problems = read_label_at(drive.path, step)
    else:
        listed_in = DRIVE_LIST if drive.number else DATA_POINTER
        step = step_without(layout, drive.path, listed_in, "put the pool's own drive in its place")
        what = f"the pool's only drive, {drive.number} ({drive.name or drive.uuid}),"
        label, problems, _ = read_only_label(layout, drive.path, listed_in, what)
    expected = (uuid.UUID(listed.pool_uuid).bytes, bytes.fromhex(drive.uuid), drive.number)
    if label.pool_uuid != expected[0]:
        raise WrongDriveError(f"{drive.path} belongs to the pool {uuid.UUID(bytes=label.pool_uuid)}", next_step=step)
    if (label.pool_uuid, label.drive_uuid, label.drive_number) != expected:
        raise WrongDriveError(
            f"{drive.path} is drive {label.drive_number} of this pool ({label.drive_uuid.hex()}), and drive "
            f"{drive.number} ({drive.uuid}) should be there",
            next_step=step,
        )
    if label.segment_lba_count * label.lba_bytes != listed.segment_bytes or label.segment_count != drive.segment_count:
        raise WrongDriveError(f"{drive.path} has other segments than it was listed with", next_step=step)
    return PoolDrive(drive.path, label, problems, drive.is_draining)
