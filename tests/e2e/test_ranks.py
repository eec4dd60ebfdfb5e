"""A tensor-parallel engine, each rank a process of its own: what its ranks saved those of a fresh engine load, and
whatever happens to one of them, a chunk is there with the shards of all or not at all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import PoolStatus
from tests.e2e.daemon import Daemon
from tests.e2e.damage import all_chunks, damaged_chunks
from tests.e2e.harness import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    CHUNK_TOKENS,
    MAX_TOKENS,
    UNIT_BYTES,
    Answer,
    EngineDied,
    EngineError,
    EngineProcess,
    Engines,
    assert_same,
    make_prompt,
)
from tests.e2e.rank_faults import MODULE, RankFaults
from tests.e2e.test_multiprocess import command_of, descendants, is_running, wait_until

RANKS = 2
CHUNKS = 5
CALL_S = 300.0
"""Two processes that wait for each other at every layer, on a machine that may be busy."""
PROMPT = make_prompt(5, CHUNKS * CHUNK_TOKENS + 7)
OTHER = make_prompt(6, CHUNKS * CHUNK_TOKENS + 7)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]


class Shop:
    """Engines of two ranks on a service of their own."""

    def __init__(self, engines: Engines, model: Path, folder: Path) -> None:
        self._engines, self._model = engines, model
        self.faults = RankFaults(folder / "faults.json")
        self.daemon = Daemon(folder)
        self.daemon.start()

    def start(self) -> EngineProcess:
        """Each rank has one KV head of two, so that half of a chunk of one rank is as long. The engine's own choice of
        processors wants more of them than a small machine has."""
        binding = "|".join(str(i % (os.cpu_count() or 1)) for i in range(RANKS))
        return self._engines.start(
            self._model,
            {**self.daemon.connector, "path": "staged", "chunk_min_bytes": CHUNK_BYTES // RANKS},
            environment={"VLLM_CPU_OMP_THREADS_BIND": binding, **self.faults.environment},
            transfer={"kv_connector_module_path": MODULE},
            tensor_parallel_size=RANKS,
            distributed_executor_backend="mp",
        )

    def settle(self, engine: EngineProcess) -> dict[str, int]:
        counts: dict[str, int] = engine.call("settle", deadline_s=CALL_S, pool=False, timeout_s=CALL_S - 10)["counts"]
        self.daemon.wait_idle(holders=1, timeout_s=60.0)
        return counts

    def wait_alone(self) -> PoolStatus:
        """What dead engines held is given back, after their silence and not before they are gone."""
        return self.daemon.wait_idle(holders=0, timeout_s=120.0)

    def assert_whole(self, chunk_count: int) -> None:
        """What can be matched has all its shards, and they are what their digests say."""
        chunks = all_chunks(self.daemon.pool)
        assert len(chunks) == chunk_count
        for chunk in chunks:
            assert [shard.rank for shard in chunk.shards] == [0, 1]
            assert {shard.unit_bytes for shard in chunk.shards} == {UNIT_BYTES // RANKS}
            first, second = chunk.shards
            assert set(first.unit_digests).isdisjoint(second.unit_digests), "each has its own heads"
        assert damaged_chunks(self.daemon.pool) == 0


@pytest.fixture
def shop(engines: Engines, model: Path, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(engines, model, tmp_path)
    try:
        yield made
    finally:
        made.daemon.kill()


def answer(engine: EngineProcess, prompt: list[int], *, salt: str | None = None) -> Answer:
    (reply,) = engine.call("generate", deadline_s=CALL_S, prompts=[prompt], max_tokens=MAX_TOKENS, salt=salt)
    return Answer.from_json(reply)


def answer_anew(engine: EngineProcess, prompt: list[int]) -> Answer:
    """Not from the engine's own cache."""
    assert engine.call("reset", deadline_s=CALL_S)
    return answer(engine, prompt)


def kill_rank_1(engine: EngineProcess) -> None:
    """And the engine, which is to say that it cannot go on, with all of its processes."""
    processes = descendants(engine.process.pid)
    (rank_1,) = [pid for pid in processes if "Worker_TP1" in command_of(pid)]
    os.kill(rank_1, signal.SIGKILL)
    with pytest.raises((EngineError, EngineDied)):
        answer(engine, make_prompt(7, 100))
    engine.kill()
    wait_until(lambda: not any(is_running(pid) for pid in processes), timeout_s=60.0)


