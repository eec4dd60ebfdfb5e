"""What is asked of vLLM, as it resolves layouts itself, for layers and kernels made for it here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from meshfusion.host.connector.vllm import MeshFusionConnector
from meshfusion.host.connector.vllm.layout_request import asked_layout, read_layouts
from meshfusion.host.kv.layout_wish import EngineLayouts


class AnyLayout:
    """As of an attention backend what is asked here: kernels that take all layouts, and blocks of n times 16 tokens."""

    layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None
    kernel_blocks: ClassVar[Sequence[int | MultipleOf]] = (MultipleOf(16),)

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.__module__, cls.__qualname__

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return cls.layouts

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return list(cls.kernel_blocks)

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__


class HeadsFirst(AnyLayout):
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)


class LayersFirst(AnyLayout):
    layouts = (KVCacheLayout.LBHNC,)


class SmallBlocks(AnyLayout):
    kernel_blocks = (16,)


class Layer(AttentionLayerBase):
    def __init__(self, backend: type[AnyLayout], *, block_tokens: int = 32, heads: int = 2) -> None:
        self.backend = backend
        self.spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=16, dtype=torch.bfloat16)

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


def engine(*layers: Layer, **connector: Any) -> Any:
    """As much of a ``VllmConfig`` as is looked at."""
    transfer = KVTransferConfig(
        kv_connector="MeshFusionConnector",
        kv_connector_module_path="meshfusion.host.connector.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"pool": {"path": "/nowhere"}, **connector},
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        compilation_config=SimpleNamespace(static_forward_context={str(i): layer for i, layer in enumerate(layers)}),
        cache_config=SimpleNamespace(kv_cache_layout=None),
    )


def resolved(vllm_config: Any) -> str:
    """What vLLM makes of it: as its engine core calls it."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    supported = get_supported_kv_cache_layouts(list(dict.fromkeys(layer.backend for layer in layers)))
    names = [layout.name for layout in supported]
    return str(resolve_kv_cache_layout(vllm_config, [names], [layer.spec for layer in layers]).name)


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        ((Layer(AnyLayout), Layer(AnyLayout)), "BLNHC"),
        ((Layer(HeadsFirst), Layer(HeadsFirst)), "BLHNC"),
        ((Layer(HeadsFirst), Layer(AnyLayout)), "BLHNC"),
        ((Layer(LayersFirst), Layer(HeadsFirst)), "LBHNC"),
        ((Layer(SmallBlocks),), "LBNHC"),
        ((Layer(SmallBlocks, block_tokens=16),), "BLNHC"),
        ((Layer(AnyLayout, heads=2), Layer(AnyLayout, heads=4)), "LBNHC"),
    ],
)
def test_what_vllm_resolves_to_when_it_is_asked(
    layers: tuple[Layer, ...], layout: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    with caplog.at_level(logging.WARNING):
        assert resolved(engine(*layers)) == layout
    assert caplog.records == [], "what is asked for is granted"
    assert resolved(engine(*layers, kv_layout="engine"))[0] == "L"


def test_what_is_read() -> None:
    found = read_layouts(engine(Layer(HeadsFirst, heads=2), Layer(SmallBlocks, heads=4)))
    page_bytes = 32 * 2 * 16 * 2 * 2  # tokens, heads, head size, bfloat16, K and V
    assert found == EngineLayouts(("LBHNC", "BLHNC"), frozenset({page_bytes, 2 * page_bytes}), splits_blocks=True)


def test_without_layers_in_this_process_nothing_is_asked_for() -> None:
    assert asked_layout(engine()) is None


def test_what_cannot_be_read_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="meshfusion.worker"):
        assert asked_layout(SimpleNamespace()) is None
    assert "cannot be read" in caplog.text


def test_the_connector_s_class_is_asked() -> None:
    assert MeshFusionConnector.get_required_kvcache_layout(engine(Layer(AnyLayout))) == "BLNHC"
    assert MeshFusionConnector.get_required_kvcache_layout(engine(Layer(AnyLayout), kv_layout="engine")) is None
