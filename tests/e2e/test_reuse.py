"""What was computed once is loaded: in a fresh process, at chunk boundaries, and only where it is the same KV."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tests.e2e.conftest import FilledPool, Prompts
from tests.e2e.harness import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    MAX_TOKENS,
    UNIT_BYTES,
    Engines,
    Reference,
    assert_same,
    embedded,
    whole_chunks,
)


def test_a_cold_engine_answers_right_and_saves_every_whole_chunk(
    filled_pool: FilledPool, prompts: Prompts, reference: Reference
) -> None:
    saved_tokens = 0
    for name, answer in filled_pool.answers.items():
        prompt = getattr(prompts, name)
        assert_same(answer, reference.answer(prompt))
        assert answer.cached == 0
        saved_tokens += whole_chunks(len(prompt) + MAX_TOKENS - 1)  # the last token is never computed upon
    counts = filled_pool.counts
    assert counts["chunks_committed"] == saved_tokens // CHUNK_TOKENS
    assert counts["saved_bytes"] == counts["chunks_committed"] * CHUNK_BYTES
    assert counts.get("lookup_hits", 0) == 0
    assert counts["commits_refused"] == 0


def test_a_fresh_process_loads_what_another_computed(
    engines: Engines, model: Path, pool: Path, prompts: Prompts, reference: Reference
) -> None:
    engine = engines.start(model, embedded(pool))
    aligned = engine.answer(prompts.aligned)
    # Of a whole hit one token goes through the model again, for its logits.
    assert engine.call("computed_tokens") == 1 + MAX_TOKENS - 1
    unaligned = engine.answer(prompts.unaligned)
    assert engine.call("computed_tokens") == 1000 - 896 + MAX_TOKENS - 1
    short, sibling = engine.answer(prompts.short), engine.answer(prompts.sibling)
    assert aligned.cached == len(prompts.aligned) == 1024
    assert unaligned.cached == whole_chunks(1000) == 896
    assert short.cached == 0
    assert_same(aligned, reference.answer(prompts.aligned))
    assert_same(unaligned, reference.answer(prompts.unaligned))
    assert_same(short, reference.answer(prompts.short))
    # The engine's own cache has the shared 800 tokens by now; without it, the pool gives their whole chunks.
    assert_same(sibling, reference.answer(prompts.sibling))
    assert engine.call("reset")
    sibling_cold = engine.answer(prompts.sibling[:800] + prompts.sibling[:224])
    assert sibling_cold.cached == whole_chunks(800) == 768
    assert_same(sibling_cold, reference.answer(prompts.sibling[:800] + prompts.sibling[:224]))

    held = engine.settle()
    loaded_tokens = 1024 + 896 + 768
    assert held["counts"]["loaded_bytes"] == loaded_tokens // 32 * UNIT_BYTES
    assert held["counts"].get("failed_blocks", 0) == 0
    assert held["pool"]["counters"]["matched_chunks"] >= loaded_tokens // CHUNK_TOKENS
    assert held["pool"]["segments_quarantined"] == 0
    engine.close()


def test_hits_survive_another_cache_size_and_another_model_path_but_not_another_salt(
    engines: Engines, model: Path, pool: Path, prompts: Prompts, reference: Reference, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(model, moved)
    time.sleep(0.1)  # files as young as the engine's process are refused, and its age is known to 10 ms
    engine = engines.start(moved, embedded(pool), num_gpu_blocks_override=200)
    salted = engine.answer(prompts.aligned, salt="tenant-7")
    assert salted.cached == 0
    assert_same(salted, reference.answer(prompts.aligned))
    plain = engine.answer(prompts.aligned)
    assert plain.cached == 1024
    assert_same(plain, reference.answer(prompts.aligned))
    engine.settle()
    assert engine.call("reset")
    assert engine.answer(prompts.aligned, salt="tenant-7").cached == 1024
    engine.settle()


def test_other_weights_on_the_same_pool_never_hit(
    engines: Engines, models: dict[str, Path], pool: Path, prompts: Prompts
) -> None:
    alone = engines.start(models["llama-other-weights"], None)
    right = alone.answer(prompts.aligned)
    alone.kill()
    engine = engines.start(models["llama-other-weights"], embedded(pool))
    answer = engine.answer(prompts.aligned)
    assert answer.cached == 0
    assert_same(answer, right)
    # Both models' chunks lie side by side from now on.
    engine.settle()
    assert engine.call("reset")
    again = engine.answer(prompts.aligned)
    assert again.cached == 1024
    assert_same(again, right)


def test_another_hash_seed_never_hits(
    engines: Engines, model: Path, pool: Path, prompts: Prompts, reference: Reference
) -> None:
    engine = engines.start(model, embedded(pool), environment={"PYTHONHASHSEED": "7"})
    answer = engine.answer(prompts.aligned)
    assert answer.cached == 0
    assert_same(answer, reference.answer(prompts.aligned))
    engine.settle()


def test_after_a_reset_nothing_from_before_is_used_nor_anything_after_offered_to_others(
    engines: Engines, model: Path, pool: Path, prompts: Prompts, reference: Reference
) -> None:
    engine = engines.start(model, embedded(pool))
    assert engine.answer(prompts.aligned).cached == 1024
    engine.settle()
    assert engine.call("reset", connector=True)
    for _ in range(2):  # the second asks again after what the first saved
        answer = engine.answer(prompts.aligned)
        assert_same(answer, reference.answer(prompts.aligned))
        engine.settle()
    assert answer.cached < 1024
    fresh = prompts.unaligned[::-1]
    assert_same(engine.answer(fresh), reference.answer(fresh))
    engine.settle()
    engine.close()
    other = engines.start(model, embedded(pool))
    assert other.answer(fresh).cached == 0
    assert other.answer(prompts.aligned).cached == 1024
    other.settle()
