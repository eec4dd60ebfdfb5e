"""An engine's KV memory without an engine: hand-made layouts over a numpy array, with gaps that must stay untouched."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.jbof.media.buffer import AlignedBuffer

U8 = npt.NDArray[np.uint8]
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class KvMemory:
    layout: GroupLayout
    memory: U8
    # Independent of the layout's arithmetic: memory offset of every byte of a block's unit, [block_count, unit_bytes].
    byte_places: npt.NDArray[np.int64]

    def unit(self, block_id: int) -> bytes:
        return bytes(self.memory[self.byte_places[block_id]])

    def fill(self, seed: int) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size, dtype=np.uint8)

    def untouched_except(self, before: U8, block_ids: list[int]) -> bool:
        """Is every byte outside these blocks, gaps included, what it was in ``before``?"""
        outside = np.ones(self.memory.size, dtype=bool)
        for block_id in block_ids:
            outside[self.byte_places[block_id]] = False
        return bool(np.array_equal(self.memory[outside], before[outside]))


def layer_outermost(
    *,
    blocks: int = 12,
    layers: int = 3,
    page_bytes: int = 1236,
    gap_bytes: int = 52,
    lead_bytes: int = 100,
    layer_gap_bytes: int = 64,
) -> KvMemory:
    """Each layer's pages lie together, ``gap_bytes`` of padding behind every page: one run per layer."""
    stride = page_bytes + gap_bytes
    starts = [lead_bytes + layer * (stride * blocks + layer_gap_bytes) for layer in range(layers)]
    return _build(blocks, layers, page_bytes, starts, stride, page_bytes)


def block_outermost(*, blocks: int = 12, layers: int = 3, page_bytes: int = 1236) -> KvMemory:
    """All layers of a block lie together: one run per block."""
    starts = [layer * page_bytes for layer in range(layers)]
    return _build(blocks, layers, page_bytes, starts, layers * page_bytes, layers * page_bytes)


def on_one_grid(
    shapes: Sequence[tuple[int, int]], *, blocks: int, is_block_outermost: bool = False
) -> tuple[KvMemory, ...]:
    """The same memory for several KV groups of (layers, page bytes), as engines do: a block's number means the same
    places in all of them, and belongs to one group at a time. Pages are padded to the largest."""
    stride = max(page_bytes for _, page_bytes in shapes) + 52
    layers_max = max(layers for layers, _ in shapes)
    layer_step, block_step = (stride, stride * layers_max) if is_block_outermost else (stride * blocks + 64, stride)
    groups = [
        _build(blocks, layers, page, [100 + layer * layer_step for layer in range(layers)], block_step, page)
        for layers, page in shapes
    ]
    memory = zeroed_pages(max(group.memory.size for group in groups))
    return tuple(
        KvMemory(replace(group.layout, group=i, memory_bytes=memory.size), memory, group.byte_places)
        for i, group in enumerate(groups)
    )


def of_blocks(group: KvMemory, block_tokens: int) -> KvMemory:
    """The same with another number of tokens in a block."""
    return KvMemory(replace(group.layout, block_tokens=block_tokens), group.memory, group.byte_places)


def _build(
    blocks: int, layers: int, page_bytes: int, layer_starts: list[int], block_stride: int, run_bytes: int
) -> KvMemory:
    unit_bytes = layers * page_bytes
    run_starts = layer_starts[: unit_bytes // run_bytes]
    memory_bytes = max(layer_starts) + block_stride * blocks + 4
    places = np.array(
        [
            [layer_starts[layer] + block * block_stride + i for layer in range(layers) for i in range(page_bytes)]
            for block in range(blocks)
        ],
        dtype=np.int64,
    )
    layout = GroupLayout(
        group=0,
        block_tokens=BLOCK_TOKENS,
        block_count=blocks,
        layer_names=tuple(f"layer.{i}" for i in range(layers)),
        page_bytes=(page_bytes,) * layers,
        unit_bytes=unit_bytes,
        run_bytes=run_bytes,
        run_starts=np.array(run_starts, dtype=np.int64),
        run_strides=np.full(len(run_starts), block_stride, dtype=np.int64),
        memory_bytes=memory_bytes,
    )
    return KvMemory(layout, zeroed_pages(memory_bytes), places)


def zeroed_pages(length_bytes: int) -> U8:
    """Memory that begins at a page; it lives as long as the array."""
    return AlignedBuffer(-(-length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE).array[:length_bytes]
