"""A pool's repair: what a check finds wrong is dropped, or written anew from what is known to be right.

Only where nobody else has the pool. While it is served there is nothing to do: engines recompute a damaged chunk, and
the service drops each that a load finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.index import Index
from meshfusion.dpu.index_files import open_index
from meshfusion.dpu.index_proof import WHOLE_SCAN_S
from meshfusion.dpu.index_scan import scan_in_child
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import PoolLayout, write_label
from meshfusion.dpu.pool_drives import PoolDrives, find_drives
from meshfusion.dpu.pool_inspect import ChunkChecker, all_chunks, is_here, open_data, segment_problems
from meshfusion.dpu.pool_medium import FileMedium, PoolMedium
from meshfusion.dpu.store.effects import DeleteChunk


@dataclass(frozen=True, slots=True)
class RepairReport:
    """``chunks_dropped`` and ``segments_repaired``: one line each. ``index_entries_dropped``: that could not be read.
    ``labels_repaired``: what was wrong with a copy, which was written anew from the other. ``chunks_away``: not
    checked, since a shard of each lies on a drive that is away."""

    chunks_checked: int
    chunks_dropped: tuple[str, ...]
    index_entries_dropped: int
    segments_repaired: tuple[str, ...]
    labels_repaired: tuple[str, ...]
    chunks_away: int = 0


def repair_pool(path: Path, progress: Callable[[int, int], None]) -> RepairReport:
    """Check the pool at ``path`` and drop what is damaged. ``progress(checked, total)`` counts chunks.

    Raises PoolBusyError while it is served, FormatError when its index or both copies of its label are damaged as a
    whole, and MediaError.
    """
    layout = PoolLayout(path.absolute())
    drives = find_drives(layout)
    owner = OwnerLock.take(layout, drives.paths)
    try:
        pool_uuid, capacity_bytes = drives.pool_uuid, drives.capacity_bytes
        totals = scan_in_child(layout.index, pool_uuid, capacity_bytes, deadline_s=WHOLE_SCAN_S)
        with open_index(layout.index, pool_uuid, capacity_bytes, payload_bytes=totals.payload_bytes) as index:
            entries_dropped = index.drop_damaged()
            chunks, away = _drop_chunks(drives, index, lambda done: progress(done, max(done, totals.chunk_count)))
            segments = _repair_segments(drives, index)
        for drive in drives.here:
            if drive.label_problems:
                write_label(drive.path, drive.label)
        checked = totals.chunk_count - away
        return RepairReport(checked, chunks, entries_dropped, segments, drives.label_problems, away)
    finally:
        owner.release()


def _drop_chunks(drives: PoolDrives, index: Index, progress: Callable[[int], None]) -> tuple[tuple[str, ...], int]:
    """A line for each, and how many were not checked."""
    checker, dropped, away = ChunkChecker(drives.here[0].label), [], 0
    with open_data(drives) as data:
        for done, record in enumerate(all_chunks(index)):
            if not is_here(record, data):
                away += 1
            elif problem := checker.problem_of(record, data):
                index.apply([DeleteChunk(record.key, record.shards[0].extent)])
                dropped.append(f"{record.key.hex()}: {problem}")
            progress(done + 1)
    return tuple(dropped), away


def _repair_segments(drives: PoolDrives, index: Index) -> tuple[str, ...]:
    """The index knows what the headers must say."""
    with open_data(drives) as data:
        found = tuple(segment_problems(index, drives, data))
    for drive in drives.here:
        records = [record for record, _ in found if record.segment in drive.geometry.segments]
        if records:
            file = FileMedium.open(drive.path)
            try:
                PoolMedium(file, drive.label, drive.geometry, index.epoch()).write_headers(records)
            finally:
                file.close()
    return tuple(problem for _, problem in found)
