"""What the engine's own code makes of published configurations, against sums by hand.

The configurations are those that the models were published with, as far as KV depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshfusion.tools.model_kv import EngineSettings, describe_model
from meshfusion.tools.plan import model_form
from meshfusion.tools.plan.model_form import form_of_model

MIB = 1 << 20
_COMMON: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3_8B: Mapping[str, Any] = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
_QWEN25_7B: Mapping[str, Any] = {
    **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072,
    "max_window_layers": 28,
}  # fmt: skip
_DEEPSEEK_V2_LITE: Mapping[str, Any] = {
    **_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "vocab_size": 102400, "rope_theta": 10000, "attention_bias": False,
}  # fmt: skip
_GEMMA3_4B: Mapping[str, Any] = {
    **_COMMON, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560,
    "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024, "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(34)],
}  # fmt: skip
_QWEN3_NEXT_80B: Mapping[str, Any] = {
    **_COMMON, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "vocab_size": 151936, "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "full_attention_interval": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """``token_bytes``: of one layer of attention that keeps every token, on one rank. ``loaded``: on all ranks, for a
    prefix of a number of tokens."""

    config: Mapping[str, Any]
    settings: EngineSettings
    chunk_tokens: int
    shards: int
    stored_bytes_of_chunk: int
    loaded: Mapping[int, int]


_LLAMA = 2 * 8 * 128 * 2
_QWEN = 2 * 4 * 128 * 2
_LATENT = (512 + 64) * 2
_GEMMA = 2 * 4 * 256 * 2
_GDN = 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2
"""A state in 32 bits, and the last three inputs of the convolution over queries, keys and values in 16."""
_NEXT = 2 * 2 * 256 * 2
CASES = {
    # 131,072 bytes a token, in all layers: 16 tokens are 2 MiB.
    "llama-3-8b": Case(
        _LLAMA3_8B, EngineSettings(block_size=16), 16, 1, 16 * 32 * _LLAMA, {1600: 1600 * 32 * _LLAMA}
    ),
    # One of 8 heads on each of 8 ranks: 16,384 bytes a token, 64 tokens make a MiB on each.
    "llama-3-8b, 8 ranks": Case(
        _LLAMA3_8B, EngineSettings(8, 16), 64, 8, 64 * 32 * _LLAMA, {1600: 1600 * 32 * _LLAMA}
    ),
    # Of 16 ranks two hold each head, and the engine does not say so: twice as much is stored.
    "llama-3-8b, 16 ranks": Case(
        _LLAMA3_8B, EngineSettings(16, 16), 64, 16, 2 * 64 * 32 * _LLAMA, {1600: 2 * 1600 * 32 * _LLAMA}
    ),
    # 57,344 bytes a token: 19 tokens make a MiB, two blocks of 16.
    "qwen2.5-7b": Case(_QWEN25_7B, EngineSettings(block_size=16), 32, 1, 32 * 28 * _QWEN, {320: 320 * 28 * _QWEN}),
    # In float32 twice that: one block is enough.
    "qwen2.5-7b, float32": Case(
        _QWEN25_7B, EngineSettings(block_size=16, dtype="float32"), 16, 1, 16 * 28 * 2 * _QWEN,
        {320: 320 * 28 * 2 * _QWEN},
    ),
    # 31,104 bytes a token on each rank, the same on both: stored once, read twice. 34 tokens make a MiB: 3 blocks.
    "deepseek-v2-lite, 2 ranks": Case(
        _DEEPSEEK_V2_LITE, EngineSettings(2, 16), 48, 1, 48 * 27 * _LATENT, {480: 2 * 480 * 27 * _LATENT}
    ),
    # 5 full layers, 29 with a window of 1024. Blocks of 64: 1.3 MB of the full layers. A boundary at 6400 tokens needs
    # the last 1023 of the others, which begin inside a block: 16 of them.
    "gemma-3-4b": Case(
        _GEMMA3_4B, EngineSettings(block_size=64), 64, 1 + 6, 64 * 34 * _GEMMA,
        {640: 640 * 34 * _GEMMA, 6400: 6400 * 5 * _GEMMA + 16 * 64 * 29 * _GEMMA},
    ),
    # 12 full layers and 36 states, of 12 layers each in three groups. Blocks are as long as a state needs: 2,146,304
    # bytes are 1048 tokens of 2048 bytes, which the engine rounds up to 1152.
    "qwen3-next-80b": Case(
        _QWEN3_NEXT_80B, EngineSettings(), 1152, 1 + 3, 12 * 1152 * _NEXT + 36 * _GDN,
        {11_520: 12 * 11_520 * _NEXT + 36 * _GDN},
    ),
}  # fmt: skip
QUICK = ("deepseek-v2-lite, 2 ranks",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_a_published_model_by_hand(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    ranks = case.settings.tensor_parallel_size
    form = form_of_model(describe_model(tmp_path, case.settings), rank_count=ranks, chunk_min_bytes=MIB)
    assert form.chunk_tokens == case.chunk_tokens
    assert model_form.shards_of_chunk(form) == case.shards
    assert model_form.payload_bytes_of_chunk(form) == case.stored_bytes_of_chunk
    assert {tokens: model_form.loaded_bytes(form, tokens) for tokens in case.loaded} == case.loaded
