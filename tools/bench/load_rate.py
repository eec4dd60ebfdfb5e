"""How close do loads come to the medium? Staged loads against a plain O_DIRECT reader of the very same ranges.

Both use the same number of threads, the same ranges and read sizes. The plain reader only reads into aligned buffers,
once of ordinary pages and once of huge pages (a request to the drive holds so many pieces of memory, and huge pages are
few pieces); a load also copies into KV memory and proves every unit by its digest. Also timed: that copy and digest
alone, from bytes already in staging, on one thread (``place``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from meshfusion.dpu.api.types import Extent
from meshfusion.host.kv.layout import GroupLayout
from meshfusion.host.path.staged import ShardWrite, ShardWritten, StagedPath, UnitRead
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import (
    LBA_BYTES,
    ChunkHeader,
    header_lba_count,
    shard_lba_count,
    unit_lba_count,
)
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile, DirectMode, create_data_file, open_data_file
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

READ_BYTES = 4 << 20  # as the connector's worker has it
CHUNK_MIN_BYTES = 1 << 20  # the connector's default
KV_BYTES = 512 << 20
LOAD_DEADLINE_S = 600.0


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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=5)
@click.option("--size-gib", default=1.0, show_default=True, help="Size of the data file.")
@click.option("--threads", default=(1, 2, 4), show_default=True, multiple=True, type=click.IntRange(1, 64))
def main(rounds: int, output_format: str, work: Path, size_gib: float, threads: tuple[int, ...]) -> None:
    """GB/s of proven loads against a plain O_DIRECT reader."""
    size_bytes = int(size_gib * (1 << 30)) // LBA_BYTES * LBA_BYTES
    settings: dict[str, Any] = {"rounds": rounds, "size_bytes": size_bytes, "threads": list(threads)}

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        for shape in SHAPES:
            measure_shape(report, directory / shape.name, shape, size_bytes, threads, rounds, progress)

    run_bench("load_rate", work, output_format, settings, measure)


def measure_shape(
    report: Report,
    path: Path,
    shape: Shape,
    size_bytes: int,
    thread_counts: tuple[int, ...],
    rounds: int,
    progress: Progress,
) -> None:
    layout, kernels = shape.layout(), load_kernels(shape.unit_bytes)
    memory = np.empty(layout.memory_bytes, dtype=np.uint8)
    memory.view(np.uint64)[:] = np.random.default_rng(7).integers(1 << 63, size=memory.size // 8, dtype=np.uint64)
    progress(f"{shape.name}: filling {path}")
    create_data_file(path, size_bytes)
    try:
        filled = fill(path, shape, layout, kernels, memory, size_bytes)
        with open_data_file(path, writable=False) as data:
            if not data.direct:
                report.problems.append(f"no O_DIRECT: {data.direct_reason}")
            report.details.append(
                {
                    "shape": shape.name,
                    "unit_bytes": shape.unit_bytes,
                    "units": len(filled.units),
                    "payload_bytes": filled.payload_bytes,
                    "read_bytes": max(length for _, length in filled.ranges),
                }
            )
            place = [place_rate(shape, layout, kernels, memory) for _ in range(rounds)]
            report.add(f"{shape.name}, place only, 1 thread", "GB/s", place)
            for count in thread_counts:
                plain: list[float] = []
                huge: list[float] = []
                loads: list[float] = []
                for index in range(rounds):
                    plain.append(plain_rate(data, filled, count, huge_pages=False))
                    loads.append(load_rate(path, filled, layout, kernels, memory, count))
                    huge.append(plain_rate(data, filled, count, huge_pages=True))
                    progress(
                        f"{shape.name}, {count} thread(s), round {index + 1} of {rounds}: "
                        f"plain {plain[-1]:.2f}, with huge pages {huge[-1]:.2f}, load {loads[-1]:.2f} GB/s"
                    )
                loaded = report.add(f"{shape.name}, load, {count} thread(s)", "GB/s", loads)
                report.compare(loaded, report.add(f"{shape.name}, plain, {count} thread(s)", "GB/s", plain))
                report.compare(loaded, report.add(f"{shape.name}, plain huge, {count} thread(s)", "GB/s", huge))
    finally:
        path.unlink()


# ---- filling -----------------------------------------------------------------------------------------------------


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
        writes.append(ShardWrite(chunk, extent, _header(shape, extent), block_ids))
    with staged_path(path, layout, kernels, memory, threads=1, write_bytes=chunk_lbas * LBA_BYTES) as staged:
        staged.save(writes)
        written: dict[int, ShardWritten] = {}
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
        position_tokens=0,
        token_count=16 * shape.units_per_chunk,
        segment=extent.segment,
        generation=extent.generation,
        lba=extent.lba,
        unit_bytes=shape.unit_bytes,
        unit_digests=(),
    )


@contextmanager
def staged_path(
    path: Path,
    layout: GroupLayout,
    kernels: DigestKernels,
    memory: np.ndarray[Any, Any],
    *,
    threads: int,
    write_bytes: int = LBA_BYTES,
) -> Iterator[StagedPath]:
    staged = StagedPath(
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


# ---- measuring ---------------------------------------------------------------------------------------------------


def plain_rate(data: DataFile, filled: Filled, threads: int, *, huge_pages: bool) -> float:
    """GB/s of payload, read and nothing else."""
    ranges: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for item in filled.ranges:
        ranges.put(item)
    buffers = [AlignedBuffer(READ_BYTES, huge_pages=huge_pages) for _ in range(threads)]
    for buffer in buffers:
        buffer.array[:] = 1  # its pages exist before the clock starts

    def read(buffer: AlignedBuffer) -> None:
        while True:
            try:
                lba, length = ranges.get_nowait()
            except queue.Empty:
                return
            data.read_into(lba, buffer.view[:length])

    readers = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
    started_s = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = time.perf_counter() - started_s
    for buffer in buffers:
        buffer.close()
    return filled.payload_bytes / seconds / 1e9


def load_rate(
    path: Path,
    filled: Filled,
    layout: GroupLayout,
    kernels: DigestKernels,
    memory: np.ndarray[Any, Any],
    threads: int,
) -> float:
    """GB/s of payload, in KV memory and proven. Raises MediaError when a unit fails."""
    with staged_path(path, layout, kernels, memory, threads=threads) as staged:
        _wait(staged, filled.units[: threads * 4])  # each thread's staging exists before the clock starts
        started_s = time.perf_counter()
        _wait(staged, filled.units)
        return filled.payload_bytes / (time.perf_counter() - started_s) / 1e9


def _wait(staged: StagedPath, units: tuple[UnitRead, ...]) -> None:
    job = staged.load(units, abandon_after_s=LOAD_DEADLINE_S)
    while (result := job.result(time.monotonic())) is None:
        time.sleep(0.001)
    if result.failures:
        raise MediaError(f"a unit did not load: {result.failures[0].reason}", next_step="look at the drive")


def place_rate(shape: Shape, layout: GroupLayout, kernels: DigestKernels, memory: np.ndarray[Any, Any]) -> float:
    """GB/s of copy and digest alone: what one thread could load from an infinitely fast medium."""
    with AlignedBuffer(-(-shape.unit_bytes // LBA_BYTES) * LBA_BYTES) as staging:
        staging.array[:] = 7
        count = max(1, (256 << 20) // shape.unit_bytes)
        started_s = time.perf_counter()
        for block_id in range(count):
            offsets = layout.run_offsets(block_id % layout.block_count)
            kernels.scatter_and_digest(staging.array, 0, memory, offsets, layout.run_bytes)
        return count * shape.unit_bytes / (time.perf_counter() - started_s) / 1e9


if __name__ == "__main__":
    main()
