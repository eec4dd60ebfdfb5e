"""Start-up proof that the layout is what the engine sees (rule 6).

Known bytes go in through the engine's own tensor views and must come out through the layout's runs, and
the other way round; blocks beside the tested ones must keep their bytes. The bytes expected are computed
from the views alone, never from the layout. All bytes touched are put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from meshfusion.host.kv.group_layout import I64, GroupLayout
from meshfusion.host.kv.layout import page_order
from meshfusion.jbof.errors import UnsupportedError

U8 = NDArray[np.uint8]


class RunMover(Protocol):
    """Moves one unit between the engine's memory, which it knows, and a buffer, by runs.

    ``offsets``: int64 ``[run_count]`` byte offsets into that memory; ``unit``: uint8
    ``[run_count * run_bytes]`` in canonical order. What moves bytes for loads and saves is proven here by
    moving through it. It waits for what the engine's views wrote before, and is done when it returns.
    """

    def gather(self, offsets: I64, run_bytes: int, unit: U8) -> None: ...

    def scatter(self, offsets: I64, run_bytes: int, unit: U8) -> None: ...


class CopyMover:
    """Plain copies by torch. ``memory``: uint8 ``[bytes]``, on any device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def gather(self, offsets: I64, run_bytes: int, unit: U8) -> None:
        for index, offset in enumerate(offsets.tolist()):
            run = self.memory[offset : offset + run_bytes]
            unit[index * run_bytes : (index + 1) * run_bytes] = run.cpu().numpy()

    def scatter(self, offsets: I64, run_bytes: int, unit: U8) -> None:
        for index, offset in enumerate(offsets.tolist()):
            run = torch.from_numpy(unit[index * run_bytes : (index + 1) * run_bytes].copy())
            self.memory[offset : offset + run_bytes].copy_(run)


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """What was proven: ``blocks`` tested both ways, ``guards`` seen to stay as they were."""

    group: int
    blocks: tuple[int, ...]
    guards: tuple[int, ...]
    bytes_moved: int


def run_selftest(
    kv_caches: Mapping[str, torch.Tensor],
    layout: GroupLayout,
    memory: torch.Tensor,
    move: RunMover | None = None,
    *,
    seed: int = 0,
    random_blocks: int = 3,
) -> SelftestReport:
    """Proves ``layout`` against the engine's views. Must run while no other code writes KV memory.

    ``memory``: uint8 ``[bytes]``, the whole allocation, where the views lie.

    Raises :class:`UnsupportedError` naming group, layer and block of the first difference.
    """
    plain = CopyMover(memory)
    test = _Selftest(kv_caches, layout, memory.numel(), move if move is not None else plain, seed)
    test.check_bounds()
    blocks, guards = choose_blocks(layout.block_count, seed=seed, random_blocks=random_blocks)
    touched = (*blocks, *guards)
    # Both views of the same bytes are saved before the first write: a wrong layout writes elsewhere.
    saved_units = {block: np.empty(layout.unit_bytes, dtype=np.uint8) for block in touched}
    for block in touched:
        plain.gather(layout.run_offsets(block), layout.run_bytes, saved_units[block])
    saved_views = {block: test.read_view(block) for block in touched}
    try:
        test.check_forward(blocks, guards)
        test.check_backward(blocks, guards)
    finally:
        for block in touched:
            plain.scatter(layout.run_offsets(block), layout.run_bytes, saved_units[block])
        for block in touched:
            test.write_view(block, saved_views[block])
    return SelftestReport(layout.group, blocks, guards, 3 * len(blocks) * layout.unit_bytes)


