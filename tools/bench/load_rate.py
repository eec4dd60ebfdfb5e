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
from pathlib import Path
from typing import Any

import click
import numpy as np

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile, create_data_file, open_data_file
from meshfusion.tools.bench.load_rate_data import READ_BYTES, SHAPES, Filled, Shape, fill, opened_path
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

LOAD_DEADLINE_S = 600.0


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
    with opened_path(path, layout, kernels, memory, threads=threads) as staged:
        _wait(staged, filled.units[: threads * 4])  # each thread's staging exists before the clock starts
        started_s = time.perf_counter()
        _wait(staged, filled.units)
        return filled.payload_bytes / (time.perf_counter() - started_s) / 1e9


def _wait(staged: DataPath, units: tuple[UnitRead, ...]) -> None:
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
