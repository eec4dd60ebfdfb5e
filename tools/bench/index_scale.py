"""The index with very many chunks: operations a second, bytes for each chunk, and how long a restart takes.

Fills a pool with ``--chunks`` (:mod:`meshfusion.tools.bench.index_fill`; ten million take a quarter of an hour and
4 GB), runs the service on it as a process of its own, and asks it over its socket. A *lookup* matches a whole prompt of
400 chunks at random and releases its lease. A *commit* reserves a chunk and commits it, in a transaction that is synced
before the answer; no data is written. A *drop* is of a chunk at random. All are asked by one caller and by several at
once; the service looks through its index meanwhile, as every one does for a while after its start. A restart is timed
from the start of the process to its ready line and to the answer to the first lookup, after a kill and after a proper
end, with the index's pages in the page cache and without.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_tending import ADOPTED_CHUNKS
from meshfusion.jbof.errors import MediaError
from meshfusion.tools.bench.index_fill import (
    CHUNK_TOKENS,
    IDENTITY,
    PROMPT_CHUNKS,
    SHARD,
    UNIT_COUNT,
    Filled,
    fill_pool,
    key_of,
    prompt_keys,
)
from meshfusion.tools.bench.processes import memory_of
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

DEADLINE_S: Final = 60.0
START_S: Final = 3600.0
_NEW_PROMPT: Final = 1 << 40  # prompts from here on are not in the pool


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=5)
@click.option("--chunks", default=10_000_000, show_default=True, type=click.IntRange(min=PROMPT_CHUNKS))
@click.option("--callers", default=8, show_default=True, help="That ask at once, besides one alone.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each measurement.")
@click.option(
    "--pool", type=click.Path(path_type=Path), help="Keep the pool there; one that is there already is not filled."
)
def main(
    rounds: int, output_format: str, work: Path, chunks: int, callers: int, seconds: float, pool: Path | None
) -> None:
    """Operations a second, bytes a chunk and restart time of a pool with very many chunks."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        path = (pool or directory / "pool").absolute()
        filled = Filled(path, chunks) if path.exists() else fill_pool(path, chunks, progress)
        try:
            measure_sizes(report, filled)
            measure_operations(report, directory, filled, rounds, callers, seconds, progress)
            measure_restarts(report, directory, filled, rounds, progress)
            with served(directory, filled) as service:
                progress("waiting for the scan of the index")
                report.add("scan of the index beside an idle service", "s", [wait_for_scan(service)])
        finally:
            if pool is None:
                shutil.rmtree(path)
                path.with_suffix(".data").unlink()

    settings: dict[str, Any] = {"rounds": rounds, "chunks": chunks, "callers": callers, "seconds": seconds}
    run_bench("index_scale", work, output_format, settings, measure)


def measure_sizes(report: Report, filled: Filled) -> None:
    used = (PoolLayout(filled.path).index / "data.mdb").stat().st_blocks * 512
    report.details.append({"index_bytes": used, "index_bytes_per_chunk": used / filled.chunk_count})


def measure_operations(
    report: Report,
    directory: Path,
    filled: Filled,
    rounds: int,
    callers: int,
    seconds: float,
    progress: Progress,
) -> None:
    samples: dict[tuple[str, int], list[float]] = {}
    with served(directory, filled) as service:
        first_bytes = memory_of(service.process.pid).anonymous_bytes
        workers = [Worker(service, filled, number) for number in range(callers)]
        try:
            for index in range(rounds):
                for count in (1, callers):
                    for name, operation in (("lookups", "lookup"), ("commits", "commit"), ("drops", "drop")):
                        rate = rate_of([getattr(worker, operation) for worker in workers[:count]], seconds)
                        samples.setdefault((name, count), []).append(rate)
                        progress(f"round {index + 1} of {rounds}: {rate:.1f} {name} a second by {count}")
            memory = memory_of(service.process.pid)
        finally:
            for worker in workers:
                worker.close()
    for (name, count), rates in samples.items():
        report.add(f"{name}, {count} caller(s)", "1/s", rates)
    lookups = {count: rates for (name, count), rates in samples.items() if name == "lookups"}
    for count, rates in lookups.items():
        report.add(f"chunks looked up, {count} caller(s)", "1/s", [rate * PROMPT_CHUNKS for rate in rates])
    report.details.append(
        {
            "service_anonymous_bytes_at_first": first_bytes,
            "service_anonymous_bytes": memory.anonymous_bytes,
            "anonymous_bytes_per_chunk": memory.anonymous_bytes / filled.chunk_count,
            "service_rss_bytes": memory.rss_bytes,
        }
    )


def wait_for_scan(service: Service) -> float:
    """Seconds since the service was ready."""
    client = GrpcChunkService(service.address)
    began_s = time.perf_counter()
    while dict(client.status(deadline_s=DEADLINE_S).counters).get("index_scans_under_way"):
        time.sleep(0.2)
    client.close()
    return time.perf_counter() - began_s


def wait_for_adoption(service: Service) -> None:
    """What the pool held before, its policy is told of some at a time, once a second: ten million take 45 minutes. To
    be called right after the start. On a machine without time to spare it takes longer than is waited for here."""
    client = GrpcChunkService(service.address)
    chunk_count = client.status(deadline_s=DEADLINE_S).committed_chunk_count
    client.close()
    time.sleep(1.1 * chunk_count / ADOPTED_CHUNKS)


