"""Hand-made engine state out of real vLLM classes: one group of full attention in any layout, or several groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

PADDING = 512
HYBRID_BLOCKS = 9
STATE_BYTES = 3 * 16 * 4 + 5 * 8 * 2


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


def hybrid_engine() -> Engine:
    """Two layers each of full attention, a window and states: three groups over the same bytes, layer-outermost."""
    import torch

    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    page = 2 * 2 * 64 * 32 * 2  # of the window's layers, the largest; the others are padded to it
    shape = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    specs = {
        "a": interface.FullAttentionSpec(block_size=32, page_size_padded=page, **shape),
        "w": interface.SlidingWindowSpec(block_size=64, sliding_window=100, page_size_padded=page, **shape),
        "s": interface.MambaSpec(
            block_size=128,
            shapes=((3, 16), (5, 8)),
            dtypes=(torch.float32, torch.bfloat16),
            page_size_padded=page,
            mamba_cache_mode="align",
        ),
    }
    raw = torch.randint(-128, 128, (2 * HYBRID_BLOCKS * page,), dtype=torch.int8)
    tensors: list[Any] = []
    groups: list[Any] = []
    caches: dict[str, Any] = {}
    for stem, spec in specs.items():
        names = [f"{stem}0", f"{stem}1"]
        tensor = interface.KVCacheTensor(
            size=raw.numel(), layers=names, layer_stride=page * HYBRID_BLOCKS, block_stride=page
        )
        views = interface.create_kv_cache_views(raw, spec, HYBRID_BLOCKS, interface.KVCacheLayout["LBHNC"], tensor)
        tensors.append(tensor)
        groups.append(interface.KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec))
        caches.update(zip(names, views, strict=True))
    config = interface.KVCacheConfig(
        num_blocks=HYBRID_BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout="LBHNC"
    )
    return Engine(config, caches, raw)
