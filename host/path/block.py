"""The kernel's way: O_DIRECT between a file or block device and the engine's own KV memory, and nothing in between.

Also what serves NVMe/TCP, whose namespaces the kernel's initiator shows as block devices (docs/paths.md). The kernel
moves the bytes of many units in one call, into their runs; what lies on the medium between them goes to a sink. A
loader then digests what the destination holds (rule 4), many units in one pass without the GIL.

A read that the kernel has under way cannot be called back. So memory counts as being written (``LoadJob.enter``) until
the call has returned: a load that is abandoned keeps its blocks until then, where the staged path gives them back at
once. Memory is the host's: the kernel reaches a device's only with cuFile, of which we could show nothing to be right.

Threads call ``preadv``. io_uring was measured: no faster, and it saves processor time on many small calls only, where
this path makes few of up to :data:`READ_BYTES` (docs/paths.md, tools/bench/submission_rate.py).
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshfusion.host.kv.group_layout import I64, GroupLayout
from meshfusion.host.memory.host_memory import ALREADY_PRODUCED
from meshfusion.host.memory.kv_memory import Produced
from meshfusion.host.path.block_layout import check_block_layout
from meshfusion.host.path.cpus import Cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.late_writes import fate_of_write
from meshfusion.host.path.load_job import LoadJob, UnitFailure
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.pool_data import PoolData, as_pool_data
from meshfusion.host.path.proof import IsDigestRight, outcomes_of
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.spans import GAP_PARTS, Span
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.format import LBA_BYTES, encode_chunk_header, header_lba_count, unit_lba_count
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile
from meshfusion.jbof.media.vectors import length_of

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]

READ_BYTES: Final = 6 << 20


def block_path(
    data: DataFile | PoolData,
    memory: Memory,
    layouts: Sequence[GroupLayout],
    kernels: DigestKernels,
    *,
    lba_bytes: int,
    load_threads: int,
    max_units: int,
    read_bytes: int = READ_BYTES,
    cpus: Cpus | None = None,
    is_digest_right: IsDigestRight = operator.eq,
) -> DataPath:
    """It owns ``data``. ``layouts``: of each KV group; ``read_bytes``: what a load thread has under way; ``max_units``:
    of the largest shard.

    Raises what :func:`~meshfusion.host.path.block_layout.check_block_layout` raises; ``data`` is closed then.
    """
    assert lba_bytes == LBA_BYTES, "DataFile counts in these"
    data = as_pool_data(data)
    try:
        for file in data.files.values():
            check_block_layout(file, memory.ctypes.data, layouts)
    except MeshFusionError:
        data.close()
        raise
    unit_bytes = [layout.unit_bytes for layout in layouts]
    read_lbas = max(unit_lba_count(max(unit_bytes)), read_bytes // lba_bytes)
    medium = BlockMedium(data, memory, tuple(layouts), kernels, read_lbas, max_units, is_digest_right)
    return DataPath(
        medium,
        kind=PathKind.BLOCK,
        unit_bytes=unit_bytes,
        unit_runs=[layout.run_count for layout in layouts],
        lba_bytes=lba_bytes,
        load_threads=load_threads,
        cpus=cpus,
    )


@dataclass(frozen=True, slots=True)
class BlockMedium:
    """See :func:`block_path`."""

    data: PoolData
    memory: Memory
    layouts: tuple[GroupLayout, ...]
    kernels: DigestKernels
    read_lbas: int
    max_units: int
    is_digest_right: IsDigestRight

    @property
    def save_depth(self) -> int:
        return 2

    def units_pieces(self, layout: GroupLayout, run_offsets: I64) -> Iterable[list[memoryview]]:
        """For each unit the memory of its runs, in canonical order. ``run_offsets``: int64[units, runs]."""
        view, run_bytes = self.memory.data, layout.run_bytes
        for offsets in run_offsets.tolist():
            yield [view[offset : offset + run_bytes] for offset in offsets]

    def digests(self, layout: GroupLayout, run_offsets: I64) -> tuple[bytes, ...]:
        return tuple(self.kernels.digest_units(self.memory, run_offsets, layout.run_bytes))

    def produced(self) -> Produced:
        return ALREADY_PRODUCED

    def loader(self) -> BlockLoader:
        return BlockLoader(self)

    def saver(self) -> BlockSaver:
        return BlockSaver(self)

    def interrupt(self, deadline_s: float) -> None:
        """What the kernel has under way cannot be interrupted; its memory is kept until it returns."""

    def close(self) -> None:
        self.data.close()


class BlockLoader:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Loader`."""

    def __init__(self, medium: BlockMedium) -> None:
        self._medium = medium
        # What nobody wants of a span goes here, every piece to a place of its own: a filesystem with checksums (btrfs)
        # takes a place that is read to twice at once for damage.
        self._sink = AlignedBuffer(_whole_pages(_most_unwanted_bytes(medium)))

    def load(self, job: LoadJob, span: Span) -> list[UnitFailure | None]:
        medium, layout = self._medium, self._medium.layouts[span.group]
        units = job.units[span.first : span.first + span.unit_count]
        run_offsets = layout.run_offsets_of([unit.block_id for unit in units])
        pieces = self._pieces(run_offsets, span)
        data, lba = medium.data.at(span.lba)
        if not job.enter():
            return list(job.refused(span.first, len(units)))
        try:
            data.read_vectors(lba, pieces)
            digests = medium.digests(layout, run_offsets)
        finally:
            job.leave()  # also after an error: the call has returned, and with it all that it had under way
        return outcomes_of(units, span.first, digests, medium.is_digest_right)

    def _pieces(self, run_offsets: I64, span: Span) -> list[memoryview]:
        """Memory for all of ``span``: its units' and the sink's."""
        layout = self._medium.layouts[span.group]
        between_bytes = span.stride_lbas * LBA_BYTES - layout.unit_bytes
        left_bytes = span.lba_count * LBA_BYTES - span.unit_count * layout.unit_bytes
        sink_at = 0
        pieces: list[memoryview] = []
        for unit in self._medium.units_pieces(layout, run_offsets):
            pieces += unit
            unwanted_bytes = min(between_bytes, left_bytes - sink_at)  # behind the last unit only its own slack
            if unwanted_bytes:
                pieces.append(self._sink.view[sink_at : sink_at + unwanted_bytes])
                sink_at += unwanted_bytes
        # A run that left the memory would be a shorter piece, and what follows it would go to the wrong places.
        assert length_of(pieces) == span.lba_count * LBA_BYTES, span
        return pieces

    def close(self) -> None:
        self._sink.close()


