from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.kv.layout import backing_memory, derive_layouts
from meshfusion.jbof.errors import UnsupportedError
from tests.host.kv.conftest import HYBRID_BLOCKS as BLOCKS
from tests.host.kv.conftest import STATE_BYTES, hybrid_engine

PAGE = 2 * 32 * 32 * 2  # heads x tokens x (K and V) x bytes of bfloat16
Factory = Callable[..., Any]


def derive_layout(config: Any, caches: dict[str, torch.Tensor]) -> GroupLayout:
    """Of the only group."""
    (layout,) = derive_layouts(config, caches)
    return layout


def canonical_unit(caches: dict[str, torch.Tensor], block: int, ratio: int = 1) -> bytes:
    """A block of a head-major engine as bytes, from the tensors alone."""
    return b"".join(
        view[block * ratio : (block + 1) * ratio].contiguous().view(torch.int16).numpy().tobytes()
        for view in caches.values()
    )


def unit_through_runs(layout: Any, memory: torch.Tensor, block: int) -> bytes:
    return b"".join(memory[at : at + layout.run_bytes].numpy().tobytes() for at in layout.run_offsets(block).tolist())


@pytest.mark.parametrize(("name", "runs"), [("LBHNC", 3), ("BLHNC", 1)])
def test_runs_show_the_blocks_of_the_tensors(engine_factory: Factory, name: str, runs: int) -> None:
    engine = engine_factory(name)
    layout, memory = (
        derive_layout(engine.config, engine.caches),
        backing_memory(engine.caches),
    )
    assert (layout.block_count, layout.block_tokens, layout.unit_bytes) == (
        11,
        32,
        3 * PAGE,
    )
    assert (layout.run_count, layout.run_bytes) == (runs, 3 * PAGE // runs)
    assert layout.layer_names == tuple(engine.caches)
    for block in range(11):
        assert unit_through_runs(layout, memory, block) == canonical_unit(engine.caches, block)


def test_layer_and_block_outermost_units_are_interchangeable(
    engine_factory: Factory,
) -> None:
    """The canonical order on the medium is the same, so one can load what the other saved."""
    outer, inner = engine_factory("LBHNC"), engine_factory("BLHNC")
    for view, source in zip(inner.caches.values(), outer.caches.values(), strict=True):
        view.copy_(source)
    units = [unit_through_runs(derive_layout(e.config, e.caches), backing_memory(e.caches), 4) for e in (outer, inner)]
    assert units[0] == units[1]


def test_offsets_of_many_blocks(engine_factory: Factory) -> None:
    engine = engine_factory()
    layout = derive_layout(engine.config, engine.caches)
    assert layout.run_offsets(2).tolist() == [
        2 * PAGE,
        2 * PAGE + 11 * PAGE,
        2 * PAGE + 22 * PAGE,
    ]
    many = layout.run_offsets_of([7, 0, 2])
    assert many.dtype == np.int64
    assert many.shape == (3, 3)
    for row, block in enumerate([7, 0, 2]):
        assert many[row].tolist() == layout.run_offsets(block).tolist()


@pytest.mark.parametrize("block", [-1, 11])
def test_block_out_of_range_is_our_mistake(engine_factory: Factory, block: int) -> None:
    engine = engine_factory()
    layout = derive_layout(engine.config, engine.caches)
    with pytest.raises(AssertionError):
        layout.run_offsets(block)
    with pytest.raises(AssertionError):
        layout.run_offsets_of([0, block])


@pytest.mark.parametrize("name", ["LBHNC", "BLHNC"])
def test_padding_is_not_part_of_the_unit(engine_factory: Factory, name: str) -> None:
    engine = engine_factory(name, padded=True)
    layout = derive_layout(engine.config, engine.caches)
    assert (layout.unit_bytes, layout.run_count, layout.run_bytes) == (
        3 * PAGE,
        3,
        PAGE,
    )
    assert unit_through_runs(layout, backing_memory(engine.caches), 6) == canonical_unit(engine.caches, 6)


def test_kernel_blocks_inside_a_block(engine_factory: Factory) -> None:
    engine = engine_factory(block_size=128, kernel_block_size=32)
    layout = derive_layout(engine.config, engine.caches)
    assert (layout.block_count, layout.block_tokens, layout.run_bytes) == (
        11,
        128,
        4 * PAGE,
    )
    assert unit_through_runs(layout, backing_memory(engine.caches), 9) == canonical_unit(engine.caches, 9, ratio=4)


def test_token_major_interior_is_one_run(engine_factory: Factory) -> None:
    engine = engine_factory("LBNHC")
    layout, memory = (
        derive_layout(engine.config, engine.caches),
        backing_memory(engine.caches),
    )
    expected = b"".join(
        view[3].permute(1, 0, 2).contiguous().view(torch.int16).numpy().tobytes() for view in engine.caches.values()
    )
    assert unit_through_runs(layout, memory, 3) == expected


def test_layers_of_different_size_get_runs_of_one_length(
    engine_factory: Factory,
) -> None:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        UniformTypeKVCacheSpecs,
    )

    small = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    large = replace(small, num_kv_heads=3)
    blocks, sizes = 5, (2 * PAGE // 2, 3 * PAGE // 2)
    spec = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": small, "b": large})
    total = blocks * sum(sizes)
    raw = torch.randint(-128, 128, (total,), dtype=torch.int8)
    caches = {
        "a": torch.as_strided(raw, (blocks, 2, 32, 64), (sizes[0], 2048, 64, 1)).view(torch.bfloat16),
        "b": torch.as_strided(raw, (blocks, 3, 32, 64), (sizes[1], 2048, 64, 1), blocks * sizes[0]).view(
            torch.bfloat16
        ),
    }
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=total, layers=["a"], layer_stride=1, block_stride=sizes[0]),
            KVCacheTensor(
                size=total,
                layers=["b"],
                layer_stride=1,
                block_stride=sizes[1],
                offset=blocks * sizes[0],
            ),
        ],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["a", "b"], kv_cache_spec=spec)],
    )
    layout = derive_layout(config, caches)
    assert layout.page_bytes == sizes
    assert layout.run_count * layout.run_bytes == layout.unit_bytes == sum(sizes)
    assert unit_through_runs(layout, backing_memory(caches), 3) == canonical_unit(caches, 3)


