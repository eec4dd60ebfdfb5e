"""Keys that whole models make at one position, turned, are compared with those that they make at another.

Tiny models of transformers with random weights show that a config is read as the model's code reads it; SmolLM2 shows
what turned keys mean in a real one.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfusion.host.kv.position.form import PositionFree, RotaryForm
from meshfusion.host.kv.position.hf_config import rotary_form_of
from meshfusion.host.kv.position.turn import turn_keys
from tests.host.kv.position.turning import other_numbers, pair_errors

ROOT = Path(__file__).parents[4]
TOKENS = 48
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
# transformers divides frequencies by the factor and vLLM, which turn.py follows, positions: angles of up to 1350 are
# then apart by up to two of their ulps (2**-13), 1024 epsilons each.
BOUNDS = {"llama-linear": 2051.0}
BOUND = 3.0
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
    "mistral": {"model_type": "mistral"},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": YARN | {"truncate": False}},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2"},
    "gemma3-sliding": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": GEMMA3_ROPE,
    },
    "gemma3-full": {
        "model_type": "gemma3_text",
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": GEMMA3_ROPE,
    },
    "phi3-partial": {
        "model_type": "phi3",
        "head_dim": 16,  # what this model derives
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "smollm3-nope": {"model_type": "smollm3", "no_rope_layers": [0, 1]},
    "glm4": {"model_type": "glm4"},
    "cohere": {"model_type": "cohere", "head_dim": 16},
    "gptj": {
        "model_type": "gptj",
        "head_dim": None,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "rotary_dim": 8,
        "n_positions": 8192,
    },
}


def layers_of_keys(model: Any, tokens: torch.Tensor, first_position: int) -> list[torch.Tensor]:
    """The stored keys of each layer, ``[tokens, heads, head_dim]``, of a request at these positions."""
    positions = torch.arange(first_position, first_position + len(tokens))
    with torch.inference_mode():
        cache = model(input_ids=tokens[None], position_ids=positions[None], use_cache=True).past_key_values
    return [layer.keys[0].transpose(0, 1).contiguous() for layer in cache.layers]


def run_of(first: int, tokens: int) -> torch.Tensor:
    return torch.arange(first, first + tokens)


def tiny_model(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = TINY | MODELS[name]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


@pytest.mark.parametrize("name", MODELS)
def test_the_config_is_read_as_the_model_reads_it(name: str) -> None:
    """In the first layer, whose inputs are equal."""
    model = tiny_model(name, torch.float32)
    position = rotary_form_of(model.config.to_dict(), 0)
    tokens = torch.randint(1, 128, (TOKENS,), generator=torch.Generator().manual_seed(0))
    p, q = 17, 4000
    at_p, at_q = (layers_of_keys(model, tokens, first)[0] for first in (p, q))
    turned = turn_keys(at_p, position, run_of(p, TOKENS), run_of(q, TOKENS))
    if isinstance(position, PositionFree):
        assert torch.equal(at_p, at_q)
        assert torch.equal(turned, at_q)
        return
    errors = pair_errors(turned, at_q, position)
    assert errors.max() <= BOUNDS.get(name, BOUND)
    assert pair_errors(at_p, at_q, position).max() > 1e4  # they do differ
    assert torch.equal(other_numbers(turned, position), other_numbers(at_q, position))


def test_keys_of_bloom_are_the_same_anywhere() -> None:
    """ALiBi: transformers counts positions from the attention mask, so tokens in front of the others move them."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=64, n_head=8, n_layer=2)).eval()
    assert rotary_form_of(model.config.to_dict(), 0) == PositionFree(8)
    tokens = torch.randint(1, 128, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        first, later = (
            model(input_ids=run[None], use_cache=True).past_key_values.layers[0].keys[0]
            for run in (tokens, torch.cat((torch.arange(1, 30), tokens)))
        )
    assert torch.allclose(later[:, 29:], first, rtol=0, atol=1e-6)


@dataclass(frozen=True, slots=True)
class RealModel:
    model: Any
    tokenizer: Any
    forms: list[RotaryForm]


@pytest.fixture(scope="module")
def smollm2() -> RealModel:
    """SmolLM2-135M, in float32."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from meshfusion.tools.quickstart_model import DEFAULT_MODEL_DIR, prepare_model

    folder = prepare_model(ROOT / DEFAULT_MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    forms = [rotary_form_of(config, layer) for layer in range(config["num_hidden_layers"])]
    rotary = [form for form in forms if isinstance(form, RotaryForm)]
    assert len(rotary) == len(forms) == 30
    return RealModel(model, Tokenizer.from_file(str(folder / "tokenizer.json")), rotary)


def tokens_of(smollm2: RealModel, text: str) -> torch.Tensor:
    return torch.tensor(smollm2.tokenizer.encode(text).ids)


def relative(turned: torch.Tensor, expected: torch.Tensor) -> float:
    return float((turned.double() - expected.double()).norm() / expected.double().norm())


PASSAGE = "The treaty was signed in the spring of 1648, and the delegates went home by the river. " * 3
SHORT = "A recipe for bread: take flour, water, salt and a little yeast, and wait until tomorrow. "
LONG = "In the evening the engine was taken apart; every bolt lay on the bench beside its nut. " * 8


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str)
def test_after_another_text_only_the_first_layer_is_right(smollm2: RealModel, dtype: torch.dtype) -> None:
    """Why turning is opt-in: deeper layers have read what came before."""
    model = copy.deepcopy(smollm2.model)
    for parameter in model.parameters():  # and not the frequencies, which models of any type keep in float32
        parameter.data = parameter.data.to(dtype)
    passage, short, long = (tokens_of(smollm2, text) for text in (PASSAGE, SHORT, LONG))
    before, after = (
        [keys[len(text) :] for keys in layers_of_keys(model, torch.cat((text, passage)), 0)] for text in (short, long)
    )
    p, q = run_of(len(short), len(passage)), run_of(len(long), len(passage))
    turned = [turn_keys(keys, form, p, q) for keys, form in zip(before, smollm2.forms, strict=True)]
    # In bfloat16 transformers, too, rounds cos, sin, both products and their sum.
    assert pair_errors(turned[0], after[0], smollm2.forms[0]).max() <= BOUND
    differences = [relative(ours, theirs) for ours, theirs in zip(turned, after, strict=True)]
    assert min(differences[1:]) > 10 * differences[0]
    assert max(differences) > 0.1


def test_where_the_past_moves_along_every_layer_is_right(smollm2: RealModel) -> None:
    """Rotary attention sees distances only: inputs of deeper layers are equal, up to what rounding adds up to."""
    passage = tokens_of(smollm2, PASSAGE)
    here, there = (layers_of_keys(smollm2.model, passage, first) for first in (0, 1000))
    p, q = run_of(0, len(passage)), run_of(1000, len(passage))
    turned = [turn_keys(keys, form, p, q) for keys, form in zip(here, smollm2.forms, strict=True)]
    assert max(relative(ours, theirs) for ours, theirs in zip(turned, there, strict=True)) < 1e-4
