"""Configurations of tiny models, one for each way of keeping KV that the engine has on a CPU; no weights.

Every one is 256 wide with few layers, so that it builds in a moment; what decides over its KV (windows, layer types,
states) is there as in the models of its family. ``python -m tests.e2e.support.hybrid_models FOLDER`` writes them all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Config = dict[str, Any]

WINDOW, ATTENTION_CHUNK = 512, 512
KV_HEADS, HEAD_DIM = 2, 64

_COMMON: Config = {
    "vocab_size": 8192,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_size": 256,
}
_NORM: Config = {"rms_norm_eps": 1e-5}
_HEADS: Config = {
    "num_attention_heads": 4, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": 512,
}  # fmt: skip
_GATED: Config = {"hidden_act": "silu"}


def _model(architecture: str, model_type: str, *parts: Mapping[str, Any], layers: int, **own: Any) -> Config:
    config: Config = {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": layers, **_COMMON}
    for part in parts:
        config |= part
    return config | own


def _attention() -> dict[str, Config]:
    windowed = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    llama = (_NORM, _HEADS, _GATED)
    return {
        "llama": _model("LlamaForCausalLM", "llama", *llama, layers=4, rope_theta=5e5),
        "mistral_window": _model(
            "MistralForCausalLM", "mistral", *llama, layers=4, rope_theta=5e5, sliding_window=WINDOW
        ),
        "gemma3_window": _model(
            "Gemma3ForCausalLM", "gemma3_text", _NORM, _HEADS, layers=6, layer_types=windowed, sliding_window=WINDOW,
            hidden_activation="gelu_pytorch_tanh", rope_theta=1e6, rope_local_base_freq=1e4, query_pre_attn_scalar=64,
        ),
        "gpt_oss_window": _model(
            "GptOssForCausalLM", "gpt_oss", *llama, layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=128, num_local_experts=4, num_experts_per_tok=2, intermediate_size=256, rope_theta=15e4,
        ),
        "llama4_chunked": _model(
            "Llama4ForCausalLM", "llama4_text", *llama, layers=4, attention_chunk_size=ATTENTION_CHUNK,
            layer_types=["chunked_attention"] * 3 + ["full_attention"], no_rope_layers=[1, 1, 1, 0],
            no_rope_layer_interval=4, intermediate_size=256, intermediate_size_mlp=512, num_local_experts=2,
            num_experts_per_tok=1, interleave_moe_layer_step=1, moe_layers=[0, 1, 2, 3], use_qk_norm=False,
            attn_temperature_tuning=False, floor_scale=8192, attn_scale=0.1, rope_theta=5e5, attention_bias=False,
            for_llm_compressor=False,
        ),
    }  # fmt: skip


def _latent() -> dict[str, Config]:
    shared: Config = {
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "moe_intermediate_size": 128,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 1e4,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    parts = (_NORM, _GATED, shared)
    return {
        "deepseek_v2_mla": _model(
            "DeepseekV2ForCausalLM", "deepseek_v2", *parts, layers=3, q_lora_rank=None, topk_method="greedy",
            scoring_func="softmax", norm_topk_prob=False,
        ),
        "deepseek_v3_mla": _model(
            "DeepseekV3ForCausalLM", "deepseek_v3", *parts, layers=3, q_lora_rank=128, topk_method="noaux_tc",
            scoring_func="sigmoid", norm_topk_prob=True,
        ),
    }  # fmt: skip


def _recurrent() -> dict[str, Config]:
    mamba2: Config = {
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_proj_bias": False,
    }  # fmt: skip
    granite_layers = ["mamba", "mamba", "attention", "mamba"]
    return {
        "qwen3_next_gdn": _model(
            "Qwen3NextForCausalLM", "qwen3_next", _NORM, _HEADS, _GATED, layers=4, full_attention_interval=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
            partial_rotary_factor=0.25, attention_bias=False, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=128, shared_expert_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[],
            norm_topk_prob=True, rope_theta=1e7,
        ),
        "lfm2_short_conv": _model(
            "Lfm2ForCausalLM", "lfm2", _HEADS, layers=4, layer_types=["conv", "conv", "full_attention", "conv"],
            conv_L_cache=3, conv_bias=False, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False, block_dim=256, conv_dim=256, block_ff_dim=512, norm_eps=1e-5,
            rope_theta=1e6,
        ),
        "nemotron_h_mamba2": _model(
            "NemotronHForCausalLM", "nemotron_h", _HEADS, layers=4, hybrid_override_pattern="M-M*",
            layers_block_type=["mamba", "mlp", "mamba", "attention"], attention_head_dim=64, mamba_num_heads=8,
            mamba_head_dim=64, n_groups=1, ssm_state_size=64, conv_kernel=4, chunk_size=128, expand=2,
            mamba_hidden_act="silu", mlp_hidden_act="relu2", use_conv_bias=True, use_bias=False, mamba_proj_bias=False,
            attention_bias=False, mlp_bias=False, layer_norm_epsilon=1e-5,
        ),
        "falcon_h1_mamba2": _model(
            "FalconH1ForCausalLM", "falcon_h1", _NORM, _HEADS, _GATED, mamba2, layers=3, mamba_d_ssm=512,
            mamba_rms_norm=False, rope_theta=1e6,
        ),
        "granite4_mamba2": _model(
            "GraniteMoeHybridForCausalLM", "granitemoehybrid", _NORM, _HEADS, _GATED, mamba2, layers=4,
            layer_types=granite_layers, layers_block_type=granite_layers, intermediate_size=256,
            shared_intermediate_size=512, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="nope",
            attention_multiplier=0.125, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0,
            attention_bias=False, rope_theta=1e4,
        ),
        "mamba2_pure": _model(
            "Mamba2ForCausalLM", "mamba2", _GATED, layers=3, num_heads=8, head_dim=64, state_size=64, n_groups=1,
            conv_kernel=4, expand=2, chunk_size=128, use_conv_bias=True, use_bias=False, layer_norm_epsilon=1e-5,
        ),
    }  # fmt: skip


MODELS: Mapping[str, Config] = {**_attention(), **_latent(), **_recurrent()}


def write_model(name: str, folder: Path) -> Path:
    """Writes ``config.json`` of the model ``name`` into a folder of its own below ``folder``; returns that."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    return path


if __name__ == "__main__":
    for model in MODELS:
        write_model(model, Path(sys.argv[1]))
