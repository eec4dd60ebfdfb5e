"""Which way from a local medium is faster: staged (through huge pages, then copied) or block (straight into KV memory)?

All load the same units of the same file into the same memory and prove them, in turns. ``uring`` and ``fixed`` are the
block path with its reads submitted to an io_uring of each load thread, ``fixed`` with KV memory registered in it. KV
memory is once of ordinary pages, as an engine's is as a rule, and once of huge pages: a request to the drive holds so
many pieces of memory, and what staging makes up for its copy is that its pages are few and large. Processor time is
that of this process, the kernel's part of the calls included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.path.block import block_path
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DirectMode, create_data_file, open_data_file
from meshfusion.tools.bench.load_rate_data import READ_BYTES, SHAPES, Filled, Shape, fill, opened_path
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.bench.uring_file import UringFile

LOAD_DEADLINE_S = 600.0
WAYS = ("block", "staged", "uring", "fixed")
ONE_MIB = (Shape("1 MiB in one run", 1, 1 << 20), Shape("1 MiB in 16 runs", 16, 64 << 10))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=5)
@click.option("--size-gib", default=1.0, show_default=True, help="Size of the data file.")
@click.option("--threads", default=(1, 4), show_default=True, multiple=True, type=click.IntRange(1, 64))
@click.option("--way", "ways", default=WAYS[:2], show_default=True, multiple=True, type=click.Choice(WAYS))
def main(
    rounds: int, output_format: str, work: Path, size_gib: float, threads: tuple[int, ...], ways: tuple[str, ...]
) -> None:
    """GB/s and processor seconds of proven loads, in turns; the first way is compared with each of the others."""
    size_bytes = int(size_gib * (1 << 30)) // LBA_BYTES * LBA_BYTES
    settings: dict[str, Any] = {"rounds": rounds, "size_bytes": size_bytes, "threads": list(threads), "way": list(ways)}

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        for shape in (*ONE_MIB, *SHAPES):
            path = directory / "data"
            create_data_file(path, size_bytes)
            try:
                measure_shape(report, path, shape, size_bytes, threads, ways, rounds, progress)
            finally:
                path.unlink()

    run_bench("path_rate", work, output_format, settings, measure)


def measure_shape(
    report: Report,
    path: Path,
    shape: Shape,
    size_bytes: int,
    thread_counts: tuple[int, ...],
    ways: tuple[str, ...],
    rounds: int,
    progress: Progress,
) -> None:
    layout, kernels = shape.layout(), load_kernels(shape.unit_bytes)
    for huge_pages in (False, True):
        with AlignedBuffer(layout.memory_bytes, huge_pages=huge_pages) as memory:
            memory.array[:] = np.random.default_rng(7).integers(256, size=memory.size_bytes, dtype=np.uint8)
            filled = fill(path, shape, layout, kernels, memory.array, size_bytes)
            for count in thread_counts:
                samples: dict[str, list[float]] = {}
                for index in range(rounds):
                    for kind in reversed(ways) if index % 2 else ways:
                        with opened(kind, path, layout, kernels, memory.array, count) as way:
                            rate, cpu_s = load(way, filled, warm_up=count * 4)
                        samples.setdefault(kind, []).append(rate)
                        samples.setdefault(f"{kind} cpu", []).append(cpu_s)
                name = f"{shape.name}, {'huge' if huge_pages else 'ordinary'} pages, {count} thread(s)"
                rates = [report.add(f"{name}, {kind}", "GB/s", samples[kind]) for kind in ways]
                costs = [report.add(f"{name}, {kind}", "cpu s/GB", samples[f"{kind} cpu"]) for kind in ways]
                for series in (rates, costs):
                    for other in series[1:]:
                        report.compare(series[0], other)
                told = (
                    f"{kind} {rate.median:.2f} GB/s, {cost.median:.2f} cpu s/GB"
                    for kind, rate, cost in zip(ways, rates, costs, strict=True)
                )
                progress(f"{name}: {'; '.join(told)}")


@contextmanager
def opened(
    kind: str, path: Path, layout: GroupLayout, kernels: DigestKernels, memory: np.ndarray[Any, Any], threads: int
) -> Iterator[DataPath]:
    if kind == "staged":
        with opened_path(path, layout, kernels, memory, threads=threads) as staged:
            yield staged
        return
    data = open_data_file(path, writable=True, direct=DirectMode.REQUIRED)
    block = block_path(
        UringFile(data, memory if kind == "fixed" else None) if kind in ("uring", "fixed") else data,
        memory,
        (layout,),
        kernels,
        lba_bytes=LBA_BYTES,
        load_threads=threads,
        read_bytes=READ_BYTES,
        max_units=1,
    )
    try:
        yield block
    finally:
        block.close()


def load(way: DataPath, filled: Filled, *, warm_up: int) -> tuple[float, float]:
    """GB/s of payload, in KV memory and proven, and processor seconds for each GB."""
    _wait(way, filled.units[:warm_up])  # each thread's buffers exist before the clock starts
    started_s, cpu_s = time.perf_counter(), time.process_time()
    _wait(way, filled.units)
    gigabytes = filled.payload_bytes / 1e9
    return gigabytes / (time.perf_counter() - started_s), (time.process_time() - cpu_s) / gigabytes


def _wait(way: DataPath, units: tuple[UnitRead, ...]) -> None:
    job = way.load(units, abandon_after_s=LOAD_DEADLINE_S)
    while (result := job.result(time.monotonic())) is None:
        time.sleep(0.001)
    if result.failures:
        raise MediaError(f"a unit did not load: {result.failures[0].reason}", next_step="look at the drive")


if __name__ == "__main__":
    main()