def measure_restarts(report: Report, directory: Path, filled: Filled, rounds: int, progress: Progress) -> None:
    for end in (signal.SIGTERM, signal.SIGKILL):
        for is_cold in (False, True):
            ready: list[float] = []
            answered: list[float] = []
            for _ in range(rounds):
                with served(directory, filled, end=end):
                    pass
                (filled.path / "index.unproven").unlink(missing_ok=True)  # a service that lived for a while
                if is_cold:
                    forget_pages(PoolLayout(filled.path).index / "data.mdb")
                began_s = time.perf_counter()
                with served(directory, filled) as service:
                    ready.append(time.perf_counter() - began_s)
                    worker = Worker(service, filled, 0)
                    worker.lookup()
                    answered.append(time.perf_counter() - began_s)
                    worker.close()
                progress(f"after {end.name}: ready {ready[-1]:.2f} s, answer {answered[-1]:.2f} s")
            name = f"after {end.name}, {'no page' if is_cold else 'pages'} cached"
            report.add(f"{name}, ready", "s", ready)
            report.add(f"{name}, first lookup answered", "s", answered)


def forget_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def rate_of(operations: list[Callable[[], None]], seconds: float) -> float:
    """Of all callers together."""
    end_s = time.monotonic() + seconds
    counts = [0] * len(operations)
    errors: list[BaseException] = []

    def repeat(number: int) -> None:
        try:
            while time.monotonic() < end_s:
                operations[number]()
                counts[number] += 1
        except BaseException as error:
            errors.append(error)

    began_s = time.monotonic()
    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(operations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts) / (time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class Service:
    process: subprocess.Popen[str]
    address: str


@contextmanager
def served(
    directory: Path,
    filled: Filled,
    *,
    end: signal.Signals = signal.SIGTERM,
    address: str | None = None,
    config_lines: Sequence[str] = (),
) -> Iterator[Service]:
    """From its ready line on. ``end``: how it ends. ``address``: where it listens instead of at a socket in
    ``directory``. ``config_lines``: more of its configuration."""
    config = directory / "service.yaml"
    address = address or f"unix://{directory}/socket"
    config.write_text("\n".join([f"listen: {address}", f"pool: {{path: {filled.path}}}", *config_lines]) + "\n")
    code = "from meshfusion.tools.mfctl.main import service_main; service_main()"
    command = [sys.executable, "-c", code, "--config", str(config), "--format", "json"]
    with (directory / "log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], START_S)[0] or not (line := process.stdout.readline()):
            raise MediaError("the service did not start", next_step=f"look into {directory / 'log'}")
        assert json.loads(line)["ready"]
        yield Service(process, address)
    finally:
        process.send_signal(end)
        process.communicate()


class Worker:
    """An engine's worker with its own connection. Deadlines are long: what is measured is the rate."""

    def __init__(self, service: Service, filled: Filled, number: int) -> None:
        self._filled = filled
        self._client = GrpcChunkService(service.address)
        self._random = random.Random(number)
        self._next_new = random.SystemRandom().getrandbits(30) << 20
        request = api.AttachRequest(uuid.uuid4().hex, "vllm", "1", "h", os.getpid(), IDENTITY, 1)
        self._attachment = self._client.attach(request, deadline_s=DEADLINE_S)
        self._id, self._epoch = self._attachment.holder_id, self._attachment.epoch
        self._lock = hold_liveness(Path(self._attachment.liveness_path))

    def lookup(self) -> None:
        keys = prompt_keys(self._random.randrange(self._filled.prompt_count))
        reply = self._client.match(api.MatchRequest(self._id, "r", CHUNK_TOKENS, (keys,)), deadline_s=DEADLINE_S)
        self._client.release(api.ReleaseRequest(self._id, (reply.lease_id,)), deadline_s=DEADLINE_S)

    def commit(self) -> None:
        self._next_new += 1
        key = key_of(_NEW_PROMPT, self._next_new)
        item = api.ReserveItem(key, 0, 0, CHUNK_TOKENS, (SHARD,))
        reply = self._client.reserve(api.ReserveRequest(self._id, self._epoch, (item,)), deadline_s=DEADLINE_S)
        digests = (tuple(key[8 * unit : 8 * unit + 8] for unit in range(UNIT_COUNT)),)
        commit = api.CommitItem(reply.results[0].grant_id, digests)
        done = self._client.commit(api.CommitRequest(self._id, self._epoch, (commit,)), deadline_s=DEADLINE_S)
        assert done.committed == (True,), reply

    def drop(self) -> None:
        prompt = self._random.randrange(self._filled.prompt_count)
        key = key_of(prompt, PROMPT_CHUNKS - 1)  # of the end, so that lookups stay long
        found = self._client.get_chunk(key, deadline_s=DEADLINE_S)
        if found is not None:  # the same may be drawn twice
            extent = found.shards[0].extent
            self._client.drop(api.DropRequest(self._id, key, extent, "a benchmark"), deadline_s=DEADLINE_S)

    def close(self) -> None:
        os.close(self._lock)
        self._client.detach(api.DetachRequest(self._id), deadline_s=DEADLINE_S)
        self._client.close()


if __name__ == "__main__":
    main()
