"""Hand-made engine state out of real vLLM classes: one group of full attention, any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

PADDING = 512


@dataclass
class Engine:
    config: Any
    caches: dict[str, Any]
    raw: Any


def make_engine(
    layout: str = "LBHNC",
    *,
    layers: int = 3,
    blocks: int = 11,
    block_size: int = 32,
    kernel_block_size: int | None = None,
    padded: bool = False,
    dtype: Any = None,
    heads: int = 2,
    head_size: int = 16,
) -> Engine:
    """Allocates and views as the engine's own allocator does. Memory is filled with seeded bytes."""
    import torch

    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=dtype or torch.bfloat16,
    )
    page = spec.page_size_bytes
    if padded:
        page += PADDING
        spec = interface.FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=head_size,
            dtype=dtype or torch.bfloat16,
            page_size_padded=page,
        )
    names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
    block_outermost = layout.startswith("B")
    tensor = interface.KVCacheTensor(
        size=layers * blocks * page,
        layers=names,
        layer_stride=page if block_outermost else page * blocks,
        block_stride=page * layers if block_outermost else page,
    )
    config = interface.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[interface.KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
        kv_cache_layout=layout,
    )
    raw = torch.randint(
        -128,
        128,
        (tensor.size,),
        dtype=torch.int8,
        generator=torch.Generator().manual_seed(5),
    )
    views = interface.create_kv_cache_views(
        raw,
        spec,
        blocks,
        interface.KVCacheLayout[layout],
        tensor,
        kernel_block_size=kernel_block_size,
    )
    return Engine(config, dict(zip(names, views, strict=True)), raw)


@pytest.fixture
def engine_factory() -> Callable[..., Engine]:
    return make_engine
