"""What a configured pool meets on this machine: the one that exists, or the room for the one to be made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from meshfusion.dpu.pool_create import check_data_path
from meshfusion.dpu.pool_dir import PoolLayout, read_label
from meshfusion.dpu.pool_inspect import inspect_pool
from meshfusion.dpu.pool_place import is_free
from meshfusion.jbof.config_problems import as_fix
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.format import LBA_BYTES
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


def opening_problem(path: Path) -> PoolProblem | None:
    """Why the pool that exists at ``path`` cannot be read, found beside whoever owns it."""
    try:
        inspect_pool(path)
    except MeshFusionError as error:
        return PoolProblem("path", error.message, as_fix(error.next_step))
    return None


def room_problem(path: Path, size_bytes: int, data_path: Path | None = None) -> PoolProblem | None:
    """Why the data of a new pool would find no room; the place itself is known to be usable."""
    if data_path is not None:
        try:
            check_data_path(data_path, size_bytes - size_bytes % LBA_BYTES)
        except MeshFusionError as error:
            return PoolProblem("data_path", error.message, as_fix(error.next_step))
        return None
    folder = path if path.is_dir() else path.parent
    found = os.statvfs(folder)
    free_bytes = found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
    if size_bytes <= free_bytes:
        return None
    return PoolProblem(
        "size",
        f"is more than the {free_bytes >> 20}MiB that are free on the filesystem of {folder}",
        "free space there, use a smaller size, or choose another path",
    )


def without_effect(path: Path, *, size_bytes: int | None, segment_bytes: int | None) -> tuple[str, ...]:
    """Which of the sizes, None where none is configured, differ from those of the pool that exists at ``path``."""
    if pool_is_absent(path):
        return ()
    try:
        label = read_label(PoolLayout(path.absolute()))
    except MeshFusionError:
        return ()  # opening it says so
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
    return tuple(notes)