class BlockSaver:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Saver`."""

    def __init__(self, medium: BlockMedium) -> None:
        self._medium = medium
        self._header = AlignedBuffer(_whole_pages(header_lba_count(medium.max_units) * LBA_BYTES))
        self._zeros = AlignedBuffer(_whole_pages(LBA_BYTES))  # between the end of a unit and its block boundary

    def write(self, shard: ShardWrite) -> tuple[bytes, ...]:
        medium, layout = self._medium, self._medium.layouts[shard.header.group]
        run_offsets = layout.run_offsets_of(shard.block_ids)
        digests = medium.digests(layout, run_offsets)
        header = encode_chunk_header(replace(shard.header, unit_digests=digests), LBA_BYTES)
        self._header.view[: len(header)] = header
        slack_bytes = unit_lba_count(layout.unit_bytes) * LBA_BYTES - layout.unit_bytes
        pieces = [self._header.view[: len(header)]]
        for unit in medium.units_pieces(layout, run_offsets):
            pieces += unit
            if slack_bytes:
                pieces.append(self._zeros.view[:slack_bytes])
        length_bytes = length_of(pieces)
        assert length_bytes == shard.extent.lba_count * LBA_BYTES, (length_bytes, shard.extent)
        data = medium.data.to_write(shard.extent.namespace)
        with fate_of_write(data):
            data.write_vectors(shard.extent.lba, pieces)
        return digests

    def flush(self) -> None:
        self._medium.data.flush()

    def close(self) -> None:
        self._header.close()
        self._zeros.close()


def _most_unwanted_bytes(medium: BlockMedium) -> int:
    """The most that a span holds besides its units: see :func:`~meshfusion.host.path.spans.spans_of`."""
    most = 0
    for layout in medium.layouts:
        unit_lbas = unit_lba_count(layout.unit_bytes)
        stride_lbas = unit_lbas + max(1, unit_lbas // GAP_PARTS)
        most = max(most, max(1, medium.read_lbas // unit_lbas) * (stride_lbas * LBA_BYTES - layout.unit_bytes))
    return most


def _whole_pages(length_bytes: int) -> int:
    return -(-length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