def choose_blocks(block_count: int, *, seed: int, random_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks to write (first usable, last, two neighbours, some random) and the untouched ones beside them.

    Block 0 is the engine's null block: it is written only when there is no other.
    """
    if block_count == 1:
        return (0,), ()
    middle = block_count // 2
    wanted = {1, block_count - 1, middle, min(middle + 1, block_count - 1)}
    wanted |= {int(block) for block in np.random.default_rng(seed).integers(1, block_count, random_blocks)}
    wanted.discard(0)
    beside = {0} | {block + step for block in wanted for step in (-1, 1)}
    return tuple(sorted(wanted)), tuple(sorted(block for block in beside - wanted if 0 <= block < block_count))


class _Selftest:
    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layout: GroupLayout,
        memory_bytes: int,
        move: RunMover,
        seed: int,
    ) -> None:
        self.layout, self.memory_bytes, self.move, self.seed = layout, memory_bytes, move, seed
        self.views: list[torch.Tensor] = []
        self.ratios: list[int] = []
        for name in layout.layer_names:
            if name not in kv_caches:
                raise self._refuse(name, None, "the engine registered no such layer")
            view = kv_caches[name]
            if view.shape[0] % layout.block_count != 0:
                raise self._refuse(
                    name,
                    None,
                    f"{view.shape[0]} kernel blocks for {layout.block_count} blocks",
                )
            # In memory order, a block of the view is its page byte by byte.
            self.views.append(view.permute(page_order(view)))
            self.ratios.append(view.shape[0] // layout.block_count)

    def check_bounds(self) -> None:
        layout = self.layout
        pages = [
            view[:ratio].numel() * view.element_size() for view, ratio in zip(self.views, self.ratios, strict=True)
        ]
        for name, page, real in zip(layout.layer_names, layout.page_bytes, pages, strict=True):
            if page != real:
                raise self._refuse(
                    name,
                    None,
                    f"the layout says {page} bytes per block, the view has {real}",
                )
        if not sum(pages) == layout.unit_bytes == layout.run_count * layout.run_bytes:
            raise self._refuse("", None, "runs do not add up to the unit")
        ends = np.concatenate([layout.run_offsets(0), layout.run_offsets(layout.block_count - 1)])
        if ends.min() < 0 or ends.max() + layout.run_bytes > self.memory_bytes:
            raise self._refuse(
                "",
                None,
                f"runs reach outside the allocation of {self.memory_bytes} bytes",
            )

    def check_forward(self, blocks: tuple[int, ...], guards: tuple[int, ...]) -> None:
        """Written through the views, read through the runs."""
        before = {guard: self.read_view(guard) for guard in guards}
        for block in blocks:
            self.write_view(block, self._pattern(0, block))
        for block in blocks:
            self._compare(
                block,
                self.read_view(block),
                self._pattern(0, block),
                "the engine's view lost bytes",
            )
        for block in (*blocks, *guards):
            unit = np.empty(self.layout.unit_bytes, dtype=np.uint8)
            self.move.gather(self.layout.run_offsets(block), self.layout.run_bytes, unit)
            self._compare(
                block,
                unit,
                self.read_view(block),
                "runs do not show what the engine's view holds",
            )
        self._compare_all(before, "a write through the engine's view reached another block")

    def check_backward(self, blocks: tuple[int, ...], guards: tuple[int, ...]) -> None:
        """Written through the runs, read through the views; in both directions, so that spill-over shows."""
        expected = {guard: self.read_view(guard) for guard in guards}
        for turn, ordered in ((1, blocks), (2, blocks[::-1])):
            for block in ordered:
                expected[block] = self._pattern(turn, block)
                self.move.scatter(
                    self.layout.run_offsets(block),
                    self.layout.run_bytes,
                    expected[block],
                )
                self._compare(
                    block,
                    self.read_view(block),
                    expected[block],
                    "the view does not show what runs wrote",
                )
            self._compare_all(expected, "a write through runs reached another block or layer")

    def read_view(self, block: int) -> U8:
        """The unit as the engine's views hold it, in canonical order. Does not use the layout's offsets."""
        parts = []
        for view, ratio in zip(self.views, self.ratios, strict=True):
            page = view[block * ratio : (block + 1) * ratio].contiguous()
            parts.append(page.reshape(-1).view(torch.uint8).cpu().numpy())
        return np.concatenate(parts)

    def write_view(self, block: int, unit: U8) -> None:
        position = 0
        for view, ratio in zip(self.views, self.ratios, strict=True):
            page = view[block * ratio : (block + 1) * ratio]
            length = page.numel() * page.element_size()
            source = torch.from_numpy(unit[position : position + length].copy()).view(view.dtype)
            page.copy_(source.reshape(page.shape))
            position += length

    def _pattern(self, turn: int, block: int) -> U8:
        """Bytes that differ by turn, block, layer and position."""
        stream = np.random.default_rng([self.seed, turn, block]).bytes(self.layout.unit_bytes)
        return np.frombuffer(stream, dtype=np.uint8).copy()

    def _compare_all(self, expected: Mapping[int, U8], what: str) -> None:
        for block, unit in expected.items():
            self._compare(block, self.read_view(block), unit, what)

    def _compare(self, block: int, got: U8, expected: U8, what: str) -> None:
        if np.array_equal(got, expected):
            return
        first = int(np.nonzero(got != expected)[0][0])
        bounds = np.cumsum(self.layout.page_bytes)
        layer = int(np.searchsorted(bounds, first, side="right"))
        in_page = first - (int(bounds[layer - 1]) if layer else 0)
        raise self._refuse(
            self.layout.layer_names[layer],
            block,
            f"{what} (first at byte {in_page} of the page)",
        )

    def _refuse(self, layer: str, block: int | None, what: str) -> UnsupportedError:
        place = f"group {self.layout.group}"
        place += f", layer {layer!r}" if layer else ""
        place += f", block {block}" if block is not None else ""
        return UnsupportedError(
            f"KV layout self-test failed: {place}: {what}",
            next_step="start the engine without this connector and report the engine version, model and KV layout",
        )
