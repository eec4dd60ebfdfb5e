"""Engines of one model whose KV lies otherwise in memory: the same chunks, the same answers, fewer descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import FilledPool, Prompts
from tests.e2e.engine_fixes import VARIABLE as ENGINE_FIXES
from tests.e2e.harness import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    ROOT,
    UNIT_BYTES,
    EngineProcess,
    Engines,
    Reference,
    assert_same,
    embedded,
    make_prompt,
)
from tests.e2e.hybrid_models import HYBRID_MODELS, PROMPT_TOKENS, make_hybrid_models

LAYERS = 4
BLOCKS_PER_CHUNK = CHUNK_BYTES // UNIT_BYTES


def blocks_first(engines: Engines, model: Path, pool: Path, **connector: str) -> EngineProcess:
    """An engine whose attention could take either, so that it depends on what it is asked for."""
    return engines.start(model, {**embedded(pool), **connector}, environment={ENGINE_FIXES: "block_outermost"})


@pytest.mark.nightly
def test_layer_and_block_outermost_engines_share_a_pool(
    engines: Engines, model: Path, filled_pool: FilledPool, pool: Path, prompts: Prompts, reference: Reference
) -> None:
    """The pool was filled by an engine with layers outermost; what is added here, such an engine loads."""
    wrote = filled_pool.counts
    assert wrote["save_descriptors_staged"] == wrote["save_chunks_staged"] * BLOCKS_PER_CHUNK * LAYERS
    engine = blocks_first(engines, model, pool)
    answer = engine.answer(prompts.aligned)
    assert answer.cached == len(prompts.aligned)
    assert_same(answer, reference.answer(prompts.aligned))
    assert engine.call("reset")
    computed = engine.answer(prompts.sibling)
    counts = engine.settle()["counts"]
    chunks = counts["load_chunks_staged"]
    assert chunks == (answer.cached + computed.cached) // CHUNK_TOKENS
    assert counts["load_descriptors_staged"] == chunks * BLOCKS_PER_CHUNK, "one for each block"
    assert counts["save_descriptors_staged"] == counts["save_chunks_staged"] * BLOCKS_PER_CHUNK > 0
    engine.close()
    words = engine.words()
    assert "asking the engine for KV layout BLHNC" in words
    assert "layout BLHNC proven" in words
    assert "in 1 run(s)" in words

    other = engines.start(model, embedded(pool))
    again = other.answer(prompts.sibling)
    assert again.cached == len(prompts.sibling), "with what was computed on blocks outermost"
    assert_same(again, computed)
    assert_same(again, reference.answer(prompts.sibling))
    counts = other.settle()["counts"]
    assert counts["load_descriptors_staged"] == counts["load_chunks_staged"] * BLOCKS_PER_CHUNK * LAYERS
    other.close()
    assert "layout LBHNC proven" in other.words()


@pytest.mark.nightly
def test_the_layout_can_be_left_to_the_engine(engines: Engines, model: Path, pool: Path, prompts: Prompts) -> None:
    engine = blocks_first(engines, model, pool, kv_layout="engine")
    assert engine.answer(prompts.aligned).cached == len(prompts.aligned)
    engine.close()
    assert "layout LBHNC proven" in engine.words()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3-next", "lfm2", "mamba2"])
def test_hybrid_models_too(engines: Engines, tmp_path: Path, name: str) -> None:
    model = HYBRID_MODELS[name]
    folder = make_hybrid_models(ROOT / ".cache", [name])[name]
    prompt = make_prompt(11, PROMPT_TOKENS)
    fixes = [model.environment.get(ENGINE_FIXES, ""), "block_outermost"]
    answers = []
    for environment, kv_layout in ((dict(model.environment), "engine"), ({ENGINE_FIXES: ",".join(fixes)}, "auto")):
        connector = {**embedded(tmp_path / "pool"), "chunk_min_bytes": 4096, "kv_layout": kv_layout}
        engine = engines.start(folder, connector, environment=environment, **model.options)
        answers.append(engine.answer(prompt))
        engine.settle()
        engine.close()
    assert "layout B" in engine.words()
    assert [answer.cached for answer in answers] == [0, PROMPT_TOKENS - 1]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].distance(answers[1]) < model.tolerance
