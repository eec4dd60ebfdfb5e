"""Which KV layout to ask the engine for: the one with the fewest runs a block, where asking costs nothing. Pure.

A layout's name gives its axes from the outermost in: layers, blocks, heads, tokens, content (vLLM 0.32,
v1/kv_cache_layout.py). With blocks outermost all layers of a block lie side by side, so that a block is one run; with
layers outermost it is one for each layer. What lies inside a page keeps its order: kernels are chosen for it, and the
identity holds it, so that engines of both layouts may share a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_BLOCK_OUTERMOST: Final = {"LBHNC": "BLHNC", "LBNHC": "BLNHC"}
"""With the same order inside a page. In what is not named here a page is not one run, or blocks are outermost already.
"""


@dataclass(frozen=True, slots=True)
class EngineLayouts:
    """What an engine could do. ``candidates``: the layouts that all its kernels take, its own choice first.

    ``page_bytes``: of the layers' blocks, each size once. ``splits_blocks``: some kernel takes smaller blocks than the
    cache has.
    """

    candidates: tuple[str, ...]
    page_bytes: frozenset[int]
    splits_blocks: bool


@dataclass(frozen=True, slots=True)
class LayoutWish:
    """``layout`` None: leave it to the engine, because of ``why``."""

    layout: str | None
    why: str


def layout_wish(engine: EngineLayouts) -> LayoutWish:
    """Asks only for what the engine will grant and start with."""
    if not engine.candidates or not engine.page_bytes:
        return LayoutWish(None, "the layers of the model are not in this process, so that nothing is known of them")
    own = engine.candidates[0]
    wanted = _BLOCK_OUTERMOST.get(own)
    if wanted is None:
        return LayoutWish(None, f"the engine's own choice, {own}, has none with the same pages and blocks outermost")
    if wanted not in engine.candidates:
        return LayoutWish(None, f"its kernels take {_listed(engine.candidates)}, and not {wanted}")
    if len(engine.page_bytes) > 1:
        # vLLM 0.32, v1/core/kv_cache_utils.py, _get_packed_kv_cache_groups: the identity would be another one.
        return LayoutWish(None, "layers have pages of several sizes, which the engine would group otherwise then")
    if engine.splits_blocks:
        # vLLM 0.32, v1/kv_cache_interface.py, create_kv_cache_views: the engine would not start.
        return LayoutWish(None, "a kernel takes smaller blocks than the cache has, which needs a layer's side by side")
    return LayoutWish(wanted, "with blocks outermost a block is one run of memory, and not one for each layer")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
