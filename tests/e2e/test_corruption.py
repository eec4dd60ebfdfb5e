"""Bytes on the medium that are not what was saved: found, recomputed, dropped, saved again; and what if not."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Prompts
from tests.e2e.damage import chunks_of, damaged_chunks, flip, swap_units
from tests.e2e.harness import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    LOGPROB_TOLERANCE,
    MAX_TOKENS,
    Engines,
    Reference,
    assert_same,
    embedded,
)

BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS


def test_a_flipped_byte_costs_its_tail_and_is_healed(
    engines: Engines, model: Path, pool: Path, prompts: Prompts, reference: Reference
) -> None:
    chunk, unit = 5, 2
    flip(pool, chunks_of(pool, 1024)[chunk], unit)
    assert damaged_chunks(pool) == 1

    engine = engines.start(model, embedded(pool))
    answer = engine.answer(prompts.aligned)
    assert_same(answer, reference.answer(prompts.aligned))
    held = engine.settle()
    counts = held["counts"]
    assert counts["digest_mismatches"] == counts["failed_blocks"] == 1
    assert counts["loaded_blocks"] == 1024 // BLOCK_TOKENS - 1
    assert counts["loads_failed"] == 1
    # Never retried: one lookup, one load, and the tokens before the bad block stayed loaded.
    assert counts["lookups"] == counts["loads_started"] == 1
    good_tokens = (chunk * BLOCKS_PER_CHUNK + unit) * BLOCK_TOKENS
    assert engine.call("computed_tokens") == 1024 - good_tokens + MAX_TOKENS - 1
    assert held["pool"]["counters"]["dropped_chunks"] == 1
    assert counts["chunks_committed"] == 1, "the dropped chunk, and only it, was saved again"
    # What was recomputed serves from the engine's own cache, and from the pool.
    assert_same(engine.answer(prompts.aligned), reference.answer(prompts.aligned))
    assert engine.call("reset")
    healed = engine.answer(prompts.aligned)
    assert healed.cached == 1024
    assert_same(healed, reference.answer(prompts.aligned))
    engine.settle()
    engine.close()
    assert damaged_chunks(pool) == 0

    third = engines.start(model, embedded(pool))
    answer = third.answer(prompts.aligned)
    assert answer.cached == 1024
    assert_same(answer, reference.answer(prompts.aligned))
    assert third.settle()["counts"].get("failed_blocks", 0) == 0


def test_without_the_proof_wrong_kv_changes_the_answer(
    engines: Engines, model: Path, pool: Path, prompts: Prompts, reference: Reference
) -> None:
    """The negative control: it is the digest that protects the two tests above and below, and nothing else."""
    run = chunks_of(pool, 1024)
    swap_units(pool, run[6], run[7])
    unverified = {"kv_connector_module_path": "tests.e2e.unverified_connector"}
    engine = engines.start(model, embedded(pool), transfer=unverified)
    wrong = engine.answer(prompts.aligned)
    assert wrong.cached == 1024
    assert engine.settle()["counts"].get("failed_blocks", 0) == 0
    assert wrong.distance(reference.answer(prompts.aligned)) > 50 * LOGPROB_TOLERANCE
    engine.close()

    verified = engines.start(model, embedded(pool))
    right = verified.answer(prompts.aligned)
    assert_same(right, reference.answer(prompts.aligned))
    counts = verified.settle()["counts"]
    assert counts["digest_mismatches"] == 2 * BLOCKS_PER_CHUNK
    assert counts["chunks_committed"] == 2
