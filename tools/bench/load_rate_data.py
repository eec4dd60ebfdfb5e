"""The data that the load-rate benchmark reads: a file full of chunks, saved as the connector saves them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshfusion.dpu.api.types import Extent
from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.shards import ShardWrite, ShardWritten
from meshfusion.host.path.staged import staged_path
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import (
    LBA_BYTES,
    ChunkHeader,
    header_lba_count,
    shard_lba_count,
    unit_lba_count,
)
from meshfusion.jbof.media.file import DirectMode, open_data_file

READ_BYTES = 6 << 20  # as the connector's worker has it
CHUNK_MIN_BYTES = 1 << 20  # the connector's default
KV_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A unit is ``run_count`` runs of ``run_bytes``, one for each layer."""

    name: str
    run_count: int
    run_bytes: int

    @property
    def unit_bytes(self) -> int:
        return self.run_count * self.run_bytes

    @property
    def units_per_chunk(self) -> int:
        return max(1, -(-CHUNK_MIN_BYTES // self.unit_bytes))

    def layout(self) -> GroupLayout:
        """Layers outermost, as the engine lays them out on CPU."""
        block_count = KV_BYTES // self.unit_bytes
        return GroupLayout(
            group=0,
            block_tokens=16,
            block_count=block_count,
            layer_names=tuple(f"layer.{i}" for i in range(self.run_count)),
            page_bytes=(self.run_bytes,) * self.run_count,
            unit_bytes=self.unit_bytes,
            run_bytes=self.run_bytes,
            run_starts=np.arange(self.run_count, dtype=np.int64) * block_count * self.run_bytes,
            run_strides=np.full(self.run_count, self.run_bytes, dtype=np.int64),
            memory_bytes=block_count * self.unit_bytes,
        )


SHAPES = (
    Shape("quickstart", 30, 98_304),  # SmolLM2-135M: 30 layers, blocks of 128 tokens
    Shape("small", 16, 4_096),  # 64 KiB units, 16 of them one after another in a chunk
)


@dataclass(frozen=True, slots=True)
class Filled:
    """A data file full of chunks. ``ranges``: (lba, byte count) of the reads that a load of everything makes."""

    units: tuple[UnitRead, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def payload_bytes(self) -> int:
        return sum(unit.unit_bytes for unit in self.units)


def fill(
    path: Path, shape: Shape, layout: GroupLayout, kernels: DigestKernels, memory: np.ndarray[Any, Any], size_bytes: int
) -> Filled:
    """Save chunk after chunk, header and all, as the connector does. Raises MediaError when a save fails."""
    units_per_chunk, unit_lbas = shape.units_per_chunk, unit_lba_count(shape.unit_bytes)
    chunk_lbas = shard_lba_count(shape.unit_bytes, units_per_chunk)
    writes = []
    for chunk in range(size_bytes // LBA_BYTES // chunk_lbas):
        first = chunk * units_per_chunk
        block_ids = tuple((first + i) % layout.block_count for i in range(units_per_chunk))
        extent = Extent(1, 0, chunk * chunk_lbas, chunk_lbas, 1)
        writes.append(ShardWrite((0, chunk), extent, _header(shape, extent), block_ids))
    with opened_path(path, layout, kernels, memory, threads=1, write_bytes=chunk_lbas * LBA_BYTES) as staged:
        staged.save(writes)
        written: dict[tuple[int, int], ShardWritten] = {}
        while len(written) < len(writes):
            for result in staged.take_written():
                written[result.save_id] = result
            time.sleep(0.01)
    units: list[UnitRead] = []
    ranges: list[tuple[int, int]] = []
    units_per_read = max(1, READ_BYTES // LBA_BYTES // unit_lbas)
    for write in writes:
        result = written[write.save_id]
        if result.unit_digests is None:
            raise MediaError(f"filling {path}: {result.reason}", next_step="free space, or use a smaller size")
        first_lba = write.extent.lba + header_lba_count(units_per_chunk)
        for i, digest in enumerate(result.unit_digests):
            units.append(UnitRead(first_lba + i * unit_lbas, shape.unit_bytes, write.block_ids[i], digest))
        for i in range(0, units_per_chunk, units_per_read):
            count = min(units_per_read, units_per_chunk - i)
            ranges.append((first_lba + i * unit_lbas, count * unit_lbas * LBA_BYTES))
    return Filled(tuple(units), tuple(ranges))


def _header(shape: Shape, extent: Extent) -> ChunkHeader:
    return ChunkHeader(
        pool_uuid=bytes(16),
        identity=bytes(32),
        key=extent.lba.to_bytes(32, "little"),
        tenant="default",
        group=0,
        rank=0,
        shard_count=1,
        position_tokens=0,
        token_count=16 * shape.units_per_chunk,
        segment=extent.segment,
        generation=extent.generation,
        lba=extent.lba,
        unit_bytes=shape.unit_bytes,
        unit_digests=(),
    )


@contextmanager
def opened_path(
    path: Path,
    layout: GroupLayout,
    kernels: DigestKernels,
    memory: np.ndarray[Any, Any],
    *,
    threads: int,
    write_bytes: int = LBA_BYTES,
) -> Iterator[DataPath]:
    staged = staged_path(
        open_data_file(path, writable=True, direct=DirectMode.AUTO),
        memory,
        layout,
        kernels,
        lba_bytes=LBA_BYTES,
        load_threads=threads,
        read_bytes=READ_BYTES,
        write_bytes=write_bytes,
    )
    try:
        yield staged
    finally:
        staged.close()
