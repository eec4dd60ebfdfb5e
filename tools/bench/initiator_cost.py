"""What our NVMe/RDMA initiator costs the process that it is in: processor time a descriptor, and an engine's stalls.

Posting is measured on a transport without a wire (:mod:`.null_target`), on this machine, with its kernel's own clock.
Stalls are measured beside loads of 128 KiB, 32 at a time, and beside none: of the initiator on that transport, whose
completions are always there (the most that it can do to an engine), and, in the lab's guest, over soft-RoCE; there also
beside the same loads by the kernel's initiator, for the guest has one processor, which network and target use as well.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from meshfusion.jbof.errors import ServiceError
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.jbof.nvme.memory import RegionPart
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.tools.bench.engine_gaps import ENGINES, Gaps, gaps_of
from meshfusion.tools.bench.null_target import LBA_BYTES, NSID, NullTransport
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, run_guest

GUEST_SCRIPT = Path(__file__).with_name("initiator_cost_guest.py")
SIZE_BYTES = 128 << 10
DEPTH = 32
DEADLINE_S = 600.0
NQN = "nqn.2026-01.io.meshfusion:null"
HOST = uuid.UUID("22222222-2222-3333-4444-666666666666")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=5)
@click.option("--seconds", default=1.0, show_default=True, help="Of each measurement.")
@click.option("--guest/--no-guest", default=True, show_default=True, help="Stalls in the lab's guest, too.")
def main(rounds: int, output_format: str, work: Path, seconds: float, guest: bool) -> None:
    """Descriptors a second and core, and the gaps of an engine's thread beside loads."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        progress(f"{rounds} rounds without a wire")
        posted, done, gaps = [], [], []
        for _ in range(rounds):
            with null_initiator() as initiator, ThreadPoolExecutor(1) as loader:
                parts = parts_of(initiator)
                post_s, whole_s = loader.submit(cpu_s_per_descriptor, initiator, parts, seconds).result()
                posted.append(1 / post_s)
                done.append(1 / whole_s)
                for engine in ENGINES:
                    gaps.append(("no load", engine, gaps_of(engine, seconds)))
                    load = loader.submit(load_for, initiator, parts, seconds)
                    gaps.append(("no wire", engine, gaps_of(engine, seconds * 0.9)))
                    load.result()
        report.add("posting alone", "descriptors/s a core", posted)
        report.add("posting and completing", "descriptors/s a core", done)
        add_gaps(report, "", gaps)
        if guest:
            progress(f"{rounds} rounds in a guest")
            add_gaps(report, "guest: ", gaps_in_guest(directory, rounds, seconds, progress))

    settings = {"rounds": rounds, "seconds": seconds, "size_bytes": SIZE_BYTES, "depth": DEPTH}
    run_bench("initiator_cost", work, output_format, settings, measure)


@contextmanager
def null_initiator() -> Iterator[Initiator]:
    settings = ControllerSettings(NQN, f"nqn.2014-08.org.nvmexpress:uuid:{HOST}", HOST, "nowhere", io_queue_count=1)
    initiator = Initiator(NullTransport(), settings, 5.0)
    try:
        yield initiator
    finally:
        initiator.close()


def parts_of(initiator: Initiator) -> list[RegionPart]:
    memory = initiator.register(np.zeros(DEPTH * SIZE_BYTES, np.uint8))
    return [memory.part(i * SIZE_BYTES, SIZE_BYTES) for i in range(DEPTH)]


def cpu_s_per_descriptor(initiator: Initiator, parts: list[RegionPart], seconds: float) -> tuple[float, float]:
    """For posting alone, by this thread; and for posting and completing, by the whole process."""
    count, posting_s = 0, 0.0
    began_s, end_s = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        post_began_s = time.thread_time()
        pending = [initiator.begin_read(NSID, i * SIZE_BYTES // LBA_BYTES, [part]) for i, part in enumerate(parts)]
        posting_s += time.thread_time() - post_began_s
        for transfer in pending:
            transfer.wait()
        count += len(parts)
    return posting_s / count, (time.process_time() - began_s) / count


def load_for(initiator: Initiator, parts: list[RegionPart], seconds: float) -> None:
    window: deque[Any] = deque()
    end_s = time.monotonic() + seconds
    at = 0
    while time.monotonic() < end_s:
        while len(window) < DEPTH:
            window.append(initiator.begin_read(NSID, at * SIZE_BYTES // LBA_BYTES, [parts[at]]))
            at = (at + 1) % DEPTH
        window.popleft().wait()
    for transfer in window:
        transfer.wait()


def gaps_in_guest(directory: Path, rounds: int, seconds: float, progress: Progress) -> list[tuple[str, str, Gaps]]:
    command = (sys.executable, str(GUEST_SCRIPT), "--rounds", str(rounds), "--seconds", str(seconds))
    tail = OutputTail(1 << 20)
    run = GuestRun(command, output_directory=directory, deadline_s=DEADLINE_S)
    result = run_guest(run, sink=tail, note=progress)
    if result.exit_code:
        raise ServiceError(
            f"the guest's part ended with {result.exit_code}: {tail.stderr[-500:]}",
            next_step=f"read {directory / CONSOLE_LOG}",
        )
    return [(beside, engine, Gaps(*gaps)) for beside, engine, gaps in json.loads(tail.stdout)]


def add_gaps(report: Report, where: str, gaps: list[tuple[str, str, Gaps]]) -> None:
    for beside, engine in dict.fromkeys((beside, engine) for beside, engine, _ in gaps):
        found = [sample for b, e, sample in gaps if (b, e) == (beside, engine)]
        what = f"{where}engine that {engine}, {beside}"
        report.add(f"{what}: p99 gap", "ms", [sample.p99_ms for sample in found])
        report.add(f"{what}: worst gap", "ms", [sample.worst_ms for sample in found])
        report.add(f"{what}: lost", "%", [sample.lost_share * 100 for sample in found])


if __name__ == "__main__":
    main()
