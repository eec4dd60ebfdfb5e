"""Processor time of the index's operations with very many chunks, in this process: it says more than a rate does where
others use the machine.

On the pool at ``--pool``, which ``tools.bench.index_scale --pool`` has filled. A *lookup* matches 400 chunks, a prompt
(the index's part is told too); commits are of one chunk and of a whole prompt at once, with their reservations.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_tending import Policy
from meshfusion.tools.bench.index_fill import (
    CHUNK_TOKENS,
    IDENTITY,
    PROMPT_CHUNKS,
    SHARD,
    UNIT_COUNT,
    prompt_keys,
)
from meshfusion.tools.bench.processes import memory_of
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

DEADLINE_S: Final = 60.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=100)
@click.option("--pool", required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(rounds: int, output_format: str, work: Path, pool: Path) -> None:
    """Milliseconds of processor time and of the clock for lookups and commits."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        before = memory_of().anonymous_bytes
        cpu_s, began_s = time.process_time(), time.perf_counter()
        with Pool.open(
            pool, PoolOptions(policy=Policy.EVERYTHING), damaged=lambda error: report.problems.append(error.message)
        ) as opened:
            progress("opened")
            report.details.append(
                {
                    "open_cpu_s": time.process_time() - cpu_s,
                    "open_s": time.perf_counter() - began_s,
                    "anonymous_bytes_added": memory_of().anonymous_bytes - before,
                    "chunks": opened.status(deadline_s=DEADLINE_S).committed_chunk_count,
                }
            )
            measure_operations(report, opened, rounds)

    run_bench("index_cost", work, output_format, {"rounds": rounds}, measure)


def measure_operations(report: Report, pool: Pool, rounds: int) -> None:
    request = api.AttachRequest(uuid.uuid4().hex, "vllm", "1", "h", os.getpid(), IDENTITY, 1)
    attachment = pool.attach(request, deadline_s=DEADLINE_S)
    lock = hold_liveness(Path(attachment.liveness_path))
    holder_id, rng = attachment.holder_id, random.Random(3)
    prompts = pool.status(deadline_s=DEADLINE_S).committed_chunk_count // PROMPT_CHUNKS
    leases: list[str] = []

    def drawn() -> api.GroupKeys:
        return prompt_keys(rng.randrange(prompts))

    def lookup(keys: Any) -> None:
        reply = pool.match(api.MatchRequest(holder_id, "r", CHUNK_TOKENS, (keys,)), deadline_s=DEADLINE_S)
        leases.append(reply.lease_id)

    def commit(keys: Any) -> None:
        items = tuple(api.ReserveItem(key, 0, 0, CHUNK_TOKENS, (SHARD,)) for key in keys)
        asked = api.ReserveRequest(holder_id, attachment.epoch, items)
        results = pool.reserve(asked, deadline_s=DEADLINE_S).results
        digests = (tuple(bytes(8) for _ in range(UNIT_COUNT)),)
        commits = tuple(api.CommitItem(result.grant_id, digests) for result in results)
        done = pool.commit(api.CommitRequest(holder_id, attachment.epoch, commits), deadline_s=DEADLINE_S)
        assert all(done.committed)

    def new(count: int) -> list[bytes]:
        return [os.urandom(32) for _ in range(count)]

    for _ in range(20):
        lookup(drawn())
    add(report, "lookup of 400 chunks, the index", rounds, drawn, lambda keys: pool._index.stored(keys.keys))
    add(report, "lookup of 400 chunks", rounds, drawn, lookup)
    pool.release(api.ReleaseRequest(holder_id, tuple(filter(None, leases))), deadline_s=DEADLINE_S)
    add(report, "commit of a chunk", rounds, lambda: new(1), commit)
    add(report, "commit of 400 chunks", max(1, rounds // 10), lambda: new(PROMPT_CHUNKS), commit)
    os.close(lock)
    pool.detach(api.DetachRequest(holder_id), deadline_s=DEADLINE_S)


def add(report: Report, name: str, rounds: int, draw: Callable[[], Any], operation: Callable[[Any], object]) -> None:
    """Of the whole process: the index is written by a thread of its own."""
    cpu_ms, wall_ms = [], []
    for _ in range(rounds):
        drawn = draw()
        cpu_s, began_s = time.process_time(), time.perf_counter()
        operation(drawn)
        cpu_ms.append(1e3 * (time.process_time() - cpu_s))
        wall_ms.append(1e3 * (time.perf_counter() - began_s))
    for kind, samples in (("processor", cpu_ms), ("clock", wall_ms)):
        report.add(f"{name}, {kind}", "ms", [statistics.median(samples)])


if __name__ == "__main__":
    main()
