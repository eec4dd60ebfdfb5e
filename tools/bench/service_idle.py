"""What a service costs that nobody asks for anything: memory, and processor time.

With an empty pool on one drive and on four, and with ``--pool``, which :mod:`meshfusion.tools.bench.index_scale` has
filled; each with engines that are attached and only say that they live. Telemetry is on, and nobody reads it. A service
is measured when it has settled: the index is looked through, and what was in the pool before is known to its policy,
which is told of 4096 chunks a second.

Memory is told as *anonymous*, which nothing but the process stands behind, and as *file*: libraries, and as much of the
index as is mapped and in memory, which the kernel takes back when it wants it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.tools.bench.index_fill import Filled
from meshfusion.tools.bench.index_scale import served, wait_for_adoption, wait_for_scan
from meshfusion.tools.bench.lookup_parties import Client, free_port
from meshfusion.tools.bench.processes import cpu_s, memory_of, wakeups
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

_POOL_BYTES: Final = 1 << 30


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=1)
@click.option("--seconds", default=60.0, show_default=True, help="Of each measurement of processor time.")
@click.option("--pool", type=click.Path(path_type=Path, exists=True), help="A filled one, measured too.")
@click.option("--drives", default=(1, 4), show_default=True, multiple=True, type=click.IntRange(min=1))
@click.option("--engines", default=(0, 4), show_default=True, multiple=True, type=click.IntRange(min=0))
@click.option(
    "--memory-engines", default=(1, 10, 100), show_default=True, multiple=True, help="Engines whose memory is measured."
)
def main(
    rounds: int,
    output_format: str,
    work: Path,
    seconds: float,
    pool: Path | None,
    drives: tuple[int, ...],
    engines: tuple[int, ...],
    memory_engines: tuple[int, ...],
) -> None:
    """Share of a processor, wake-ups and memory of a service that nobody asks for anything."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        for count in drives:
            path = directory / f"pool-{count}"
            create_pool_of_drives(path, size_bytes=_POOL_BYTES, data_paths=[None] * count)
            name = f"empty, {count} drive(s)"
            measure_pool(report, directory, path, name, rounds, seconds, engines, memory_engines, progress)
            shutil.rmtree(path)
        if pool is not None:
            measure_pool(
                report, directory, pool.absolute(), "filled", rounds, seconds, engines, memory_engines, progress
            )

    told: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "drives": list(drives), "engines": list(engines)}
    run_bench("service_idle", work, output_format, told, measure)


def measure_pool(
    report: Report,
    directory: Path,
    pool: Path,
    name: str,
    rounds: int,
    seconds: float,
    engines: tuple[int, ...],
    memory_engines: tuple[int, ...],
    progress: Progress,
) -> None:
    telemetry = f"telemetry: {{listen: '127.0.0.1:{free_port()}'}}"
    log = directory / "engines.log"
    with served(directory, Filled(pool, 0), config_lines=[telemetry]) as service:
        progress(f"{name}: waiting until the service has settled")
        wait_for_scan(service)
        pid = service.process.pid
        wait_for_adoption(service)
        add_memory(report, name, pid)
        for count in engines:
            shares: list[float] = []
            waits: list[float] = []
            with attached(service.address, count, log):
                for _ in range(rounds):
                    before_s, before, began_s = cpu_s(pid), wakeups(pid), time.monotonic()
                    time.sleep(seconds)
                    took_s = time.monotonic() - began_s
                    shares.append(100 * (cpu_s(pid) - before_s) / took_s)
                    waits.append((wakeups(pid) - before) / took_s)
                    progress(f"{name}, {count} engine(s): {shares[-1]:.2f} % of a processor, {waits[-1]:.0f} waits/s")
            report.add(f"{name}, {count} engine(s), processor", "%", shares)
            report.add(f"{name}, {count} engine(s), waits", "1/s", waits)
        for count in memory_engines:
            with attached(service.address, count, log):
                time.sleep(10.0)
                add_memory(report, f"{name}, {count} engine(s)", pid)


def add_memory(report: Report, name: str, pid: int) -> None:
    memory = memory_of(pid)
    report.add(f"{name}, anonymous", "MiB", [memory.anonymous_bytes / (1 << 20)])
    report.add(f"{name}, file", "MiB", [(memory.rss_bytes - memory.anonymous_bytes) / (1 << 20)])


@contextmanager
def attached(address: str, count: int, log: Path) -> Iterator[None]:
    """So many engines."""
    if not count:
        yield
        return
    client = Client([sys.executable, "-m", "meshfusion.tools.bench.idle_engines", address, str(count)], log)
    try:
        yield
    finally:
        client.close()


if __name__ == "__main__":
    main()
