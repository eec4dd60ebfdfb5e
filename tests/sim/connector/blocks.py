"""The engine's blocks: who holds them, who pinned them, what is in them, and which are found by the next request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tests.sim.connector.texts import Value

CacheKey = tuple[int, str]
"""KV group, and the text up to the block's end."""


class Violation(BaseException):
    """A rule was broken. Not an ``Exception``: the client's threads outlive these, and log them."""


def must(holds: bool, what: str, *about: object) -> None:
    if not holds:
        raise Violation(": ".join([what, *map(str, about)]))


class Block:
    """``slots``: on each rank a value for each token, for a state one. What was in them stays until it is
    overwritten."""

    __slots__ = ("block_id", "cached_as", "is_null", "pin_count", "ref_cnt", "slots")

    def __init__(self, block_id: int, rank_count: int) -> None:
        self.block_id = block_id
        self.is_null = block_id == 0
        self.ref_cnt = 0
        self.pin_count = 0
        self.slots: list[list[Value]] = [[""] * 4 for _ in range(rank_count)]
        self.cached_as: CacheKey | None = None


class BlockPool:
    """``touch`` and ``free_blocks`` are the connector's, with the engine's names; the engine itself takes and gives."""

    def __init__(self, count: int, rank_count: int) -> None:
        self.blocks = [Block(i, rank_count) for i in range(count)]
        self.null = self.blocks[0]
        self.free = deque(self.blocks[1:])
        self.cached: dict[CacheKey, Block] = {}

    # ---- the connector's -----------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            must(not block.is_null, "the null block was pinned")
            must(block.ref_cnt > 0, "a block that nobody holds was pinned", block.block_id)
            block.ref_cnt += 1
            block.pin_count += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            must(block.pin_count > 0, "a block was unpinned that was not pinned", block.block_id)
            block.pin_count -= 1
            self._give(block)

    # ---- the engine's --------------------------------------------------------------------------------------------

    def hold(self, block: Block) -> None:
        """Found in the prefix cache: one holder more."""
        if block.ref_cnt == 0:
            self.free.remove(block)
        block.ref_cnt += 1

    def take(self) -> Block:
        """For new tokens: what was found in it is found no more."""
        block = self.free.popleft()
        self.uncache(block)
        block.ref_cnt = 1
        return block

    def give(self, block: Block) -> None:
        if not block.is_null:
            self._give(block)

    def cache(self, block: Block, key: CacheKey) -> None:
        if not block.is_null and block.cached_as is None and key not in self.cached:
            block.cached_as = key
            self.cached[key] = block

    def uncache(self, block: Block) -> None:
        if block.cached_as is not None:
            del self.cached[block.cached_as]
            block.cached_as = None

    def forget_cached(self) -> None:
        for block in self.cached.values():
            block.cached_as = None
        self.cached.clear()

    @property
    def is_idle(self) -> bool:
        """Does nobody hold anything?"""
        return len(self.free) == len(self.blocks) - 1

    def _give(self, block: Block) -> None:
        block.ref_cnt -= 1
        assert block.ref_cnt >= block.pin_count, block.block_id
        if block.ref_cnt == 0:
            self.free.append(block)
