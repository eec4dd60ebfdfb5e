"""Policies of ordinary caches, for comparison: every access of a block is a use, every admission a write.

LRU, "frequency >= 2" before LRU, and the clairvoyant one with bypass are here; ARC, S3-FIFO and W-TinyLFU are those of
``libcachesim`` (an optional package), which write every block that is missed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.tools.sim.figures import Figures, HitCount
from meshfusion.tools.sim.trace import Ids, Trace, flat_blocks

Access = Callable[[int], tuple[bool, bool]]
"""One access to a block: was it a hit, was it written."""

_NEVER = np.iinfo(np.int64).max
LIBRARY_POLICIES = {"arc": "ARC", "s3-fifo": "S3FIFO", "w-tinylfu": "WTinyLFU"}


def lru(capacity_blocks: int, least_uses: int = 1) -> Access:
    """Least recently used goes first; written at the ``least_uses``-th use (uses are remembered for good)."""
    held: OrderedDict[int, None] = OrderedDict()
    uses: dict[int, int] = {}

    def access(block: int) -> tuple[bool, bool]:
        if block in held:
            held.move_to_end(block)
            return True, False
        if least_uses > 1:
            uses[block] = uses.get(block, 0) + 1
            if uses[block] < least_uses:
                return False, False
        if len(held) >= capacity_blocks:
            held.popitem(last=False)
        held[block] = None
        return False, True

    return access


def clairvoyant(capacity_blocks: int, blocks: Ids) -> Access:
    """Keeps what is used soonest and writes nothing that is not used before what it would displace (Belady, bypass)."""
    upcoming = iter(next_uses(blocks).tolist())
    held: dict[int, int] = {}
    latest: list[tuple[int, int]] = []

    def access(block: int) -> tuple[bool, bool]:
        next_use = next(upcoming)
        is_hit = block in held
        if not is_hit:
            if next_use == _NEVER:
                return False, False
            if len(held) >= capacity_blocks:
                while held.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)  # used since
                if -latest[0][0] <= next_use:
                    return False, False
                del held[heapq.heappop(latest)[1]]
        held[block] = next_use
        heapq.heappush(latest, (-next_use, block))
        return is_hit, not is_hit

    return access


def next_uses(blocks: Ids) -> Ids:
    """For each access the index of the next one to the same block, or the largest integer."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), _NEVER, np.int64)
    is_same = blocks[order[:-1]] == blocks[order[1:]]
    following[order[:-1][is_same]] = order[1:][is_same]
    return following


def from_library(name: str, capacity_blocks: int) -> Access:
    """Raises :class:`UnsupportedError` without the package."""
    try:
        import libcachesim
    except ImportError as e:
        raise UnsupportedError(
            f"the policy {name} is that of libcachesim, which is not installed",
            next_step="Install the package libcachesim, or leave the policy out.",
        ) from e
    cache: Any = getattr(libcachesim, LIBRARY_POLICIES[name])(cache_size=capacity_blocks)
    request: Any = libcachesim.Request()
    request.obj_size = 1

    def access(block: int) -> tuple[bool, bool]:
        request.obj_id = block
        is_hit = bool(cache.get(request))
        return is_hit, not is_hit

    return access


def access_of(name: str, capacity_blocks: int, trace: Trace) -> Access:
    if name == "lru":
        return lru(capacity_blocks)
    if name == "frequency-2":
        return lru(capacity_blocks, least_uses=2)
    if name == "clairvoyant":
        return clairvoyant(capacity_blocks, flat_blocks(trace.requests))
    return from_library(name, capacity_blocks)


def simulate_classic(
    trace: Trace, name: str, capacity_blocks: int, block_bytes: int, progress: Callable[[int], None] = lambda done: None
) -> Figures:
    access = access_of(name, capacity_blocks, trace)
    count = HitCount(trace.block_tokens)
    written = 0
    for request in trace.requests:
        hits = first_miss = 0
        for position, (is_hit, is_written) in enumerate(map(access, request.blocks.tolist())):
            hits += is_hit
            first_miss += is_hit and first_miss == position
            written += is_written
        count.add(len(request.blocks), hits, first_miss, request.input_tokens)
        progress(len(request.blocks))
    return Figures(
        name, capacity_blocks, block_bytes, trace.duration_s, count.accesses, count.hits, count.usable,
        count.input_tokens, count.usable_tokens, written,
    )  # fmt: skip
