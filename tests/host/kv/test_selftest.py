from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.kv.layout import backing_memory, derive_layouts
from meshfusion.host.kv.selftest import CopyMover, choose_blocks, run_selftest
from meshfusion.jbof.errors import UnsupportedError

Factory = Callable[..., Any]


def parts(engine: Any) -> tuple[Any, Any]:
    return derive_layouts(engine.config, engine.caches)[0], backing_memory(engine.caches)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "LBHNC"},
        {"layout": "BLHNC"},
        {"layout": "LBNHC"},
        {"layout": "BLHNC", "padded": True},
        {"block_size": 128, "kernel_block_size": 32},
        {"dtype": torch.float8_e4m3fn},
        {"dtype": torch.float32},
        {"blocks": 1},
        {"blocks": 2},
        {"blocks": 3},
    ],
    ids=str,
)
def test_right_layouts_pass_and_memory_is_as_before(engine_factory: Factory, options: dict[str, Any]) -> None:
    engine = engine_factory(**options)
    layout, memory = parts(engine)
    before = memory.clone()
    report = run_selftest(engine.caches, layout, memory)
    assert report.blocks
    assert torch.equal(memory, before)


def shifted(layout: Any, amount: int) -> Any:
    return replace(layout, run_starts=layout.run_starts + amount)


def wrong_layouts(layout: Any) -> dict[str, Any]:
    page = layout.page_bytes[0]
    swapped = layout.run_starts.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    overlapped = layout.run_starts.copy()
    overlapped[1] = overlapped[0] + page // 2
    same = layout.run_starts.copy()
    same[2] = same[1]
    stride = layout.run_strides.copy()
    stride[1] -= 64
    return {
        "one block late": replace(shifted(layout, page), block_count=layout.block_count - 1),
        "few bytes late": replace(shifted(layout, 64), block_count=layout.block_count - 1),
        "swapped layers": replace(layout, run_starts=swapped),
        "overlapped runs": replace(layout, run_starts=overlapped),
        "one layer twice": replace(layout, run_starts=same),
        "wrong stride": replace(layout, run_strides=stride),
        "outside": shifted(layout, layout.memory_bytes),
        "negative": shifted(layout, -page),
        "swapped names": replace(layout, layer_names=layout.layer_names[::-1]),
        "unknown layer": replace(layout, layer_names=("x", *layout.layer_names[1:])),
        "short runs": replace(layout, run_bytes=layout.run_bytes - 64),
        "short pages": replace(layout, page_bytes=(page - 64, *layout.page_bytes[1:])),
    }


@pytest.mark.parametrize(
    "mistake",
    [
        "one block late",
        "few bytes late",
        "swapped layers",
        "overlapped runs",
        "one layer twice",
        "wrong stride",
        "outside",
        "negative",
        "swapped names",
        "unknown layer",
        "short runs",
        "short pages",
    ],
)
def test_wrong_layouts_are_refused_and_memory_is_as_before(engine_factory: Factory, mistake: str) -> None:
    engine = engine_factory(blocks=12)
    layout, memory = parts(engine)
    wrong = wrong_layouts(layout)[mistake]
    before = memory.clone()
    with pytest.raises(UnsupportedError, match="self-test failed: group 0"):
        run_selftest(
            {name: view[: wrong.block_count] for name, view in engine.caches.items()},
            wrong,
            memory,
        )
    assert torch.equal(memory, before)


def test_refusal_names_layer_and_block(engine_factory: Factory) -> None:
    engine = engine_factory()
    layout, memory = parts(engine)
    starts = layout.run_starts.copy()
    starts[2] -= layout.run_bytes
    with pytest.raises(
        UnsupportedError,
        match=r"layer 'model\.layers\.2\.self_attn\.attn', block 1: .*byte 0 of",
    ):
        run_selftest(engine.caches, replace(layout, run_starts=starts), memory)


def test_padding_taken_for_content_is_refused(engine_factory: Factory) -> None:
    engine = engine_factory("BLHNC", padded=True)
    layout, memory = parts(engine)
    one_run = replace(
        layout,
        run_bytes=layout.unit_bytes,
        run_starts=layout.run_starts[:1],
        run_strides=layout.run_strides[:1],
    )
    with pytest.raises(UnsupportedError, match=r"layer 'model\.layers\.1"):
        run_selftest(engine.caches, one_run, memory)


class SpillingMover(CopyMover):
    """Writes a little more than a run."""

    def scatter(self, offsets: Any, run_bytes: int, unit: Any) -> None:
        super().scatter(offsets, run_bytes, unit)
        for offset in offsets.tolist():
            self.memory[offset + run_bytes : offset + run_bytes + 8] ^= 0xFF


class ForgetfulMover(CopyMover):
    """Drops the last run."""

    def scatter(self, offsets: Any, run_bytes: int, unit: Any) -> None:
        super().scatter(offsets[:-1], run_bytes, unit)


class StaleMover(CopyMover):
    """Answers every read with the first unit it saw."""

    first: Any = None

    def gather(self, offsets: Any, run_bytes: int, unit: Any) -> None:
        if self.first is None:
            super().gather(offsets, run_bytes, unit)
            self.first = unit.copy()
        unit[:] = self.first


@pytest.mark.parametrize(
    "mover",
    [SpillingMover, ForgetfulMover, StaleMover],
)
def test_a_wrong_data_path_is_refused(engine_factory: Factory, mover: type[CopyMover]) -> None:
    engine = engine_factory()
    layout, memory = parts(engine)
    with pytest.raises(UnsupportedError, match="self-test failed"):
        run_selftest(engine.caches, layout, memory, mover(memory))


@given(count=st.integers(2, 5000), seed=st.integers(0, 99), extra=st.integers(0, 6))
def test_chosen_blocks_exist_and_never_include_the_null_block(count: int, seed: int, extra: int) -> None:
    blocks, guards = choose_blocks(count, seed=seed, random_blocks=extra)
    assert {1, count - 1} <= set(blocks)
    assert 0 in guards
    assert 0 not in blocks
    assert not set(blocks) & set(guards)
    assert all(0 <= block < count for block in (*blocks, *guards))
    assert count < 5 or any(block + 1 in blocks for block in blocks)
