"""One tiny model for every kind of KV, how an engine is started with it, and what the engine then makes of it.

The numbers are those of vLLM 0.32 on a CPU, without a connector; :mod:`tests.e2e.test_hybrid_engines` finds them again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.e2e import hybrid_configs as configs
from tests.e2e.engine_fixes import VARIABLE as ENGINE_FIXES
from tests.e2e.models import HEAD_DIM, KV_HEADS

RECIPE = 1  # raise it when what is made changes

PROMPT_TOKENS = 961
"""One more than a whole number of blocks of every model here (16, 32, 96 and 160 tokens): after a hit on all of them
the next token is computed right upon what was cached. A short convolution looks back two tokens only, and what a
window or a state lacks is soon forgotten; further from the boundary nobody would notice."""

FLOAT32_TOLERANCE = 2e-3
BFLOAT16_TOLERANCE = 4e-2
"""Neighbouring bfloat16 numbers between 4 and 8, as logits are here, are 1/32 apart."""

_CACHING: Mapping[str, Any] = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
_BFLOAT16: Mapping[str, Any] = {**_CACHING, "dtype": "bfloat16"}  # the engine's CPU kernels take nothing else
_MAMBA2_FIX = {ENGINE_FIXES: "mamba2"}


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """``page_bytes``: of a block of one layer, with the padding that ``content_bytes`` leaves out."""

    spec: str
    block_tokens: int
    page_bytes: int
    content_bytes: int
    layers: int


@dataclass(frozen=True, slots=True)
class HybridModel:
    """``options``: for ``vllm.LLM``, over those of :func:`tests.e2e.harness.engine_options`. ``environment``: for the
    engine's process. ``groups``: in the engine's order. ``boundaries``: where the engine offers recurrent states of a
    first prompt of PROMPT_TOKENS, computed in steps of 512 tokens. ``cached_tokens``: of the same prompt asked again,
    from the engine's own cache. ``tolerance``: the log-probabilities of a right answer differ by less. ``reason``: why
    it does not run on a CPU or, if it does, why its answers there prove nothing. ``families``: of real models.
    """

    name: str
    model_type: str
    families: str
    config: Mapping[str, Any]
    groups: tuple[ExpectedGroup, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: _CACHING)
    environment: Mapping[str, str] = field(default_factory=dict)
    boundaries: tuple[int, ...] = ()
    cached_tokens: int = 960
    tolerance: float = FLOAT32_TOLERANCE
    seed: int = 0
    runs_on_cpu: bool = True
    reason: str = ""


def _attention(spec: str, layers: int, *, block_tokens: int = 32, number_bytes: int = 4) -> ExpectedGroup:
    page_bytes = 2 * KV_HEADS * HEAD_DIM * number_bytes * block_tokens
    return ExpectedGroup(spec, block_tokens, page_bytes, page_bytes, layers)


def _mamba2(layers: int) -> ExpectedGroup:
    """float32: the state proper, and the last 3 inputs of the convolution over x, B and C."""
    inner = configs.STATE_HEADS * configs.STATE_HEAD_DIM
    content_bytes = 4 * (inner * configs.STATE_SIZE + 3 * (inner + 2 * configs.STATE_SIZE))
    return ExpectedGroup("MambaSpec", 96, _attention("", 1, block_tokens=96).page_bytes, content_bytes, layers)


_FULL, _SLIDING, _CHUNKED = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
_GDN = ExpectedGroup("MambaSpec", 160, 81920, 4 * 4 * 64 * 64 + 2 * 3 * 512, 1)  # state float32, convolution bfloat16
_SHORT_CONV = ExpectedGroup("MambaSpec", 32, 32768, 4 * 2 * configs.HIDDEN, 1)
_LATENT = ExpectedGroup("MLAAttentionSpec", 32, 36864, 2 * (512 + 64) * 32, 3)
_LATENT_REASON = (
    "the engine caches prefixes of it only on CPUs with AMX, and its answers there are not those of other "
    "implementations, nor the same after a hit of its own as without one: compare a hit with a hit"
)

_ALL = (
    HybridModel("llama", "llama", "Llama 3, Qwen3", configs.LLAMA, (_attention(_FULL, 4),)),
    HybridModel("mistral", "mistral", "Mistral 7B v0.1", configs.MISTRAL, (_attention(_SLIDING, 4),)),
    HybridModel(
        "gemma3",
        "gemma3_text",
        "Gemma 3",
        configs.GEMMA3,
        (_attention(_SLIDING, 2), _attention(_SLIDING, 2), _attention(_FULL, 2)),
    ),
    HybridModel(
        "gemma4",
        "gemma4_text",
        "Gemma 4",
        configs.GEMMA4,
        # Heads twice as long in the full layers, so that the others' blocks are made twice as long.
        (*[_attention(_SLIDING, 2, block_tokens=64)] * 2, ExpectedGroup(_FULL, 32, 65536, 65536, 2)),
    ),
    HybridModel("gpt-oss", "gpt_oss", "gpt-oss", configs.GPT_OSS, (_attention(_SLIDING, 2), _attention(_FULL, 2))),
    HybridModel(
        "llama4", "llama4_text", "Llama 4", configs.LLAMA4, (*[_attention(_CHUNKED, 1)] * 3, _attention(_FULL, 1))
    ),
    HybridModel(
        "deepseek-v2",
        "deepseek_v2",
        "DeepSeek V2",
        configs.DEEPSEEK_V2,
        (_LATENT,),
        options=_BFLOAT16,
        reason=_LATENT_REASON,
    ),
    HybridModel(
        "deepseek-v3",
        "deepseek_v3",
        "DeepSeek V3, Kimi K2",
        configs.DEEPSEEK_V3,
        (_LATENT,),
        options=_BFLOAT16,
        reason=_LATENT_REASON,
    ),
    HybridModel(
        "qwen3-next",
        "qwen3_next",
        "Qwen3-Next",
        configs.QWEN3_NEXT,
        (*[_GDN] * 3, _attention(_FULL, 1, block_tokens=160, number_bytes=2)),
        options=_BFLOAT16,
        boundaries=(480, 960),
        tolerance=BFLOAT16_TOLERANCE,
    ),
    HybridModel(
        "nemotron-h",
        "nemotron_h",
        "Nemotron-H",
        configs.NEMOTRON_H,
        (_mamba2(1), _mamba2(1), _attention(_FULL, 1, block_tokens=96)),
        environment=_MAMBA2_FIX,
        boundaries=(480, 960),
    ),
    HybridModel(
        "falcon-h1",
        "falcon_h1",
        "Falcon-H1",
        configs.FALCON_H1,
        (_attention(_FULL, 3, block_tokens=96), _mamba2(3)),
        environment=_MAMBA2_FIX,
        boundaries=(480, 960),
    ),
    HybridModel(
        "granite4",
        "granitemoehybrid",
        "Granite 4",
        configs.GRANITE4,
        (*[_mamba2(1)] * 3, _attention(_FULL, 1, block_tokens=96)),
        environment=_MAMBA2_FIX,
        boundaries=(480, 960),
    ),
    HybridModel(
        "lfm2",
        "lfm2",
        "LFM2",
        configs.LFM2,
        (*[_SHORT_CONV] * 3, _attention(_FULL, 1)),
        boundaries=(512, 960),
    ),
    HybridModel(
        "mamba2",
        "mamba2",
        "Mamba 2",
        configs.MAMBA2,
        # Without attention to be of one size with, so that blocks stay short and pages are not padded.
        (ExpectedGroup("MambaSpec", 32, _mamba2(3).content_bytes, _mamba2(3).content_bytes, 3),),
        environment=_MAMBA2_FIX,
        boundaries=(512, 960),
    ),
)
HYBRID_MODELS: Mapping[str, HybridModel] = MappingProxyType({model.name: model for model in _ALL})


def make_hybrid_models(cache: Path, names: Iterable[str] = HYBRID_MODELS) -> dict[str, Path]:
    """The models' folders by name, made where they are missing."""
    folder = cache / f"e2e-hybrid-models-{RECIPE}"
    folders = {name: folder / name for name in names}
    missing = [name for name, path in folders.items() if not path.is_dir()]
    if missing:
        # In a process of its own: torch and transformers stay out of the test process.
        command = [sys.executable, "-m", "tests.e2e.hybrid_weights", str(folder), *missing]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=300, capture_output=True)
    return folders
