"""A pool's repair: what a check finds wrong is dropped, or written anew from what is known to be right.

Only where nobody else has the pool. While it is served there is nothing to do: engines recompute a damaged chunk, and
the service drops each that a load finds.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.index import Index
from meshfusion.dpu.index_files import open_index, scan_in_child
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import PoolLayout, geometry_of, read_label_copies, write_label
from meshfusion.dpu.pool_inspect import SCAN_DEADLINE_S, ChunkChecker, all_chunks, segment_problems
from meshfusion.dpu.pool_medium import FileMedium, PoolMedium
from meshfusion.dpu.store.effects import DeleteChunk
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.file import DirectMode, open_data_file


@dataclass(frozen=True, slots=True)
class RepairReport:
    """``chunks_dropped`` and ``segments_repaired``: one line each. ``index_entries_dropped``: that could not be read.
    ``labels_repaired``: what was wrong with a copy, which was written anew from the other."""

    chunks_checked: int
    chunks_dropped: tuple[str, ...]
    index_entries_dropped: int
    segments_repaired: tuple[str, ...]
    labels_repaired: tuple[str, ...]


def repair_pool(path: Path, progress: Callable[[int, int], None]) -> RepairReport:
    """Check the pool at ``path`` and drop what is damaged. ``progress(checked, total)`` counts chunks.

    Raises PoolBusyError while it is served, FormatError when its index or both copies of its label are damaged as a
    whole, and MediaError.
    """
    layout = PoolLayout(path.absolute())
    label, label_problems = read_label_copies(layout)
    owner = OwnerLock.take(layout)
    try:
        pool_uuid, capacity_bytes = str(uuid.UUID(bytes=label.pool_uuid)), geometry_of(label).capacity_bytes
        totals = scan_in_child(layout.index, pool_uuid, capacity_bytes, deadline_s=SCAN_DEADLINE_S)
        with open_index(layout.index, pool_uuid, capacity_bytes, payload_bytes=totals.payload_bytes) as index:
            entries_dropped = index.drop_damaged()
            chunks = _drop_chunks(layout, label, index, lambda done: progress(done, max(done, totals.chunk_count)))
            segments = _repair_segments(layout, label, index)
        if label_problems:
            write_label(layout.data, label)
        return RepairReport(totals.chunk_count, chunks, entries_dropped, segments, label_problems)
    finally:
        owner.release()


def _drop_chunks(layout: PoolLayout, label: Label, index: Index, progress: Callable[[int], None]) -> tuple[str, ...]:
    checker, dropped = ChunkChecker(label), []
    with open_data_file(layout.data, writable=False, direct=DirectMode.AUTO) as data:
        for done, record in enumerate(all_chunks(index)):
            if problem := checker.problem_of(record, data):
                index.apply([DeleteChunk(record.key, record.shards[0].extent)])
                dropped.append(f"{record.key.hex()}: {problem}")
            progress(done + 1)
    return tuple(dropped)


def _repair_segments(layout: PoolLayout, label: Label, index: Index) -> tuple[str, ...]:
    """The index knows what the headers must say."""
    with open_data_file(layout.data, writable=False, direct=DirectMode.AUTO) as data:
        found = tuple(segment_problems(index, label, data))
    if found:
        file = FileMedium.open(layout.data)
        try:
            PoolMedium(file, label, geometry_of(label), index.epoch()).write_headers(record for record, _ in found)
        finally:
            file.close()
    return tuple(problem for _, problem in found)
