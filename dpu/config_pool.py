"""What a configured pool meets on this machine: the one that exists, or the room for the one to be made."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.blank_drives import check_data_paths
from meshfusion.dpu.drive_list import pool_of_killed_creation
from meshfusion.dpu.encryption.note import read_note
from meshfusion.dpu.pool_create import planned_geometry
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.pool_inspect import inspect_pool, is_owned, open_for_reading
from meshfusion.dpu.pool_place import is_free
from meshfusion.dpu.pool_shelf import OpenDrives
from meshfusion.dpu.pool_tenants import check_tenants
from meshfusion.jbof.config_problems import as_fix
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.sizes import format_size


class PoolProblem(NamedTuple):
    """``field``: of the pool's part of a configuration."""

    field: str
    problem: str
    fix: str


def pool_is_absent(path: Path) -> bool:
    """Nothing is at ``path``, or a directory in which a pool can be created."""
    try:
        return is_free(path)
    except OSError:
        return False  # it may not be entered: opening it will say so


class PoolLook(NamedTuple):
    """What a service would meet in a pool that exists. ``problem``: it would not open. ``warnings``: it would, but with
    less than the whole. ``geometries``: of the drives that it would have."""

    problem: PoolProblem | None = None
    warnings: tuple[str, ...] = ()
    geometries: tuple[SegmentGeometry, ...] = ()


def look_at_pool(path: Path, tenants: frozenset[str] = frozenset({DEFAULT_TENANT})) -> PoolLook:
    """At the pool that exists at ``path``, for these, beside whoever owns it; nothing is changed."""
    try:
        inspect_pool(path)  # from a child process: a damaged index can kill whoever maps it
        with open_for_reading(path) as (layout, found, index):
            check_tenants(layout, tenants, is_new=index.epoch() == 0)
            opened, failed = OpenDrives.examine(found)
            with contextlib.closing(opened):
                if not is_owned(layout):  # else its owner has seen to that, and changes what is compared
                    opened.check(index.segment_records(), index.epoch(), layout.directory)
                read_only = [one.drive for one in opened.drives if not one.file.is_writable]
                geometries = tuple(one.drive.geometry for one in opened.drives)
    except MeshFusionError as error:
        return PoolLook(PoolProblem("path", error.message, as_fix(error.next_step)))
    warnings = [drive.told for drive in (*found.absent, *failed)]
    warnings += [f"drive {drive.number} is read-only: nothing can be saved on it" for drive in read_only]
    warnings += [f"{problem}; the other copy is used" for problem in found.label_problems]
    return PoolLook(None, tuple(warnings), geometries)


class NewPool(NamedTuple):
    """A pool to be made. ``size_bytes``: of each drive. ``data_paths``: one a drive; none: a file inside ``path``."""

    path: Path
    size_bytes: int
    segment_bytes: int
    data_paths: tuple[Path, ...] = ()


def new_geometries(pool: NewPool) -> tuple[SegmentGeometry, ...]:
    """Of its drives, whose sizes are known to fit. Raises ConfigError for a drive that wants other segments."""
    return tuple(
        planned_geometry(number, pool.size_bytes, pool.segment_bytes, data_path)
        for number, data_path in enumerate(pool.data_paths or (None,))
    )


def room_problem(pool: NewPool) -> PoolProblem | None:
    """Why the data of a new pool would find no room; the place itself is known to be usable."""
    if pool.data_paths:
        try:
            check_data_paths(pool.data_paths, pool.size_bytes, left_by=pool_of_killed_creation(pool.path))
        except MeshFusionError as error:
            return PoolProblem("data_path", error.message, as_fix(error.next_step))
        return None
    folder = pool.path if pool.path.is_dir() else pool.path.parent
    found = os.statvfs(folder)
    free_bytes = found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
    if pool.size_bytes <= free_bytes:
        return None
    return PoolProblem(
        "size",
        f"is more than the {free_bytes >> 20}MiB that are free on the filesystem of {folder}",
        "free space there, use a smaller size, or choose another path",
    )


def without_effect(
    path: Path, *, size_bytes: int | None, segment_bytes: int | None, data_paths: tuple[Path, ...] = ()
) -> tuple[str, ...]:
    """Which of the sizes and drives, None and none where they are not configured, are not those of the pool that exists
    at ``path``."""
    if pool_is_absent(path):
        return ()
    layout = PoolLayout(path.absolute())
    try:
        found = find_drives(layout)
    except MeshFusionError:
        return ()  # opening it says so
    label = found.here[0].label
    pool_segment_bytes = label.segment_lba_count * label.lba_bytes
    head_bytes = label.data_start_lba * label.lba_bytes
    kept = f"has no effect: the pool {path} exists already, with"
    notes = []
    if size_bytes is not None and (size_bytes - head_bytes) // pool_segment_bytes != label.segment_count:
        size = format_size(label.end_lba * label.lba_bytes)
        notes.append(f"pool.size = {format_size(size_bytes)} {kept} a size of {size}")
    if segment_bytes is not None and segment_bytes != pool_segment_bytes:
        size = format_size(pool_segment_bytes)
        notes.append(f"pool.segment_size = {format_size(segment_bytes)} {kept} segments of {size}")
    if not found.absent:  # else it may be one of those
        note = read_note(layout)
        slices = () if note is None else note.slices
        known = {one.device.resolve() for one in slices} | {drive.path.resolve() for drive in found.here}
        pool, size = shlex.quote(str(path)), format_size(label.end_lba * label.lba_bytes)
        notes += [
            f"pool.data_path = {data_path} has no effect: the pool {path} exists already, without it; to add it: "
            f"mfctl jbof add {pool} --size {size} --data-path {shlex.quote(str(data_path))}"
            for data_path in data_paths
            if data_path.resolve() not in known
        ]
    return tuple(notes)
