"""Configs are read into the form that the model's code follows, and nothing unknown is guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.host.kv.position.form import Linear, Llama3, PairStyle, PositionFree, RotaryForm, Unscaled, Yarn
from meshfusion.host.kv.position.hf_config import rotary_form_of
from meshfusion.jbof.errors import UnsupportedError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "layer_types": ["sliding_attention", "full_attention"],
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
SMOLLM3: dict[str, Any] = LLAMA | {"model_type": "smollm3", "no_rope_layers": [1, 0], "no_rope_layer_interval": 2}
BLOOM: dict[str, Any] = {"model_type": "bloom", "hidden_size": 64, "n_head": 8, "n_layer": 2}
GPTJ: dict[str, Any] = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64}


def with_scaling(**scaling: Any) -> dict[str, Any]:
    return LLAMA | {"rope_scaling": scaling}


def test_llama_in_both_forms() -> None:
    form = RotaryForm(128, 128, 5e5, PairStyle.NEOX, Llama3(8.0, 1.0, 4.0, 8192))
    assert rotary_form_of(LLAMA | {"rope_scaling": LLAMA3_SCALING}, 1) == form
    today = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert rotary_form_of(today | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5}}, 1) == form


def test_layers_of_gemma3_have_bases_of_their_own() -> None:
    local = RotaryForm(256, 256, 1e4, PairStyle.NEOX)
    whole = RotaryForm(256, 256, 1e6, PairStyle.NEOX, Linear(8.0))
    assert [rotary_form_of(GEMMA3, layer) for layer in (0, 1)] == [local, whole]
    old = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    today = {key: value for key, value in GEMMA3.items() if key not in old}
    today["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    assert [rotary_form_of(today, layer) for layer in (0, 1)] == [local, whole]


def test_the_rotary_part_of_an_mla_latent_is_its_end() -> None:
    yarn = Yarn(40.0, 4096, 32.0, 1.0, 1.0, True)  # mscale and mscale_all_dim are equal
    assert rotary_form_of(DEEPSEEK, 60) == RotaryForm(576, 64, 1e4, PairStyle.GPTJ, yarn, first_dim=512)


def test_the_magnitude_of_mla_takes_its_own_defaults() -> None:
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 0.707}
    form = rotary_form_of(DEEPSEEK | {"rope_scaling": scaling}, 0)
    assert isinstance(form, RotaryForm)
    assert isinstance(form.scaling, Yarn)
    assert form.scaling.magnitude == pytest.approx(1.0857264, abs=1e-7)  # (0.1 ln 40 + 1) / (0.0707 ln 40 + 1)


@pytest.mark.parametrize(
    ("extra", "magnitude"),
    [
        ({}, 1.138629436),  # 0.1 ln 4 + 1
        ({"mscale": 0.707}, 1.138629436),  # one of the two alone does not count
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, 1.026836153),
        ({"attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 0.5}, 1.25),
    ],
)
def test_the_magnitude_of_yarn(extra: dict[str, float], magnitude: float) -> None:
    config = with_scaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, truncate=False, **extra)
    form = rotary_form_of(config, 0)
    assert isinstance(form, RotaryForm)
    assert isinstance(form.scaling, Yarn)
    assert form.scaling.magnitude == pytest.approx(magnitude, abs=1e-9)
    assert (form.scaling.beta_fast, form.scaling.beta_slow, form.scaling.truncate) == (32.0, 1.0, False)


def test_a_part_of_the_head() -> None:
    phi = LLAMA | {"model_type": "phi3", "partial_rotary_factor": 0.75}
    assert rotary_form_of(phi, 0) == RotaryForm(128, 96, 5e5, PairStyle.NEOX)
    glm = LLAMA | {"model_type": "glm4", "head_dim": 128}
    assert rotary_form_of(glm, 0) == RotaryForm(128, 64, 5e5, PairStyle.GPTJ)
    assert rotary_form_of(GPTJ, 27) == RotaryForm(256, 64, 1e4, PairStyle.GPTJ)


def test_layers_without_position_and_alibi() -> None:
    assert rotary_form_of(SMOLLM3, 0) == RotaryForm(128, 128, 5e5, PairStyle.NEOX)
    assert rotary_form_of(SMOLLM3, 1) == PositionFree(128)
    assert rotary_form_of(BLOOM, 1) == PositionFree(8)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (LLAMA | {"model_type": "quux"}, "'quux': how its keys"),
    ({}, "model_type None"),
    (LLAMA | {"model_type": ["llama"]}, "model_type"),
    (LLAMA | {"model_type": "gpt2"}, "'gpt2': a vector for each position"),
    (LLAMA | {"model_type": "mamba2"}, "'mamba2': a recurrent state"),
    (LLAMA | {"model_type": "qwen2_5_vl_text"}, "three positions"),
    (LLAMA | {"model_type": "hunyuan_v1_dense"}, "does not commute"),
    (LLAMA | {"model_type": "llama4_text"}, "absolute positions"),
    (with_scaling(rope_type="quux", factor=2.0), "rope_type 'quux': not known"),
    (with_scaling(rope_type=["linear"], factor=2.0), "rope_type"),
    (with_scaling(rope_type="dynamic", factor=2.0), "'dynamic': frequencies follow the length"),
    (with_scaling(type="longrope", short_factor=[1.0], long_factor=[2.0]), "'longrope': frequencies are other"),
    (with_scaling(type="su", short_factor=[1.0], long_factor=[2.0]), "'su': frequencies are other"),
    (with_scaling(type="mrope", mrope_section=[16, 24, 24]), "'mrope': each token has three positions"),
    (with_scaling(rope_type="default", mrope_section=[16, 24, 24]), "mrope_section: each token"),
    (with_scaling(rope_type="linear", factor=2.0, quux=1), "'quux', which is not known"),
    (with_scaling(rope_type="default", factor=2.0), "'default' with 'factor'"),
    (with_scaling(rope_type="linear"), "without 'factor'"),
    (with_scaling(rope_type="linear", factor="2"), "factor is '2'"),
    (with_scaling(rope_type="linear", factor=True), "factor is True"),
    (with_scaling(rope_type="linear", factor=float("nan")), "factor is nan"),
    (with_scaling(rope_type="linear", factor=0), "factor is 0"),
    (with_scaling(rope_type="linear", type="yarn", factor=2.0), "type is 'yarn'"),
    (with_scaling(**LLAMA3_SCALING | {"low_freq_factor": 5.0}), "low_freq_factor 5.0 is above"),
    (with_scaling(**LLAMA3_SCALING | {"original_max_position_embeddings": 0.5}), "not a whole number"),
    (with_scaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=9, truncate=1), "truncate is 1"),
    (with_scaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=9, beta_fast=None), "beta_fast is"),
    (with_scaling(rope_type="linear", factor=2.0, rope_theta=1e4), "rope_theta is"),
    (LLAMA | {"rope_theta": None}, "rope_theta is missing"),
    (LLAMA | {"rope_theta": 0.5}, "rope_theta is 0.5"),
    (LLAMA | {"rope_scaling": "linear"}, "rope_scaling is 'linear', not a mapping"),
    (LLAMA | {"rope_parameters": "linear"}, "rope_parameters is 'linear', not a mapping"),
    (LLAMA | {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 500000.0 in the config and 10000.0"),
    (LLAMA | {"rope_parameters": {}, "rope_scaling": {}}, "both"),
    (LLAMA | {"rope_parameters": {"full_attention": {}}, "rope_theta": None}, "layers of type None"),
    (LLAMA | {"partial_rotary_factor": 1.5}, "192 of the 128"),
    (LLAMA | {"head_dim": 5}, "5 of the 5"),
    (LLAMA | {"dual_chunk_attention_config": {"chunk_size": 8}}, "'dual_chunk_attention_config'"),
    (LLAMA | {"no_rope_layers": [1, 0]}, "'no_rope_layers'"),
    (LLAMA | {"alibi": True}, "'alibi'"),
    (LLAMA | {"position_embedding_type": "relative_key"}, "'position_embedding_type'"),
    (LLAMA | {"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention': a recurrent state"),
    (LLAMA | {"layer_types": ["conv", "full_attention"]}, "'conv': a recurrent state"),
    (LLAMA | {"layer_types": ["chunked_attention", "full_attention"]}, "absolute positions"),
    (LLAMA | {"layer_types": ["quux", "full_attention"]}, "'quux': not known"),
    (LLAMA | {"layer_types": ["full_attention"]}, "layer_types is not a list of 2"),
    (LLAMA | {"model_type": "qwen3"}, "no head_dim"),
    (SMOLLM3 | {"no_rope_layers": None}, "no_rope_layer_interval without"),
    (SMOLLM3 | {"no_rope_layers": [2, 0]}, "no_rope_layers has 2 for layer 0"),
    (GEMMA3 | {"layer_types": None}, "no layer_types"),
    (GEMMA3 | {"partial_rotary_factor": 0.5}, "two kinds of layers"),
    (GEMMA3 | {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, "'sliding_attention'"),
    (DEEPSEEK | {"rope_interleave": False}, "rope_interleave"),
    (DEEPSEEK | {"qk_rope_head_dim": 63}, "63, not an even"),
    (DEEPSEEK | {"rope_scaling": DEEPSEEK["rope_scaling"] | {"attention_factor": 1.0}}, "'attention_factor' for MLA"),
    (GPTJ | {"rotary_dim": None}, "rotary_dim is None"),
    (GPTJ | {"rotary_dim": 512}, "512 of the 256"),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        rotary_form_of(config, 0)
    assert named in refusal.value.message
    assert refusal.value.next_step


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None)
@given(data=st.data())
def test_any_change_of_a_config_is_read_or_refused(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from([LLAMA, GEMMA3, DEEPSEEK, SMOLLM3, BLOOM, GPTJ])))
    config[data.draw(st.sampled_from([*sorted(config), "rope_parameters", "rope_scaling"]))] = data.draw(json_values)
    nested = config.get("rope_scaling")
    if isinstance(nested, dict) and nested:
        config["rope_scaling"] = nested | {data.draw(st.sampled_from(sorted(nested))): data.draw(json_values)}
    try:
        form = rotary_form_of(config, 0)
    except UnsupportedError:
        return
    assert isinstance(form, RotaryForm | PositionFree)


def test_a_layer_that_is_not_there_is_refused_by_its_number() -> None:
    for config in (LLAMA, BLOOM):
        assert rotary_form_of(config, 1)
        for layer in (-1, 2):
            with pytest.raises(UnsupportedError, match=f"has no layer {layer}") as refused:
                rotary_form_of(config, layer)
            assert refused.value.next_step == "give one of its 2 layers, from 0 on"


def test_of_a_multimodal_model_the_text_config_is_asked_for() -> None:
    with pytest.raises(UnsupportedError, match="'gemma3' is of more than text") as refused:
        rotary_form_of({"model_type": "gemma3", "text_config": GEMMA3}, 0)
    assert refused.value.next_step == "give the config's text_config"


def test_no_scaling_is_said_in_many_ways() -> None:
    plain = RotaryForm(128, 128, 5e5, PairStyle.NEOX, Unscaled())
    for scaling in (None, {}, {"rope_type": "default"}, {"type": "default"}):
        assert rotary_form_of(LLAMA | {"rope_scaling": scaling}, 0) == plain
