"""What layout is asked for: one that the engine grants and starts with, and that leaves pages as they are."""

from __future__ import annotations

import pytest

from meshfusion.host.kv.layout_wish import EngineLayouts, layout_wish

ALL = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")


def engine(*candidates: str, pages: frozenset[int] = frozenset({4096}), splits: bool = False) -> EngineLayouts:
    return EngineLayouts(candidates, pages, splits_blocks=splits)


@pytest.mark.parametrize(
    ("candidates", "asked"),
    [
        (ALL, "BLNHC"),  # kernels that take everything, in the engine's order
        (("LBHNC", "BLHNC"), "BLHNC"),
        (("BLHNC", "LBHNC"), None),  # as it is
        (("LBHNC",), None),  # CPU attention of vLLM 0.30 to 0.32
        (("LBNHC", "BLHNC"), None),  # heads and tokens would change places
        (("LHBNC", "LBHNC", "BLHNC"), None),  # so would blocks and heads
        ((), None),
    ],
)
def test_blocks_outermost_with_the_same_pages(candidates: tuple[str, ...], asked: str | None) -> None:
    wish = layout_wish(engine(*candidates))
    assert wish.layout == asked
    assert wish.why


def test_not_where_the_engine_would_not_start() -> None:
    wish = layout_wish(engine(*ALL, splits=True))
    assert wish.layout is None
    assert "smaller blocks" in wish.why


def test_not_where_the_engine_would_group_layers_otherwise() -> None:
    wish = layout_wish(engine(*ALL, pages=frozenset({4096, 8192})))
    assert wish.layout is None
    assert "several sizes" in wish.why


def test_every_wish_only_changes_the_places_of_layers_and_blocks() -> None:
    """By the engine's own words for its layouts."""
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout
    asked = 0
    for own in layouts:
        wish = layout_wish(engine(own.name, *layouts.__members__)).layout
        if wish is not None:
            asked += 1
            assert layouts[wish].is_block_outermost
            assert layouts[wish].is_block_compact
            assert layouts[wish].layer_view_order == own.layer_view_order
    assert asked == 2
