"""Where the bytes of a KV group's blocks lie. Plain numbers: whoever moves them needs no engine and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """Placement of one KV group. All offsets are bytes into the backing allocation.

    A unit of ``unit_bytes`` real bytes (padding left out) is ``run_count`` runs of ``run_bytes`` each, in
    canonical order: run ``i`` of block ``b`` starts at ``run_starts[i] + b * run_strides[i]``.
    """

    group: int
    block_tokens: int
    block_count: int
    layer_names: tuple[str, ...]
    page_bytes: tuple[int, ...]  # real bytes of one block, per layer
    unit_bytes: int
    run_bytes: int
    run_starts: I64  # [run_count]
    run_strides: I64  # [run_count]
    memory_bytes: int  # of the backing allocation

    @property
    def run_count(self) -> int:
        return len(self.run_starts)

    def run_offsets(self, block_id: int) -> I64:
        """Byte offsets of the runs of one block, shape ``[run_count]``, in canonical order."""
        assert 0 <= block_id < self.block_count, f"block {block_id} of {self.block_count}"
        return self.run_starts + block_id * self.run_strides

    def run_offsets_of(self, block_ids: Sequence[int] | I64) -> I64:
        """The same for many blocks, shape ``[len(block_ids), run_count]``."""
        ids = np.asarray(block_ids, dtype=np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.block_count), "block id out of range"
        return self.run_starts[None, :] + ids[:, None] * self.run_strides[None, :]
