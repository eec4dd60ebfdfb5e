"""SIGKILL of the engine at any moment: what is offered afterwards is right, and nothing of the pool is lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from meshfusion.dpu.pool import inspect_pool
from tests.e2e.damage import damaged_chunks
from tests.e2e.harness import CHUNK_TOKENS, Engines, Reference, assert_same, embedded, make_prompt

# 9 segments of 7 chunks: less than what is written here. Everything, since the learned policy may decline what would
# displace as much as it is worth, and here the newest shall be found.
POOL = {"size": "40MiB", "segment_size": "4MiB", "policy": "everything"}
PROMPT_TOKENS = 512


@pytest.mark.parametrize("rounds", [pytest.param(3, id="3-rounds"), pytest.param(12, marks=pytest.mark.nightly)])
def test_killed_while_saving(engines: Engines, model: Path, tmp_path: Path, reference: Reference, rounds: int) -> None:
    path, chosen = tmp_path / "pool", random.Random(rounds)
    prompts = [make_prompt(1000 + i, PROMPT_TOKENS) for i in range(4 * rounds)]
    for number in range(rounds):
        engine = engines.start(model, embedded(path, **POOL))
        # What earlier rounds left, whole or torn, is offered now.
        for prompt in prompts[: 4 * number][-4:]:
            assert_same(engine.answer(prompt), reference.answer(prompt))
        engine.call("medium", writes="slow", delay_s=0.05)
        engine.send("generate", prompts=prompts[4 * number : 4 * number + 4], max_tokens=40)
        time.sleep(chosen.uniform(0.2, 3.0))
        engine.kill()
        assert damaged_chunks(path) == 0, f"after round {number}"

    engine = engines.start(model, embedded(path, **POOL))
    for prompt in prompts:
        assert_same(engine.answer(prompt), reference.answer(prompt))
    held = engine.settle()
    assert held["counts"].get("failed_blocks", 0) == 0
    assert held["pool"]["segments_quarantined"] == 0
    # Nothing leaked: more than the pool holds can still be written, and the newest of it is served.
    assert engine.call("reset")
    for seed in range(2000, 2018):  # 18 x 4 chunks
        engine.answer(make_prompt(seed, PROMPT_TOKENS))
        held = engine.settle()
    assert held["pool"]["segments_quarantined"] == 0
    assert held["pool"]["saves_stopped_reason"] == ""
    assert held["counts"].get("saves_no_space", 0) == 0
    assert held["counts"]["chunks_committed"] >= 18 * PROMPT_TOKENS // CHUNK_TOKENS
    assert engine.call("reset")
    assert engine.answer(make_prompt(2017, PROMPT_TOKENS)).cached == PROMPT_TOKENS
    engine.settle()
    engine.close()
    assert damaged_chunks(path) == 0
    assert inspect_pool(path).committed_chunk_count >= 7 * 7, "all but two segments are in use"