def test_a_fresh_engine_loads_what_all_ranks_saved_and_one_rank_in_trouble_costs_the_load(shop: Shop) -> None:
    cold = shop.start()
    computed = answer(cold, PROMPT)
    assert computed.cached == 0
    counts = shop.settle(cold)
    assert (counts["chunks_committed"], counts["saved_bytes"]) == (CHUNKS, CHUNKS * CHUNK_BYTES)
    assert counts["save_chunks_staged"] == CHUNKS * RANKS, "each rank's report is counted once"
    save_descriptors = counts["save_descriptors_staged"]
    cold.close()
    shop.assert_whole(CHUNKS)

    warm = shop.start()
    loaded = answer(warm, PROMPT)
    assert loaded.cached == CHUNKS * CHUNK_TOKENS
    assert_same(loaded, computed)
    counts = shop.settle(warm)
    blocks = CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
    assert (counts["loaded_blocks"], counts["loaded_bytes"]) == (blocks, blocks * UNIT_BYTES)
    assert counts.get("failed_blocks", 0) == 0
    assert counts["load_chunks_staged"] == CHUNKS * RANKS
    assert counts["load_descriptors_staged"] == save_descriptors > 0

    # A rank that cannot read: what it did not get is recomputed by all.
    shop.faults.set(1, reads="failing")
    assert_same(answer_anew(warm, PROMPT), computed)
    counts = shop.settle(warm)
    assert (counts["loads_failed"], counts["failed_blocks"]) == (1, blocks)
    assert counts.get("digest_mismatches", 0) == 0

    # A rank that is late: it is waited for until the load's deadline.
    shop.faults.set(0, reads="blocked")
    assert_same(answer_anew(warm, PROMPT), computed)
    assert shop.settle(warm)["loads_failed"] == 2
    shop.faults.clear()
    shop.assert_whole(CHUNKS)
    again = answer_anew(warm, PROMPT)
    assert again.cached == CHUNKS * CHUNK_TOKENS
    assert_same(again, computed)
    shop.settle(warm)

    # A rank that wrote other bytes than it had: found when they are loaded, dropped, and saved once more.
    right = answer(warm, OTHER, salt="right")
    shop.settle(warm)
    shop.faults.set(1, writes="wrong")
    assert_same(answer_anew(warm, OTHER), right)
    shop.settle(warm)
    shop.faults.clear()
    assert damaged_chunks(shop.daemon.pool) == CHUNKS
    assert_same(answer_anew(warm, OTHER), right)
    counts = shop.settle(warm)
    assert (counts["loads_failed"], counts["digest_mismatches"]) == (3, CHUNKS)
    shop.assert_whole(3 * CHUNKS)
    again = answer_anew(warm, OTHER)
    assert again.cached == CHUNKS * CHUNK_TOKENS
    assert_same(again, right)
    shop.settle(warm)
    warm.close()


def test_a_rank_that_dies_costs_the_engine_and_nothing_that_is_stored(shop: Shop) -> None:
    first = shop.start()
    computed = answer(first, PROMPT)
    shop.settle(first)
    shop.faults.set(1, writes="blocked")
    other = answer(first, OTHER)
    shop.faults.wait_reached()
    kill_rank_1(first)  # while it saves: what the other rank wrote is not there without its shards
    shop.faults.clear()
    shop.wait_alone()
    shop.assert_whole(CHUNKS)

    second = shop.start()
    shop.faults.set(1, reads="blocked")
    second.call("add", request_id="loads", prompt=PROMPT, max_tokens=MAX_TOKENS)
    second.call("step", deadline_s=CALL_S, until="loads_under_way", timeout_s=CALL_S - 10)
    shop.faults.wait_reached()
    assert shop.daemon.status().pinned_bytes > 0
    kill_rank_1(second)  # while it loads
    shop.faults.clear()
    assert shop.wait_alone().pinned_bytes == 0
    shop.assert_whole(CHUNKS)

    third = shop.start()
    loaded = answer(third, PROMPT)
    assert loaded.cached == CHUNKS * CHUNK_TOKENS
    assert_same(loaded, computed)
    again = answer(third, OTHER)
    assert again.cached == 0
    assert_same(again, other)
    counts = shop.settle(third)
    assert counts.get("loads_failed", 0) == 0
    shop.assert_whole(2 * CHUNKS)
    third.close()
