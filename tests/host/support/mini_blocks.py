"""The blocks of a small engine: a pool with reference counts, and for each request a table for each KV group."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(slots=True)
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class BlockPool:
    """Block 0 is the null block: it stands where a table has nothing (any more)."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(i, is_null=i == 0) for i in range(count)]
        self.null = self.blocks[0]
        self.free = self.blocks[1:]

    def take(self, count: int) -> list[Block] | None:
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return taken

    def get_new_blocks(self, count: int) -> list[Block]:
        taken = self.take(count)
        assert taken is not None, "asked for more than are free"
        return taken

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            assert not block.is_null, "the null block was pinned"
            assert block.ref_cnt > 0, "a block without owner was pinned"
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "unpinned twice"
            if block.ref_cnt == 0:
                self.free.append(block)


@dataclass(slots=True)
class Manager:
    block_pool: BlockPool
    tables: dict[str, list[list[Block]]] = field(default_factory=dict)  # for each request, one for each KV group

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=tuple(self.tables[request_id]))

    def block_ids(self, request_id: str) -> list[list[int]]:
        return [[block.block_id for block in table] for table in self.tables[request_id]]

    def allocate(self, request_id: str, counts: list[int]) -> bool:
        """As many blocks for each group, unless there are too few."""
        taken = self.block_pool.take(sum(counts))
        if taken is None:
            return False
        blocks = iter(taken)
        self.tables[request_id] = [[next(blocks) for _ in range(count)] for count in counts]
        return True

    def retire(self, request_id: str, group: int, first_block: int) -> None:
        """The blocks before ``first_block`` will not be read again."""
        table = self.tables[request_id][group]
        self.block_pool.free_blocks(table[:first_block])
        table[:first_block] = [self.block_pool.null] * min(first_block, len(table))

    def free(self, request_id: str) -> None:
        for table in self.tables.pop(request_id, []):
            self.block_pool.free_blocks(reversed(table))
