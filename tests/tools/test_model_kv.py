"""The child that builds a model's skeleton with the engine's own code, on configurations that carry no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshfusion.host.kv.resume import LastWindow, LocalChunk, ResumeRule, StateAtBoundary, WholePrefix
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.model_kv import (
    EngineSettings,
    GroupKv,
    LayerKv,
    ModelKv,
    describe_model,
    from_object,
    to_object,
)
from tests.e2e.harness import ROOT
from tests.e2e.hybrid_configs import WINDOW_TOKENS
from tests.e2e.hybrid_models import HYBRID_MODELS, make_hybrid_models
from tests.e2e.models import HEAD_DIM, KV_HEADS

TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # keys and values of one layer in bfloat16
SHAPES = {
    "llama": [("full_attention", 4)],
    "mistral": [("sliding_window", 4)],
    "gemma3": [("full_attention", 2), ("sliding_window", 4)],
    "gemma4": [("full_attention", 2), ("sliding_window", 4)],
    "gpt-oss": [("full_attention", 2), ("sliding_window", 2)],
    "llama4": [("chunked_local", 3), ("full_attention", 1)],
    "deepseek-v2": [("mla", 3)],
    "deepseek-v3": [("mla", 3)],
    "qwen3-next": [("full_attention", 1), ("recurrent_state", 3)],
    "lfm2": [("full_attention", 1), ("recurrent_state", 3)],
    "nemotron-h": [("full_attention", 1), ("recurrent_state", 2)],
    "falcon-h1": [("full_attention", 3), ("recurrent_state", 3)],
    "granite4": [("full_attention", 1), ("recurrent_state", 3)],
    "mamba2": [("recurrent_state", 3)],
}
QUICK = ("qwen3-next",)


def config_of(name: str, folder: Path) -> Path:
    """``folder``, with the configuration of a tiny model in it and no weights."""
    made = make_hybrid_models(ROOT / ".cache", [name])[name]
    shutil.copy(made / "config.json", folder)
    return folder


def members(model: ModelKv) -> list[LayerKv]:
    return [member for group in model.groups for member in group.members]


def check(model: ModelKv, name: str) -> None:
    found: dict[str, int] = {}
    for member in members(model):
        found[member.kind] = found.get(member.kind, 0) + member.layers
        assert member.real_bytes <= member.held_bytes
        if member.kind in ("full_attention", "sliding_window", "chunked_local"):
            assert member.bytes_per_token == member.layers * TOKEN_BYTES
    assert sorted(found.items()) == SHAPES[name]
    assert model.parameters > model.active_parameters > 0


def test_every_model_has_a_shape() -> None:
    assert SHAPES.keys() == HYBRID_MODELS.keys()


@pytest.mark.parametrize("name", QUICK)
def test_groups_of_a_model(name: str, tmp_path: Path) -> None:
    model = describe_model(config_of(name, tmp_path))
    check(model, name)
    assert model.all_refusals == ()
    assert {member.rule for member in members(model)} == {"every block", "the state at the boundary"}
    # One expert layer each, two of four experts of a token: the active share is below the whole without vocabulary.
    assert model.active_parameters < model.parameters - 2 * 8192 * 256


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(SHAPES) - set(QUICK)))
def test_groups_of_the_others(name: str, tmp_path: Path) -> None:
    model = describe_model(config_of(name, tmp_path))
    check(model, name)
    rules = {member.kind: member.rule for member in members(model)}
    if "sliding_window" in rules:
        assert rules["sliding_window"] == f"the last {WINDOW_TOKENS - 1} tokens"
    if "chunked_local" in rules:
        assert rules["chunked_local"] == f"since the attention chunk of {WINDOW_TOKENS} tokens began"


def test_an_engine_with_other_settings(tmp_path: Path) -> None:
    """Two KV heads on two ranks, in float32, in blocks of 48 tokens: a page holds keys and values of one head."""
    settings = EngineSettings(tensor_parallel_size=2, block_size=48, dtype="float32", max_model_len=4096)
    (group,) = describe_model(config_of("llama", tmp_path), settings).groups
    (member,) = group.members
    assert member.block_tokens == 48
    assert member.real_bytes == 2 * 48 * HEAD_DIM * 4
    assert group.unit_bytes == 4 * member.real_bytes
    assert group.rule == WholePrefix()
    assert group.ranks_per_shard == 1


def test_ranks_that_the_model_cannot_be_divided_by_are_named(tmp_path: Path) -> None:
    with pytest.raises(MeshFusionError, match="divisible by tensor parallel size"):
        describe_model(config_of("llama", tmp_path), EngineSettings(tensor_parallel_size=3))


@pytest.mark.parametrize("rule", [WholePrefix(), LastWindow(100), LocalChunk(64), StateAtBoundary(), None])
def test_what_the_child_answers_is_read_as_it_was(rule: ResumeRule | None) -> None:
    layer = LayerKv("Spec", "kind", 2, "a", "words", 16, 100, 128, 7, False)
    model = ModelKv("0.32.0", "cpu", (GroupKv((layer,), ("a; b",), rule, 4),), 10, 5, ("c; d",), 1.5)
    assert from_object(json.loads(json.dumps(to_object(model)))) == model


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshFusionError, match=r"has no config\.json"):
        describe_model(tmp_path)


@pytest.mark.parametrize(("text", "expected"), [("", "is not JSON"), ("{", "is not JSON"), ("[1]", "holds no object")])
def test_a_configuration_that_is_none_is_refused_without_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setattr("meshfusion.tools.model_kv.subprocess.run", None)
    with pytest.raises(MeshFusionError, match=rf"config\.json {expected}"):
        describe_model(tmp_path)


def test_a_model_that_the_engine_cannot_build_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "none_such"}))
    with pytest.raises(MeshFusionError, match=r"the engine cannot build .*none_such"):
        describe_model(tmp_path)
