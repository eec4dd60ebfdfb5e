"""Models with several kinds of KV: what one engine computed, a fresh one resumes from, with the same bytes and answers.

Where it resumes is worked out here, from what each kind needs and where the engine keeps states; not by the code under
test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Answer, EngineProcess, Engines, embedded, make_prompt
from tests.e2e.hybrid_models import HYBRID_MODELS, PROMPT_TOKENS, HybridModel, make_hybrid_models

IN_EVERY_RUN = ("gemma3", "qwen3-next")
"""A window, and states; the others take as long and run nightly. States of another kind are loaded in
:mod:`tests.e2e.test_hybrid_faults`."""
ALL = [
    name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.nightly)
    for name, model in HYBRID_MODELS.items()
    if model.runs_on_cpu and not model.reason
]
REFUSED = [name for name, model in HYBRID_MODELS.items() if model.reason]


@dataclass(frozen=True)
class Started:
    model: HybridModel
    folder: Path
    engines: Engines

    def engine(self, pool: Path) -> EngineProcess:
        """Chunks as short as the model allows, so that the last boundary is where the engine's own would be."""
        return self.engines.start(
            self.folder,
            {**embedded(pool), "chunk_min_bytes": 4096},
            environment=dict(self.model.environment),
            module="tests.e2e.hybrid_probe",
            **self.model.options,
        )


@pytest.fixture(params=ALL)
def started(request: pytest.FixtureRequest, engines: Engines) -> Started:
    model = HYBRID_MODELS[request.param]
    return Started(model, make_hybrid_models(ROOT / ".cache", [model.name])[model.name], engines)


def boundary_of(model: HybridModel, prompt_tokens: int) -> int:
    """The longest prefix that every group can resume at, short of the last token; states are kept at ``boundaries``."""
    step = math.lcm(*(group.block_tokens for group in model.groups))
    ends = range(step, prompt_tokens, step)
    return max(end for end in ends if not model.boundaries or end in model.boundaries)


def needed_blocks(model: HybridModel, group: int, boundary: int) -> int:
    """How many blocks of a group are needed to resume there: from the model's configuration and the kind's meaning."""
    expected = model.groups[group]
    match expected.spec:
        case "SlidingWindowSpec":
            first = max(0, boundary - int(model.config["sliding_window"]) + 1)
        case "ChunkedLocalAttentionSpec":
            first = boundary // int(model.config["attention_chunk_size"]) * int(model.config["attention_chunk_size"])
        case "MambaSpec":
            first = boundary - 1
        case _:
            first = 0
    return boundary // expected.block_tokens - first // expected.block_tokens


def assert_same(model: HybridModel, got: Answer, expected: Answer) -> None:
    assert got.tokens == expected.tokens
    assert got.distance(expected) < model.tolerance


def test_a_fresh_engine_resumes_where_all_groups_can_with_the_same_bytes_and_answers(
    started: Started, tmp_path: Path
) -> None:
    model, prompt = started.model, make_prompt(11, PROMPT_TOKENS)
    cold = started.engine(tmp_path / "pool")
    computed = cold.answer(prompt)
    assert computed.cached == 0
    cold.settle()
    held = cold.call("cached_bytes")
    cold.close()

    warm = started.engine(tmp_path / "pool")
    answer = warm.answer(prompt)
    boundary = boundary_of(model, len(prompt))
    assert answer.cached == boundary
    assert_same(model, answer, computed)
    loaded = warm.call("cached_bytes")
    for group in range(len(model.groups)):
        common = loaded[group].keys() & held[group].keys()
        assert len(common) >= needed_blocks(model, group, boundary)
        assert {key: loaded[group][key] for key in common} == {key: held[group][key] for key in common}
    counts = warm.settle()["counts"]
    blocks = [needed_blocks(model, group, boundary) for group in range(len(model.groups))]
    assert counts["loaded_blocks"] == sum(blocks), "a window loads what it needs and no more"
    contents = [group.content_bytes * group.layers for group in model.groups]
    assert counts["loaded_bytes"] == sum(n * size for n, size in zip(blocks, contents, strict=True))
    assert counts.get("failed_blocks", 0) == 0

    # Nothing of another prompt is taken for this one, and what is shared in part is resumed from in part.
    assert warm.call("reset")
    sibling = prompt[:700] + make_prompt(12, PROMPT_TOKENS - 700)
    ours = warm.answer(sibling)
    shared = [
        end for end in (boundary_of(model, n) for n in range(701, 99, -100) if _has_boundary(model, n)) if end <= 700
    ]
    assert ours.cached == (shared[0] if shared else 0)
    warm.settle()
    assert warm.call("reset")
    warm.close()


def _has_boundary(model: HybridModel, tokens: int) -> bool:
    step = math.lcm(*(group.block_tokens for group in model.groups))
    return any(not model.boundaries or end in model.boundaries for end in range(step, tokens, step))


@pytest.mark.nightly
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused_by_name(name: str, engines: Engines, tmp_path: Path) -> None:
    """Latents on a CPU: how its kernels pack them is not told by the engine, or, without AMX, it caches none."""
    folder = make_hybrid_models(ROOT / ".cache", [name])[name]
    reason = engines.process().why_not(folder, embedded(tmp_path / "pool"), **HYBRID_MODELS[name].options)
    has_amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    assert ("MLAAttention.isa is missing" if has_amx else "cache_config.enable_prefix_caching is False") in reason
