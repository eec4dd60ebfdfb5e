"""Tiny models made on the spot, with weights large enough that the answer depends on the KV that was loaded.

``python -m tests.e2e.models FOLDER`` makes one folder a model below FOLDER, which is then complete or absent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 8192
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
LLAMA: dict[str, Any] = {
    **_COMMON,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": LAYERS,
    "hidden_act": "silu",
    "rope_theta": 5e5,
    # Four times the usual: with 0.02 the logits hardly depend on attention, and wrong KV would go unnoticed.
    "initializer_range": 0.08,
}
SEEDS = {"llama": 0, "llama-other-weights": 1}
RECIPE = 1  # raise it when something here changes what is made


def make_models(cache: Path) -> dict[str, Path]:
    """The models by name: ``llama`` and ``llama-other-weights`` (same shape)."""
    folder = cache / f"e2e-models-{RECIPE}"
    if not folder.is_dir():
        # In a process of its own: torch and transformers stay out of the test process.
        command = [sys.executable, "-m", "tests.e2e.models", str(folder)]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=120, capture_output=True)
    return {name: folder / name for name in SEEDS}


def _make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    building = folder.with_name(f"{folder.name}.{os.getpid()}")
    for name, seed in SEEDS.items():
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).save_pretrained(building / name)
    try:
        building.rename(folder)
    except OSError:  # another run made them meanwhile
        shutil.rmtree(building)


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
