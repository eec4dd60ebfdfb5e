"""Keys turned from p to q are compared with those that vLLM's rotary embeddings make at q."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.host.kv.position.form import (
    Linear,
    Llama3,
    PairStyle,
    PositionFree,
    RotaryForm,
    Scaling,
    Unscaled,
    Yarn,
)
from meshfusion.host.kv.position.turn import KEY_DTYPES, cos_sin, turn_keys
from meshfusion.jbof.errors import UnsupportedError
from tests.host.kv.position.turning import other_numbers, pair_errors, random_keys, rotary_pairs

POSITIONS = 2**20
HEAD_DIM, ROTARY_DIM = 16, 8  # small: vLLM keeps cos and sin of every position
BASE = 5e5

# Each of our scalings with vLLM's parameters for it, and the length from which vLLM makes tables of 2**20 positions.
# The magnitude of YaRN is written out: 0.1 ln 4 + 1, and (0.0707 ln 4 + 1) / (0.05 ln 4 + 1).
ENGINE_SCALINGS: dict[str, tuple[Scaling, dict[str, Any], int]] = {
    "default": (Unscaled(), {"rope_type": "default"}, POSITIONS),
    "linear": (Linear(4.0), {"rope_type": "linear", "factor": 4.0}, POSITIONS // 4),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        POSITIONS,
    ),
    "yarn": (
        Yarn(4.0, POSITIONS // 4, 32.0, 1.0, 1.138629436, True),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4},
        POSITIONS,
    ),
    "yarn-all": (
        Yarn(4.0, POSITIONS // 4, 24.0, 2.0, 1.026836153, False),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": POSITIONS // 4,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        POSITIONS,
    ),
}

# Of the length of a pair, in epsilons of the type. Made by vLLM's kernel, both keys are rounded once, and ours once:
# 3 * 0.5. Its plain version rounds both products and their sum: up to 0.5 * (1 + sqrt(2)) each, and ours once.
KERNEL_BOUND = 1.5
PLAIN_BOUND = 3.0

places = st.integers(0, POSITIONS - 1)
moves = st.lists(st.tuples(places, places), min_size=1, max_size=8)
seeds = st.integers(0, 2**32)
dtypes = st.sampled_from(KEY_DTYPES)
forms = st.builds(
    lambda style, scaling, rotary, before, after, base: RotaryForm(
        before + rotary + after, rotary, base, style, scaling, first_dim=before
    ),
    st.sampled_from(PairStyle),
    st.sampled_from([scaling for scaling, _, _ in ENGINE_SCALINGS.values()]),
    st.integers(1, 40).map(lambda pairs: 2 * pairs),
    st.integers(0, 3),
    st.integers(0, 3),
    st.floats(2.0, 1e7),
)


@pytest.fixture(scope="module", params=ENGINE_SCALINGS)
def engine_ropes(request: pytest.FixtureRequest) -> Iterator[dict[tuple[PairStyle, torch.dtype], Any]]:
    """vLLM's rotary embeddings of one scaling."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    _, parameters, length = ENGINE_SCALINGS[request.param]
    parameters = parameters | {"rope_theta": BASE, "partial_rotary_factor": ROTARY_DIM / HEAD_DIM}
    with set_current_vllm_config(VllmConfig()):
        yield {
            (style, dtype): rotary_embedding.get_rope(
                HEAD_DIM, length, is_neox_style=style is PairStyle.NEOX, rope_parameters=parameters, dtype=dtype
            )
            for style in PairStyle
            for dtype in KEY_DTYPES
        }
    rotary_embedding._ROPE_DICT.clear()  # it keeps them all, here half a gigabyte for each scaling


def engine_scaling(request: pytest.FixtureRequest) -> Scaling:
    return ENGINE_SCALINGS[request.node.callspec.params["engine_ropes"]][0]


