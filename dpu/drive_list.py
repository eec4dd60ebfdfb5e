"""Which drives a pool has, and where: the file ``drives`` in its directory.

Pools of one drive that were made by earlier versions have none. JSON, for people to read; each drive's label says the
same of its number and UUIDs, and is believed rather than the path. Where drive 0 is the only one, its place is that of
the pool's data, so that a directory that was moved, or copied, has its own.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_place import CREATING, DATA_POINTER, DRIVE_LIST, own_file, sync_directory, write_durably
from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError
from meshfusion.jbof.pool_addresses import MAX_DRIVE_NUMBER

_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ListedDrive:
    """``uuid``: the drive's, in hexadecimal. ``is_draining``: nothing new is written to it. ``is_unindexed``: the index
    was made anew while it was away. Until that is done again with it, it is not used: segments that the index does not
    know would count as never used, and generations would come again. ``name``: as its label has it, in most cases its
    serial; empty where it has none, or an earlier version has listed it."""

    number: int
    path: Path
    uuid: str
    segment_count: int
    is_draining: bool = False
    is_unindexed: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class DriveList:
    """``drives``: by number, at least one. ``next_number``: of the next drive; numbers are never used twice, so that
    nothing of a drive that was removed is taken for another's."""

    pool_uuid: str
    segment_bytes: int
    next_number: int
    drives: tuple[ListedDrive, ...]

    @property
    def capacity_bytes(self) -> int:
        return self.segment_bytes * sum(drive.segment_count for drive in self.drives)

    @property
    def only(self) -> ListedDrive | None:
        """The pool's only drive; None: it has several."""
        return self.drives[0] if len(self.drives) == 1 else None

    def find(self, number: int) -> ListedDrive | None:
        return next((drive for drive in self.drives if drive.number == number), None)

    def with_drive(self, drive: ListedDrive) -> DriveList:
        """With it, or with it changed."""
        others = [other for other in self.drives if other.number != drive.number]
        drives = tuple(sorted([*others, drive], key=lambda listed: listed.number))
        return replace(self, drives=drives, next_number=max(self.next_number, drive.number + 1))

    def without_drive(self, number: int) -> DriveList:
        return replace(self, drives=tuple(drive for drive in self.drives if drive.number != number))


def read_drive_list(directory: Path) -> DriveList | None:
    """None: there is none. Raises FormatError for one that is damaged, or a pointer to the data that is, and
    MediaError."""
    file = directory / DRIVE_LIST
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MediaError(f"{file} cannot be read: {error.strerror}", next_step="check its permissions") from error
    try:
        listed = _decoded(json.loads(raw))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{file} is damaged: {error!r}",
            next_step="correct it (each drive's number, path, uuid, segment_count), or create the pool anew",
        ) from error
    if listed.only is not None and listed.only.number == 0:
        return listed.with_drive(replace(listed.only, path=PoolLayout(directory).data.absolute()))
    return listed


def pool_of_killed_creation(directory: Path) -> bytes | None:
    """The UUID that a pool would have had whose creation in ``directory`` was killed, and which its drives may name in
    their labels; None where there was none, or it did not come so far."""
    if not (directory / CREATING).is_dir() or PoolLayout(directory).index.exists():
        return None
    with contextlib.suppress(MeshFusionError, ValueError):
        left = read_drive_list(directory)
        return None if left is None else uuid.UUID(left.pool_uuid).bytes
    return None


def write_drive_list(directory: Path, drives: DriveList) -> None:
    """Durably, and all at once. Where drive 0 becomes the only one, its place counts as the pool's data from then on.
    Raises MediaError, and FormatError for a pointer to the data that is damaged."""
    file = directory / DRIVE_LIST
    content = {
        "version": _VERSION,
        "pool_uuid": drives.pool_uuid,
        "segment_bytes": drives.segment_bytes,
        "next_number": drives.next_number,
        "drives": [
            {
                "number": drive.number,
                "path": str(drive.path),
                "uuid": drive.uuid,
                "segment_count": drive.segment_count,
                "is_draining": drive.is_draining,
                "is_unindexed": drive.is_unindexed,
                "name": drive.name,
            }
            for drive in drives.drives
        ],
    }
    try:
        if drives.only is not None and drives.only.number == 0:
            _is_data(directory, drives.only.path)  # first: with several drives listed, nobody asks for it
        write_durably(file, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise MediaError(f"{file} cannot be written: {error}", next_step="check space and permissions there") from error


def _is_data(directory: Path, path: Path) -> None:
    if path == PoolLayout(directory).data:
        return
    if path == own_file(directory, 0):
        (directory / DATA_POINTER).unlink(missing_ok=True)
        sync_directory(directory)
    else:
        write_durably(directory / DATA_POINTER, str(path))


def _decoded(content: Any) -> DriveList:
    if content["version"] != _VERSION:
        raise ValueError(f"version {content['version']!r} instead of {_VERSION}")
    drives = tuple(
        ListedDrive(
            int(drive["number"]),
            Path(drive["path"]),
            bytes.fromhex(drive["uuid"]).hex(),
            int(drive["segment_count"]),
            bool(drive["is_draining"]),
            bool(drive.get("is_unindexed", False)),  # lists of before do not have it, nor the name
            str(drive.get("name", "")),
        )
        for drive in content["drives"]
    )
    numbers = [drive.number for drive in drives]
    found = DriveList(content["pool_uuid"], int(content["segment_bytes"]), int(content["next_number"]), drives)
    if not drives or numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] <= MAX_DRIVE_NUMBER:
        raise ValueError(f"its drives have the numbers {numbers}")
    if found.next_number <= numbers[-1] or any(drive.segment_count <= 0 for drive in drives):
        raise ValueError("its numbers do not fit together")
    if not all(drive.path.is_absolute() for drive in drives):
        raise ValueError("a drive's path is not absolute")
    return found
