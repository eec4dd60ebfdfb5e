"""What ``mfctl plan`` says that a model's chunks are, against what an engine with that model stored and loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.api.types import ChunkRecord
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.tools.model_kv import EngineSettings, describe_model
from meshfusion.tools.plan import model_form
from meshfusion.tools.plan.model_form import form_of_model
from tests.e2e.conftest import FilledPool, Prompts
from tests.e2e.damage import all_chunks, chunks_of
from tests.e2e.harness import BLOCK_TOKENS, CHUNK_BYTES, CHUNK_TOKENS, ROOT, Engines, embedded, make_prompt
from tests.e2e.hybrid_models import HYBRID_MODELS, PROMPT_TOKENS, make_hybrid_models

CHUNK_MIN_BYTES = 4096


def planned(model: Path, *, chunk_min_bytes: int, **options: Any) -> ChunkForm:
    """As an engine of :func:`tests.e2e.harness.engine_options` is started."""
    settings = EngineSettings(block_size=BLOCK_TOKENS, dtype=str(options.get("dtype", "float32")), max_model_len=2048)
    return form_of_model(describe_model(model, settings), rank_count=1, chunk_min_bytes=chunk_min_bytes)


def test_what_a_full_attention_model_stored(model: Path, filled_pool: FilledPool, prompts: Prompts) -> None:
    form = planned(model, chunk_min_bytes=CHUNK_BYTES)
    assert form.chunk_tokens == CHUNK_TOKENS
    stored = chunks_of(filled_pool.path, len(prompts.aligned))
    for number, record in enumerate(stored):
        assert_as_planned(form, number, record)
    assert model_form.payload_bytes_of_chunk(form) == CHUNK_BYTES
    whole = filled_pool.counts["chunks_committed"]
    assert filled_pool.counts["saved_bytes"] == whole * model_form.payload_bytes_of_chunk(form)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3-next", "lfm2"])
def test_what_a_model_of_several_kinds_stored_and_loaded(name: str, engines: Engines, tmp_path: Path) -> None:
    hybrid = HYBRID_MODELS[name]
    folder = make_hybrid_models(ROOT / ".cache", [name])[name]
    form = planned(folder, chunk_min_bytes=CHUNK_MIN_BYTES, **hybrid.options)
    assert form.chunk_tokens == math.lcm(*(group.block_tokens for group in hybrid.groups))
    prompt = make_prompt(11, PROMPT_TOKENS)
    connector = {**embedded(tmp_path / "pool"), "chunk_min_bytes": CHUNK_MIN_BYTES}
    for is_warm in (False, True):
        engine = engines.start(folder, connector, environment=dict(hybrid.environment), **hybrid.options)
        answer = engine.answer(prompt)
        counts = engine.settle()["counts"]
        engine.close()
        assert (answer.cached > 0) == is_warm
    assert counts["loaded_bytes"] == model_form.loaded_bytes(form, answer.cached)
    for record in all_chunks(tmp_path / "pool"):
        assert_as_planned(form, record.position_tokens // form.chunk_tokens, record)


def assert_as_planned(form: ChunkForm, number: int, record: ChunkRecord) -> None:
    """Shards, units, and the blocks of the medium that they take."""
    planned_shards = form.shards_of(record.group, number)
    assert [(s.rank, s.unit_bytes, len(s.unit_digests)) for s in record.shards] == [
        (s.rank, s.unit_bytes, s.unit_count) for s in planned_shards
    ]
    for shard, expected in zip(record.shards, planned_shards, strict=True):
        assert shard.extent.lba_count * LBA_BYTES == model_form.medium_bytes(expected)
