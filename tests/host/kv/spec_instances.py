"""Instances of the engine's spec classes with fields that hypothesis chooses: plain ones, of kinds that have a rule."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.host.kv.spec_classes import spec_classes

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)
BLOCK_TOKENS = st.sampled_from([1, 2, 4, 16])


def make_spec(name: str, **fields: Any) -> Any:
    """An instance of the class ``name``, small and plain but for ``fields``."""
    if name == "MambaSpec":
        plain: dict[str, Any] = {"shapes": ((3, 4), (2, 5)), "dtypes": (torch.bfloat16, torch.float32)}
        plain["mamba_cache_mode"] = "align"
    elif name.startswith("HiSparse"):
        plain = {"page_size": 4096}
    else:
        plain = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    needed: dict[str, dict[str, Any]] = {
        "SlidingWindowSpec": {"sliding_window": 40},
        "SlidingWindowMLASpec": {"sliding_window": 40},
        "KpoolTailSpec": {"sliding_window": 40},
        "ChunkedLocalAttentionSpec": {"attention_chunk_size": 64},
        "RSWASpec": {"rswa_window": 32},
        "SinkFullAttentionSpec": {"sink_len": 16},
        "HiSparseHotSpec": {"blocks_per_request": 2},
    }
    arguments = {"block_size": 16, **plain, **needed.get(name, {}), **fields}
    return spec_classes()[f"vllm.v1.kv_cache_interface.{name}"](**arguments)


@st.composite
def specs_with_rules(draw: st.DrawFn) -> Any:
    """Of every class that has a rule, served or not."""
    block = draw(BLOCK_TOKENS)
    name = draw(
        st.sampled_from(
            (
                "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec",
                "ChunkedLocalAttentionSpec", "MambaSpec",
            )
        )
    )  # fmt: skip
    fields: dict[str, Any] = {"block_size": block}
    if name.startswith("SlidingWindow"):
        # A window of one token needs no blocks, and there the engine's lookup finds less than it could.
        fields["sliding_window"] = draw(st.integers(2, 80))
    if name == "ChunkedLocalAttentionSpec":
        fields["attention_chunk_size"] = block * draw(st.integers(1, 8))
    return make_spec(name, **fields)
