"""Does io_uring pay for reads of chunks, against what the block path does: threads that call ``preadv``?

Both read the same places of a file or device in the same mixed order, past the page cache, into the same memory, in
turns; nothing is digested, so that a difference in the submission is not hidden by it. ``uring``: one thread keeps as
many READV under way as the other way has threads; ``fixed``: the same into registered memory. A read of 1 MiB is also
tried as 16 pieces: a unit of an engine that lays out layers outermost. Processor time is this process's, the kernel's
part of the calls and its worker threads included; what a device's interrupts cost is nobody's.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import create_data_file
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.bench.uring import Iovecs, Memory, Ring, iovecs_of

MOST_DEPTH: Final = 32
WRITE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Read:
    """``piece_count`` pieces of memory of one length, apart from each other."""

    name: str
    length_bytes: int
    piece_count: int = 1

    @property
    def piece_bytes(self) -> int:
        return self.length_bytes // self.piece_count


READS: Final = (Read("128 KiB", 128 << 10), Read("1 MiB", 1 << 20), Read("1 MiB in 16 pieces", 1 << 20, 16))


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """``offsets``: where to read, in this order. ``slots``: for each of as many reads as may be under way, its
    pieces of ``memory``."""

    fd: int
    read: Read
    offsets: tuple[int, ...]
    memory: Memory
    slots: tuple[tuple[int, ...], ...]

    def iovecs(self, slot: int) -> Iovecs:
        start = self.memory.ctypes.data
        return iovecs_of([start + at for at in self.slots[slot]], self.read.piece_bytes)


def with_threads(task: Task) -> None:
    places: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    failures: list[str] = []
    for offset in (*task.offsets, *([None] * len(task.slots))):
        places.put(offset)

    def run(slot: int) -> None:
        pieces = [task.memory[at : at + task.read.piece_bytes].data for at in task.slots[slot]]
        while (offset := places.get()) is not None:
            try:
                count = os.preadv(task.fd, pieces, offset)
            except OSError as error:
                failures.append(str(error))
            else:
                if count != task.read.length_bytes:
                    failures.append(f"{count} bytes at {offset}")

    threads = [threading.Thread(target=run, args=(slot,)) for slot in range(len(task.slots))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _check(failures)


def with_uring(task: Task) -> None:
    iovecs = [task.iovecs(slot) for slot in range(len(task.slots))]
    ring = Ring(MOST_DEPTH)
    _keep_busy(ring, task, lambda offset, slot: ring.read(task.fd, offset, iovecs[slot], slot))


def with_registered_memory(task: Task) -> None:
    start = task.memory.ctypes.data
    ring = Ring(MOST_DEPTH)
    ring.register(task.memory)
    _keep_busy(
        ring,
        task,
        lambda offset, slot: ring.read_fixed(
            task.fd, offset, start + task.slots[slot][0], task.read.length_bytes, slot
        ),
    )


def _keep_busy(ring: Ring, task: Task, begin: Callable[[int, int], None]) -> None:
    left, under_way = iter(task.offsets), 0
    failures: list[str] = []
    free = list(range(len(task.slots)))
    while True:
        while free and (offset := next(left, None)) is not None:
            begin(offset, free.pop())
            under_way += 1
        if not under_way:
            break
        for slot, result in ring.wait():
            if result != task.read.length_bytes:
                failures.append(f"result {result}")
            free.append(slot)
            under_way -= 1
    ring.close()
    _check(failures)


def _check(failures: list[str]) -> None:
    if failures:
        raise MediaError(f"{len(failures)} reads failed: {failures[0]}", next_step="look at the drive")


WAYS: Final[dict[str, Callable[[Task], None]]] = {
    "threads": with_threads,
    "uring": with_uring,
    "fixed": with_registered_memory,
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=5)
@click.option("--size-mib", default=1024, show_default=True, help="How much is read in each sample.")
@click.option("--depth", default=(1, 8, 32), show_default=True, multiple=True, type=click.IntRange(1, MOST_DEPTH))
@click.option("--device", type=click.Path(path_type=Path, exists=True), help="Read this one, instead of a file made.")
def main(
    rounds: int, output_format: str, work: Path, size_mib: int, depth: tuple[int, ...], device: Path | None
) -> None:
    """MB/s and processor seconds of reads: threads, io_uring, and io_uring with registered memory, in turns."""
    size_bytes = size_mib << 20
    settings: dict[str, Any] = {"rounds": rounds, "size_mib": size_mib, "depth": list(depth), "device": str(device)}

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        path = device or directory / "data"
        if device is None:
            fill(path, size_bytes)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            for read in READS:
                for count in depth:
                    measure_reads(report, fd, read, size_bytes, count, rounds, progress)
        finally:
            os.close(fd)

    run_bench("submission_rate", work, output_format, settings, measure)


def fill(path: Path, size_bytes: int) -> None:
    """Written for real: a file that is only set aside is not read from the drive."""
    create_data_file(path, size_bytes)
    content = np.random.default_rng(7).integers(256, size=WRITE_BYTES, dtype=np.uint8).tobytes()
    with path.open("r+b") as file:
        for _ in range(size_bytes // WRITE_BYTES):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def measure_reads(
    report: Report, fd: int, read: Read, size_bytes: int, depth: int, rounds: int, progress: Progress
) -> None:
    order = np.random.default_rng(1).permutation(size_bytes // read.length_bytes)
    offsets = tuple(int(index) * read.length_bytes for index in order)
    gap_bytes = LBA_BYTES if read.piece_count > 1 else 0
    slot_bytes = read.length_bytes + gap_bytes * read.piece_count
    with AlignedBuffer(slot_bytes * depth) as memory:
        memory.array[:] = 1
        slots = tuple(
            tuple(slot * slot_bytes + i * (read.piece_bytes + gap_bytes) for i in range(read.piece_count))
            for slot in range(depth)
        )
        task = Task(fd, read, offsets, memory.array, slots)
        ways = [name for name in WAYS if name != "fixed" or read.piece_count == 1]
        rates: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(rounds):
            for name in ways if index % 2 else reversed(ways):
                began_s, cpu_began_s = time.perf_counter(), time.process_time()
                WAYS[name](task)
                rates[name].append(size_bytes / 1e6 / (time.perf_counter() - began_s))
                cpu[name].append((time.process_time() - cpu_began_s) / (size_bytes / (1 << 30)))
    told = f"{read.name}, {depth} under way"
    rate = {name: report.add(f"{told}, {name}", "MB/s", rates[name]) for name in ways}
    cost = {name: report.add(f"{told}, {name}", "cpu s/GiB", cpu[name]) for name in ways}
    for name in ways[1:]:
        report.compare(rate[name], rate["threads"])
        report.compare(cost[name], cost["threads"])
    progress(
        f"{told}: " + "; ".join(f"{name} {rate[name].median:.0f} MB/s, {cost[name].median:.3f} s" for name in ways)
    )


if __name__ == "__main__":
    main()
