"""A tensor-parallel engine, each rank a process of its own: what its ranks saved, those of a fresh engine load."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import ListRequest
from meshfusion.dpu.pool import Pool
from tests.e2e.harness import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    CHUNK_TOKENS,
    UNIT_BYTES,
    EngineDied,
    EngineError,
    EngineProcess,
    Engines,
    assert_same,
    embedded,
    make_prompt,
)
from tests.e2e.test_multiprocess import command_of, descendants

RANKS = 2


def start(engines: Engines, model: Path, pool: Path) -> EngineProcess:
    """Each rank has one KV head of two, so that half of a chunk of one rank is as long. The engine's own choice of
    processors wants more of them than a small machine has."""
    return engines.start(
        model,
        {**embedded(pool), "chunk_min_bytes": CHUNK_BYTES // RANKS},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(i % (os.cpu_count() or 1)) for i in range(RANKS))},
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
    )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_fresh_engine_loads_what_all_ranks_saved_and_a_dead_rank_costs_the_engine_only(
    engines: Engines, model: Path, tmp_path: Path
) -> None:
    pool, prompt = tmp_path / "pool", make_prompt(5, 5 * CHUNK_TOKENS + 7)
    cold = start(engines, model, pool)
    computed = cold.answer(prompt)
    assert computed.cached == 0
    counts = cold.settle()["counts"]
    assert (counts["chunks_committed"], counts["saved_bytes"]) == (5, 5 * CHUNK_BYTES)
    (rank_1,) = [pid for pid in descendants(cold.process.pid) if "Worker_TP1" in command_of(pid)]
    os.kill(rank_1, signal.SIGKILL)
    with pytest.raises((EngineError, EngineDied)):
        cold.answer(make_prompt(6, 100))
    cold.kill()

    warm = start(engines, model, pool)
    answer = warm.answer(prompt)
    assert answer.cached == 5 * CHUNK_TOKENS
    assert_same(answer, computed)
    counts = warm.settle()["counts"]
    blocks = 5 * CHUNK_TOKENS // BLOCK_TOKENS
    assert (counts["loaded_blocks"], counts["loaded_bytes"]) == (blocks, blocks * UNIT_BYTES)
    assert counts.get("failed_blocks", 0) == 0
    warm.close()

    with Pool.open(pool) as opened:
        chunks = opened.list_chunks(ListRequest(limit=100), deadline_s=5.0).chunks
    assert len(chunks) == 5
    for chunk in chunks:
        assert [shard.rank for shard in chunk.shards] == [0, 1]
        assert {shard.unit_bytes for shard in chunk.shards} == {UNIT_BYTES // RANKS}
        first, second = chunk.shards
        assert set(first.unit_digests).isdisjoint(second.unit_digests), "each has its own heads"
