"""The acceptance test itself, with real engines: it passes what is right, and fails what only it can see."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.tools.verify.run import Plan, compute, load, report_of
from tests.e2e.harness import embedded, engine_options


def note(text: str) -> None:
    print(text)


@pytest.mark.nightly
def test_what_is_right_passes_and_bytes_changed_behind_the_digests_fail(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    options = engine_options(model, embedded(tmp_path / "pool"), max_model_len=512)
    plan = Plan(options, tmp_path, seed=3)
    computed = compute(plan, note)
    assert [len(prompt.token_ids) for prompt in computed.prompts] == [129, 256, 255, 289, 449, 321, 320, 127]

    right = report_of(plan, computed, load(plan, computed.prompts, note))
    assert right.problems == ()
    assert [found.loaded_tokens for found in right.prompts] == [128, 256, 128, 256, 384, 256, 256, 0]
    assert all(found.compared_blocks == found.loaded_blocks == found.loaded_tokens // 32 for found in right.prompts)
    assert right.loader_counts["loaded_blocks"] == sum(found.loaded_blocks for found in right.prompts)
    assert 0 < right.run_to_run_variation < 1e-3, "float32 engines differ between batch shapes, by rounding"
    assert right.path.startswith("path staged")

    wrong = report_of(plan, computed, load(plan, computed.prompts, note, module="tests.e2e.scrambling_verifier"))
    assert not wrong.is_passed
    assert wrong.loader_counts.get("digest_mismatches", 0) == 0, "the digests were right"
    first, *others, none = wrong.prompts
    assert (first.differing_blocks, first.are_tokens_equal) == (1, True)
    assert first.difference <= wrong.tolerance, "only its bytes tell"
    assert all(found.differing_blocks == 1 and found.difference > wrong.tolerance for found in others)
    assert none.loaded_blocks == 0
    assert none.problems == ()
