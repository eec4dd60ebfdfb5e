"""What vLLM could do about its KV layout, and what we ask it for.

vLLM asks the connector's class when the model is loaded, and drops an answer that its kernels do not take (0.30 to
0.32, v1/attention/backends/utils.py, ``resolve_kv_cache_layout``). ``VLLM_KV_CACHE_LAYOUT``, if set, goes before it.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from meshfusion.host.kv.layout_wish import EngineLayouts, layout_wish

logger = logging.getLogger("meshfusion.worker")


def asked_layout(vllm_config: Any) -> str | None:
    """The layout to ask for; None: the engine's own. Never raises: what cannot be read is not asked for."""
    try:
        wish = layout_wish(read_layouts(vllm_config))
    except Exception as error:  # of the engine's own, which differs from version to version
        logger.warning("the KV layout is left to the engine: what it could do cannot be read (%r)", error)
        return None
    if wish.layout is None:
        logger.info("the KV layout is left to the engine: %s", wish.why)
    else:
        logger.info("asking the engine for KV layout %s: %s", wish.layout, wish.why)
    return wish.layout


def read_layouts(vllm_config: Any) -> EngineLayouts:
    """From the model's layers, where they are in this process: with workers of their own they are not."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.kv_cache_interface import AttentionSpec

    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if not layers:
        return EngineLayouts((), frozenset(), splits_blocks=False)
    backends = {layer.get_attn_backend().full_cls_name(): layer.get_attn_backend() for layer in layers.values()}
    specs = [(layer.get_attn_backend(), layer.get_kv_cache_spec(vllm_config)) for layer in layers.values()]
    return EngineLayouts(
        tuple(layout.name for layout in get_supported_kv_cache_layouts(list(backends.values()))),
        frozenset(int(spec.page_size_bytes) for _, spec in specs if spec is not None),
        splits_blocks=any(_splits(backend, spec) for backend, spec in specs if isinstance(spec, AttentionSpec)),
    )


def _splits(backend: Any, spec: Any) -> bool:
    """Does this backend's kernel take smaller blocks than those of ``spec``?"""
    from vllm.v1.worker.utils import select_common_block_size

    arguments = (spec.block_size, [backend], [spec])
    taken = len(inspect.signature(select_common_block_size).parameters)  # 0.30 and 0.31 do without specs
    return bool(select_common_block_size(*arguments[:taken]) != spec.block_size)
