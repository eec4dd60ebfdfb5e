"""A tiny Llama with random weights, for measurements in which the model must cost as little as possible."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 8192
POSITIONS = 8192


def make_tiny_llama(folder: Path) -> Path:
    """Write the model folder; the same weights each time. KV is 512 bytes a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        initializer_range=0.08,  # so that logits depend on the KV
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