def engine_keys(forward: Any, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    tokens = len(keys)
    turned: torch.Tensor = forward(positions, keys.reshape(tokens, -1).clone(), keys.reshape(tokens, -1).clone())[1]
    return turned.reshape(keys.shape)


def split(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([p for p, _ in pairs]), torch.tensor([q for _, q in pairs])


def test_cos_and_sin_are_the_engines_bit_for_bit(
    engine_ropes: dict[tuple[PairStyle, torch.dtype], Any], request: pytest.FixtureRequest
) -> None:
    for dtype in KEY_DTYPES:
        form = RotaryForm(HEAD_DIM, ROTARY_DIM, BASE, PairStyle.NEOX, engine_scaling(request))
        ours = torch.cat(cos_sin(form, torch.arange(POSITIONS), dtype), dim=-1)
        for style in PairStyle:  # they pair other numbers, and turn them by the same angles
            assert torch.equal(ours, engine_ropes[style, dtype].cos_sin_cache), (style, dtype)


@settings(deadline=None, max_examples=30)
@given(style=st.sampled_from(PairStyle), dtype=dtypes, pairs=moves, seed=seeds)
def test_turned_keys_are_those_of_the_engine_at_the_other_position(
    engine_ropes: dict[tuple[PairStyle, torch.dtype], Any],
    request: pytest.FixtureRequest,
    style: PairStyle,
    dtype: torch.dtype,
    pairs: list[tuple[int, int]],
    seed: int,
) -> None:
    form = RotaryForm(HEAD_DIM, ROTARY_DIM, BASE, style, engine_scaling(request))
    keys = random_keys(seed, len(pairs), form, dtype)
    p, q = split(pairs)
    rope = engine_ropes[style, dtype]
    # The kernel for float32 may use other instructions for a few tokens: held to the looser bound.
    kernel_bound = KERNEL_BOUND if dtype is not torch.float32 else PLAIN_BOUND
    for forward, bound in ((rope.forward_cpu, kernel_bound), (rope.forward_native, PLAIN_BOUND)):
        there = engine_keys(forward, keys, q)
        turned = turn_keys(engine_keys(forward, keys, p), form, p, q)
        assert turned.dtype is dtype
        assert pair_errors(turned, there, form).max() <= bound
        assert torch.equal(other_numbers(turned, form), other_numbers(keys, form))


def test_mla_latents_are_turned_in_their_last_numbers_only() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {
        "rope_type": "deepseek_yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    }
    magnitude = 1.0857264  # (0.1 ln 40 + 1) / (0.0707 ln 40 + 1)
    form = RotaryForm(576, 64, 1e4, PairStyle.GPTJ, Yarn(40.0, 4096, 32.0, 1.0, magnitude, True), first_dim=512)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, 163840, is_neox_style=False, rope_parameters=parameters, dtype=torch.bfloat16)
    assert rope.mscale == pytest.approx(magnitude, abs=1e-6)
    latents = random_keys(1, 500, form, torch.bfloat16, heads=1)
    generator = torch.Generator().manual_seed(2)
    p, q = (torch.randint(0, 163840, (500,), generator=generator) for _ in range(2))

    def stored(positions: torch.Tensor) -> torch.Tensor:
        rotary = latents[..., 512:].clone()
        return torch.cat((latents[..., :512], rope.forward_native(positions, rotary.clone(), rotary)[1]), dim=-1)

    turned = turn_keys(stored(p), form, p, q)
    assert torch.equal(turned[..., :512], latents[..., :512])
    assert pair_errors(turned, stored(q), form).max() <= PLAIN_BOUND


@settings(deadline=None)
@given(form=forms, dtype=dtypes, pairs=moves, seed=seeds)
def test_there_and_back_is_the_same_key(
    form: RotaryForm, dtype: torch.dtype, pairs: list[tuple[int, int]], seed: int
) -> None:
    keys = random_keys(seed, len(pairs), form, dtype)
    p, q = split(pairs)
    back = turn_keys(turn_keys(keys, form, p, q), form, q, p)
    assert pair_errors(back, keys, form).max() <= 1.01  # rounded twice


@settings(deadline=None)
@given(form=forms, dtype=dtypes, pairs=moves, seed=seeds, data=st.data())
def test_two_turns_are_one(
    form: RotaryForm, dtype: torch.dtype, pairs: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    keys = random_keys(seed, len(pairs), form, dtype)
    p, q = split(pairs)
    r = torch.tensor(data.draw(st.lists(places, min_size=len(pairs), max_size=len(pairs))))
    at_once = turn_keys(keys, form, p, r)
    assert pair_errors(turn_keys(turn_keys(keys, form, p, q), form, q, r), at_once, form).max() <= 1.52  # three times


@settings(deadline=None)
@given(form=forms, pairs=moves, seed=seeds)
def test_the_length_of_every_pair_stays(form: RotaryForm, pairs: list[tuple[int, int]], seed: int) -> None:
    """So a factor on cos and sin, as YaRN has, is not applied again."""
    keys = random_keys(seed, len(pairs), form, torch.float32)
    lengths = rotary_pairs(keys, form).abs()
    turned = rotary_pairs(turn_keys(keys, form, *split(pairs)), form).abs()
    # Rounded once (0.5), and both cos and sin of both positions are (0.5 each).
    assert ((turned - lengths).abs() / lengths).max() <= 2 * torch.finfo(torch.float32).eps


@settings(deadline=None)
@given(form=forms, dtype=dtypes, positions=st.lists(places, min_size=1, max_size=8), seed=seeds)
def test_keys_that_stay_are_the_same_bits(
    form: RotaryForm, dtype: torch.dtype, positions: list[int], seed: int
) -> None:
    keys = random_keys(seed, len(positions), form, dtype)
    turned = turn_keys(keys, form, torch.tensor(positions), torch.tensor(positions))
    assert torch.equal(turned, keys)
    assert turned.data_ptr() != keys.data_ptr()


def test_the_given_keys_are_left_alone() -> None:
    form = RotaryForm(8, 8, BASE, PairStyle.NEOX)
    keys = random_keys(0, 3, form, torch.bfloat16)
    before = keys.clone()
    turned = turn_keys(keys, form, torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7]))
    assert torch.equal(keys, before)
    assert not torch.equal(turned, keys)


def test_keys_without_position_are_the_same_anywhere() -> None:
    keys = torch.randn(3, 2, 8)
    turned = turn_keys(keys, PositionFree(8), torch.tensor([0, 1, 2]), torch.tensor([7, 3, 9]))
    assert torch.equal(turned, keys)
    assert turned.data_ptr() != keys.data_ptr()


def test_no_keys_are_turned_into_none() -> None:
    none = torch.empty(0, dtype=torch.long)
    assert turn_keys(torch.empty(0, 2, 8), RotaryForm(8, 8, BASE, PairStyle.NEOX), none, none).shape == (0, 2, 8)


def test_cos_and_sin_of_the_engines_type_count() -> None:
    """An engine that keeps them in float32 beside keys in bfloat16 rounds less, and so must the turn."""
    form = RotaryForm(64, 64, BASE, PairStyle.NEOX)
    keys = random_keys(0, 2000, form, torch.bfloat16)
    p, q = torch.arange(2000), torch.arange(2000) * 7 + 5

    def stored(positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (part.double()[:, None] for part in cos_sin(form, positions, torch.float32))
        pairs = rotary_pairs(keys, form) * torch.complex(cos, sin)
        return torch.cat((pairs.real, pairs.imag), dim=-1).to(torch.bfloat16)

    at_p, at_q = stored(p), stored(q)
    told = pair_errors(turn_keys(at_p, form, p, q, cos_sin_dtype=torch.float32), at_q, form)
    assumed = pair_errors(turn_keys(at_p, form, p, q), at_q, form)
    assert told.max() <= KERNEL_BOUND
    assert assumed.mean() > 1.2 * told.mean()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("position", [RotaryForm(8, 8, BASE, PairStyle.NEOX), PositionFree(8)])
def test_quantised_keys_are_refused_by_type(dtype: torch.dtype, position: RotaryForm | PositionFree) -> None:
    keys = torch.zeros(1, 1, 8).to(dtype)
    with pytest.raises(UnsupportedError, match=str(dtype)):
        turn_keys(keys, position, torch.tensor([0]), torch.tensor([1]))


@pytest.mark.parametrize(("position", "is_good"), [(-1, False), (0, True), (2**24 - 1, True), (2**24, False)])
def test_positions_that_float32_cannot_tell_apart_are_a_mistake(position: int, is_good: bool) -> None:
    form = RotaryForm(8, 8, BASE, PairStyle.NEOX)
    keys, good, tried = torch.ones(1, 1, 8), torch.tensor([1]), torch.tensor([position])
    if is_good:
        turn_keys(keys, form, good, tried)
        turn_keys(keys, form, tried, good)
        return
    with pytest.raises(AssertionError):
        turn_keys(keys, form, good, tried)
    with pytest.raises(AssertionError):
        turn_keys(keys, form, tried, good)


@pytest.mark.parametrize("style", PairStyle)
def test_a_norm_after_the_turn_commutes_only_with_equal_weights_in_each_pair(style: PairStyle) -> None:
    """Why models that weigh keys after turning them are refused by name, unless the weights are so."""
    form = RotaryForm(32, 32, BASE, style)
    keys = random_keys(0, 64, form, torch.float32)
    p, q = torch.arange(64), torch.arange(64) + 1000
    generator = torch.Generator().manual_seed(1)
    half, unequal = (torch.rand(count, generator=generator, dtype=torch.float64) + 0.5 for count in (16, 32))
    paired = torch.cat((half, half)) if style is PairStyle.NEOX else half.repeat_interleave(2)

    def turned_and_normed(positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cos, sin = (part[:, None] for part in cos_sin(form, positions, torch.float64))
        pairs = rotary_pairs(keys, form) * torch.complex(cos, sin)
        numbers = torch.view_as_real(pairs)
        keys_there = numbers.transpose(-1, -2).flatten(-2) if style is PairStyle.NEOX else numbers.flatten(-2)
        return torch.nn.functional.rms_norm(keys_there, (32,), weight, eps=1e-6)

    def difference(weight: torch.Tensor) -> float:
        stored = turned_and_normed(p, weight).float()
        expected = turned_and_normed(q, weight)
        turned = turn_keys(stored, form, p, q).double()
        return float((turned - expected).abs().max())

    assert difference(paired) < 1e-5
    assert difference(unequal) > 0.1


def test_forms_that_cannot_be_are_mistakes() -> None:
    good = RotaryForm(8, 4, BASE, PairStyle.NEOX)
    for change in ({"rotary_dim": 3}, {"rotary_dim": 0}, {"rotary_dim": 10}, {"first_dim": 5}, {"base": 1.0}):
        with pytest.raises(AssertionError):
            replace(good, **change)
