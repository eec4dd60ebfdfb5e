"""Configurations of the tiny models in :mod:`tests.e2e.hybrid_models`, as the model classes of transformers take them.

Small enough for two processors, yet of several groups and blocks: windows and chunks of 128 tokens lie well inside a
prompt, and a recurrent state is not much larger than a block of attention, because the engine makes its blocks as long
as it takes for a state to fit into one.
"""

from __future__ import annotations

from typing import Any

from tests.e2e.models import HEAD_DIM, KV_HEADS, VOCABULARY

WINDOW_TOKENS = 128
HIDDEN, HEADS = 256, 4
STATE_HEADS, STATE_HEAD_DIM, STATE_SIZE = 8, 64, 32
"""Of the Mamba2 layers: a state is STATE_HEADS x STATE_HEAD_DIM x STATE_SIZE numbers."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_size": HIDDEN,
}
_ATTENTION: dict[str, Any] = {
    **_COMMON,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
_MLA: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    # The engine's CPU kernels know this shape only: 512 + 64 numbers a token.
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,  # no experts at all: which are chosen can hang on a rounding
    "n_group": 1,
    "topk_group": 1,
}
_SLIDING_HYBRID = ["sliding_attention", "sliding_attention", "full_attention"] * 2

LLAMA: dict[str, Any] = {**_ATTENTION, "intermediate_size": 512, "num_hidden_layers": 4}

MISTRAL: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW_TOKENS,
}

GEMMA3: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": _SLIDING_HYBRID,
    "query_pre_attn_scalar": HEAD_DIM,
}

GEMMA4: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": _SLIDING_HYBRID,
    "num_global_key_value_heads": 1,
    "global_head_dim": 2 * HEAD_DIM,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
}

GPT_OSS: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

LLAMA4: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 256,
    "intermediate_size_mlp": 512,
    "num_hidden_layers": 4,
    "attention_chunk_size": WINDOW_TOKENS,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "moe_layers": [0, 1, 2, 3],
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "for_llm_compressor": False,
}

DEEPSEEK_V2: dict[str, Any] = {
    **_MLA,
    "q_lora_rank": None,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}

DEEPSEEK_V3: dict[str, Any] = {
    **_MLA,
    "q_lora_rank": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}

QWEN3_NEXT: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

NEMOTRON_H: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 512,
    "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
    "mamba_num_heads": STATE_HEADS,
    "mamba_head_dim": STATE_HEAD_DIM,
    "n_groups": 1,
    "ssm_state_size": STATE_SIZE,
    "conv_kernel": 4,
    "chunk_size": 32,
    "expand": 2,
    "layer_norm_epsilon": 1e-5,
}

FALCON_H1: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "mamba_d_ssm": STATE_HEADS * STATE_HEAD_DIM,
    "mamba_n_heads": STATE_HEADS,
    "mamba_d_head": STATE_HEAD_DIM,
    "mamba_n_groups": 1,
    "mamba_d_state": STATE_SIZE,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,  # the engine knows no other way
}

GRANITE4: dict[str, Any] = {
    **_ATTENTION,
    "intermediate_size": 256,
    "shared_intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": STATE_HEADS,
    "mamba_d_head": STATE_HEAD_DIM,
    "mamba_n_groups": 1,
    "mamba_d_state": STATE_SIZE,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
    "attention_multiplier": HEAD_DIM**-0.5,
}

LFM2: dict[str, Any] = {
    **_ATTENTION,
    "tie_word_embeddings": True,  # the engine knows no other way
    "norm_eps": 1e-5,
    "intermediate_size": 512,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    # transformers takes them from the sizes above; the engine wants to be told.
    "conv_dim": HIDDEN,
    "block_dim": HIDDEN,
    "block_ff_dim": 512,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}

MAMBA2: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 3,
    "num_heads": STATE_HEADS,
    "head_dim": STATE_HEAD_DIM,
    "state_size": STATE_SIZE,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 32,
    "layer_norm_epsilon": 1e-5,
}
