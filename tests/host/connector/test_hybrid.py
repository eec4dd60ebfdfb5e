"""Engines with several KV groups: what one computed the next one resumes from, at a boundary where all groups can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool
from meshfusion.host.kv.resume import LastWindow, LocalChunk, ResumeRule, StateAtBoundary, WholePrefix
from tests.host.support.attention import attended
from tests.host.support.engine_on_pool import EngineFactory, corrupt, prompt, settle
from tests.host.support.kv_memory import KvMemory, of_blocks, on_one_grid
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import Request, make_request

BLOCKS = 900  # so that no save waits for room while a window moves on
STEP_TOKENS = 64  # of the mini engine


@dataclass(frozen=True)
class Model:
    """``sizes``: tokens in a block of each group."""

    rules: tuple[ResumeRule, ...]
    sizes: tuple[int, ...]

    def memory(self) -> tuple[KvMemory, ...]:
        """Groups differ in layers and pages; layouts differ from model to model."""
        shapes = [(2 + i % 2, 400 + 36 * i) for i in range(len(self.rules))]
        groups = on_one_grid(shapes, blocks=BLOCKS, is_block_outermost=len(self.rules) % 2 == 0)
        return tuple(of_blocks(kv, size) for kv, size in zip(groups, self.sizes, strict=True))


MODELS = {
    "window shorter than a chunk": Model((WholePrefix(), LastWindow(20)), (16, 16)),
    "window of several chunks": Model((WholePrefix(), LastWindow(90), LastWindow(90)), (16, 16, 16)),
    "windows alone": Model((LastWindow(50), LastWindow(90)), (16, 16)),
    "local stretches": Model((WholePrefix(), LocalChunk(96)), (16, 16)),
    "states": Model((WholePrefix(), StateAtBoundary(), StateAtBoundary()), (32, 32, 32)),
    "states alone": Model((StateAtBoundary(),), (16,)),
    "everything, blocks of different sizes": Model(
        (LastWindow(40), WholePrefix(), StateAtBoundary(), LocalChunk(160)), (16, 32, 64, 16)
    ),
}
EACH = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def start_engine(start: EngineFactory, model: Model, **options: Any) -> MiniEngine:
    per_chunk = 1 if any(isinstance(rule, StateAtBoundary) for rule in model.rules) else 2
    return start(model.memory(), rules=model.rules, blocks_per_chunk=per_chunk, **options)


def boundary_of(engine: MiniEngine, model: Model, tokens: int, *, steps: int = STEP_TOKENS) -> int:
    """Where a request of ``tokens`` can resume when one like it was computed in ``steps``, by definition: after whole
    chunks, short of its last token unless there is nothing but whole prefixes, where a state was kept if there are any,
    and where something is there to be loaded."""
    chunk = engine.form.chunk_tokens
    has_states = any(isinstance(rule, StateAtBoundary) for rule in model.rules)
    whole = all(isinstance(rule, WholePrefix) for rule in model.rules)
    last = tokens if whole else tokens - 1
    for end in range(last // chunk * chunk, 0, -chunk):
        reads = any(key < end for rule in model.rules for key in attended(rule, end))
        if reads and (not has_states or end % steps == 0):
            return end
    return 0


def computed(engine: MiniEngine, tokens: list[int], request_id: str = "writer") -> Request:
    request = engine.add(make_request(request_id, tokens))
    engine.run()
    assert engine.is_right(request)
    return request


@EACH
@pytest.mark.parametrize("extra", [0, 1, 7, 40])
def test_what_one_engine_computed_the_next_one_resumes_from(
    pool: Pool, start: EngineFactory, model: Model, extra: int
) -> None:
    first = start_engine(start, model)
    tokens = prompt(4 * STEP_TOKENS * (2 if 32 in model.sizes else 1) + extra)
    assert computed(first, tokens).loaded_tokens == 0
    settle(first, pool)
    second = start_engine(start, model)
    expected = boundary_of(second, model, len(tokens))
    assert expected > 0
    request = computed(second, tokens, "reader")
    assert request.loaded_tokens == expected
    assert request.recomputed_tokens == max(1, len(tokens) - expected)
    settle(second, pool)


@EACH
def test_only_what_the_boundary_needs_is_read(pool: Pool, start: EngineFactory, model: Model) -> None:
    first = start_engine(start, model)
    tokens = prompt(5 * STEP_TOKENS + 3)
    computed(first, tokens)
    settle(first, pool)
    second = start_engine(start, model)
    request = computed(second, tokens, "reader")
    needed = [
        {token // size for token in attended(rule, request.loaded_tokens)}
        for rule, size in zip(model.rules, model.sizes, strict=True)
    ]
    assert second.side.counts()["loaded_blocks"] == sum(map(len, needed))
    bytes_of = [kv.layout.unit_bytes for kv in second.kvs]
    assert second.side.counts()["loaded_bytes"] == sum(len(n) * b for n, b in zip(needed, bytes_of, strict=True))


@EACH
@pytest.mark.parametrize("steps", [16, 48, 100])
def test_steps_of_any_size_and_what_the_engine_has_itself(
    pool: Pool, start: EngineFactory, model: Model, steps: int
) -> None:
    """Windows move on and states come and go while blocks are being saved."""
    first = start_engine(start, model)
    tokens = prompt(330)
    request = first.add(make_request("writer", tokens))
    first.run(tokens_max=steps)
    assert first.is_right(request)
    settle(first, pool)
    second = start_engine(start, model)
    chunk = second.form.chunk_tokens
    request = second.add(make_request("reader", tokens))
    second.run(local_tokens=chunk)
    assert second.is_right(request)
    expected = boundary_of(second, model, len(tokens), steps=steps)
    assert request.loaded_tokens == max(0, expected - chunk)
    settle(second, pool)


@EACH
@pytest.mark.parametrize("bad_group", [0, -1])
def test_wrong_bytes_in_one_group_cost_the_load_and_the_chunk(
    pool: Pool, start: EngineFactory, model: Model, bad_group: int
) -> None:
    first = start_engine(start, model)
    tokens = prompt(4 * STEP_TOKENS + 5)
    computed(first, tokens)
    settle(first, pool)
    engine = start_engine(start, model)
    boundary = boundary_of(engine, model, len(tokens))
    group = bad_group % len(model.rules)
    plan = engine.form.plans[group]
    chunks = pool.list_chunks(api.ListRequest(limit=1000), deadline_s=1).chunks
    (bad,) = [c for c in chunks if c.group == group and c.position_tokens == boundary - plan.chunk_tokens]
    corrupt(pool, bad, len(bad.shards[0].unit_digests) - 1)
    request = computed(engine, tokens, "reader")
    assert engine.side.counts()["digest_mismatches"] == 1
    assert engine.side.counts()["failed_blocks"] == 1
    assert request.loaded_tokens < boundary
    settle(engine, pool)
    again = start_engine(start, model)
    assert computed(again, tokens, "again").loaded_tokens == boundary, "it was recomputed and saved once more"
    settle(again, pool)


def test_a_full_prompt_hit_stops_short_of_the_end(pool: Pool, start: EngineFactory) -> None:
    """The engine computes the last token once more; a state after it would take it in twice."""
    model = MODELS["states"]
    first = start_engine(start, model)
    tokens = prompt(4 * STEP_TOKENS)
    computed(first, tokens)
    settle(first, pool)
    second = start_engine(start, model)
    assert computed(second, tokens, "reader").loaded_tokens == 3 * STEP_TOKENS
    longer = computed(second, [*tokens, 1], "longer")
    assert longer.loaded_tokens == 4 * STEP_TOKENS
    settle(second, pool)