@pytest.mark.parametrize("name", ["LHBNC", "BHLNC"])
def test_page_in_pieces_is_refused(engine_factory: Factory, name: str) -> None:
    from vllm.v1.kv_cache_interface import compute_layout_strides
    from vllm.v1.kv_cache_layout import KVCacheLayout

    engine = engine_factory()
    spec = engine.config.kv_cache_groups[0].kv_cache_spec
    strides = compute_layout_strides(spec, 11, 3, KVCacheLayout[name])
    view5 = torch.as_strided(engine.raw, (3, 11, 2, 32, 64), strides)
    caches = {layer: view5[index].view(torch.bfloat16) for index, layer in enumerate(engine.caches)}
    tensor = engine.config.kv_cache_tensors[0]
    tensor.layer_stride, tensor.block_stride = strides[0], strides[1]
    with pytest.raises(UnsupportedError, match="not one contiguous run"):
        derive_layout(engine.config, caches)


@pytest.mark.parametrize("field", ["offset", "layer_stride", "block_stride"])
def test_configuration_and_tensors_must_agree(engine_factory: Factory, field: str) -> None:
    engine = engine_factory()
    tensor = engine.config.kv_cache_tensors[0]
    setattr(tensor, field, getattr(tensor, field) + 64)
    with pytest.raises(UnsupportedError, match="the configuration says"):
        derive_layout(engine.config, engine.caches)


def test_overlapping_pages_are_refused(engine_factory: Factory) -> None:
    engine = engine_factory()
    names = list(engine.caches)
    tensor = engine.config.kv_cache_tensors[0]
    tensor.layer_stride = PAGE
    for index, name in enumerate(names):
        engine.caches[name] = torch.as_strided(engine.raw, (11, 2, 32, 64), (PAGE, 2048, 64, 1), index * PAGE).view(
            torch.bfloat16
        )
    with pytest.raises(UnsupportedError, match=r"pages overlap: layer 'model\.layers\.0"):
        derive_layout(engine.config, engine.caches)


def test_other_refusals_name_the_layer(engine_factory: Factory) -> None:
    engine = engine_factory()
    first = next(iter(engine.caches))
    with pytest.raises(UnsupportedError, match="registered no tensor"):
        derive_layout(
            engine.config,
            {name: view for name, view in engine.caches.items() if name != first},
        )
    with pytest.raises(UnsupportedError, match="outside all KV groups"):
        derive_layout(engine.config, {**engine.caches, "shared": engine.caches[first]})
    with pytest.raises(UnsupportedError, match="2 backing allocations"):
        derive_layout(engine.config, {**engine.caches, first: engine.caches[first].clone()})
    with pytest.raises(UnsupportedError, match="its spec says"):
        derive_layout(engine.config, {**engine.caches, first: engine.caches[first][:, :1]})
    with pytest.raises(UnsupportedError, match="do not divide"):
        derive_layout(engine.config, {**engine.caches, first: engine.caches[first][:10]})


def test_the_memory_is_the_engine_s_own_and_of_a_device_that_is_served(engine_factory: Factory) -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        backing_memory({"a": torch.empty(4, device="meta")})
    engine = engine_factory()
    memory = backing_memory(engine.caches)
    assert (memory.dtype, memory.shape, memory.device) == (torch.uint8, engine.raw.shape, engine.raw.device)
    memory[7] = 99
    assert engine.raw[7].item() == 99


def test_groups_overlay_each_other(engine_factory: Factory) -> None:
    """Attention, a window and states in one allocation; pages are padded to the largest, and only real bytes count."""
    engine = hybrid_engine()
    layouts = derive_layouts(engine.config, engine.caches)
    assert [layout.group for layout in layouts] == [0, 1, 2]
    assert [layout.block_tokens for layout in layouts] == [32, 64, 128]
    assert [layout.layer_names for layout in layouts] == [("a0", "a1"), ("w0", "w1"), ("s0", "s1")]
    assert [layout.unit_bytes for layout in layouts] == [2 * PAGE, 2 * 2 * PAGE, 2 * STATE_BYTES]
    memory = backing_memory(engine.caches)
    for layout in layouts:
        for block in range(BLOCKS):
            expected = b"".join(
                engine.caches[name][block].contiguous().view(torch.uint8).numpy().tobytes()
                for name in layout.layer_names
            )
            assert unit_through_runs(layout, memory, block) == expected


def test_a_layer_in_two_groups_is_refused(engine_factory: Factory) -> None:
    engine = hybrid_engine()
    engine.config.kv_cache_groups[1].layer_names = ["a0", "w1"]
    with pytest.raises(UnsupportedError, match=r"layers in several KV groups: \['a0'\]"):
        derive_layouts(engine.config, engine.caches)


def test_an_engine_without_groups_is_refused(engine_factory: Factory) -> None:
    engine = hybrid_engine()
    engine.config.kv_cache_groups.clear()
    with pytest.raises(UnsupportedError, match="has no layers"):
        derive_layouts(engine.config, engine.caches)
