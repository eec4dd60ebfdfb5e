"""Which blocks a request has: found in the prefix cache, taken for new tokens, given up behind windows and states.

As vLLM 0.32 does it: v1/core/kv_cache_manager.py ``allocate_slots``, single_type_kv_cache_manager.py
``remove_skipped_blocks``, ``add_local_computed_blocks``, ``allocate_external_computed_blocks`` and, for states,
``MambaManager`` in mode "align".
"""

from __future__ import annotations

from tests.sim.connector.blocks import Block, BlockPool, must
from tests.sim.connector.requests import Request, Table
from tests.sim.connector.shapes import Kind, Shape


class KvManager:
    """``get_blocks`` and ``block_pool`` are what the connector knows of it."""

    def __init__(self, shape: Shape, block_count: int) -> None:
        self.shape = shape
        self.block_pool = BlockPool(block_count, shape.rank_count)
        self.requests: dict[str, Request] = {}

    def get_blocks(self, request_id: str) -> Table:
        return Table(self.requests[request_id].tables)

    # ---- admission -----------------------------------------------------------------------------------------------

    def local_hit(self, request: Request) -> int:
        """The longest prefix, in tokens, after which all groups have what the next token needs."""
        step = self.shape.step_tokens
        longest = (request.num_tokens - 1) // step * step
        for tokens in range(longest, 0, -step):
            if all(self._has(request, i, tokens) for i in range(len(self.shape.groups))):
                return tokens
        return 0

    def admit(self, request: Request, local_tokens: int, external_tokens: int, new_tokens: int) -> bool:
        """Blocks for a request that has none: found ones, those to be loaded, those to be computed. False: no room."""
        pool, total = self.block_pool, local_tokens + external_tokens
        for i, group in enumerate(self.shape.groups):
            size, table = group.block_tokens, request.tables[i]
            skipped = request.skipped[i] = group.first_seen(total) // size if total else 0
            table += [pool.null] * skipped
            for block_index in range(skipped, local_tokens // size):
                block = pool.cached[i, request.text[: (block_index + 1) * size]]
                pool.hold(block)
                table.append(block)
        missing = [
            total // group.block_tokens - len(table)
            for group, table in zip(self.shape.groups, request.tables, strict=True)
        ]
        if sum(missing) > len(pool.free):
            self.free(request)
            return False
        for table, count in zip(request.tables, missing, strict=True):
            table += [pool.take() for _ in range(count)]
        if new_tokens and not self.extend(request, total, total + new_tokens):
            self.free(request)
            return False
        return True

    # ---- steps ---------------------------------------------------------------------------------------------------

    def extend(self, request: Request, start: int, end: int) -> bool:
        """Room for tokens ``start`` to ``end``; what the first of them does not see goes. False: no room."""
        pool = self.block_pool
        needed = []
        for i, group in enumerate(self.shape.groups):
            size, table = group.block_tokens, request.tables[i]
            skipped = min(group.first_seen(start) // size, len(table))
            for block_index in range(skipped - 1, request.skipped[i] - 1, -1):
                pool.give(table[block_index])
                table[block_index] = pool.null
            request.skipped[i] = max(skipped, request.skipped[i])
            missing = -(-end // size) - len(table)
            needed.append(min(missing, 1) if group.kind is Kind.STATE else missing)
        if sum(count for count in needed if count > 0) > len(pool.free):
            return False
        for group, table, count in zip(self.shape.groups, request.tables, needed, strict=True):
            if count > 0:
                if group.kind is Kind.STATE:
                    table += [pool.null] * (-(-end // group.block_tokens) - 1 - len(table))
                table += [pool.take() for _ in range(count)]
        return True

    def cache(self, request: Request, start: int, end: int, kept_states: set[int]) -> None:
        """Blocks that end in tokens ``start`` to ``end`` are found from now on; states only where they are kept."""
        for i, group in enumerate(self.shape.groups):
            size, table = group.block_tokens, request.tables[i]
            for block_index in range(start // size, end // size):
                block_end = (block_index + 1) * size
                if group.kind is not Kind.STATE or block_end in kept_states:
                    self.block_pool.cache(table[block_index], (i, request.text[:block_end]))

    def free(self, request: Request) -> None:
        for i, table in enumerate(request.tables):
            for block in reversed(table):
                self.block_pool.give(block)
            table.clear()
            request.skipped[i] = 0

    # ---- the forward pass ----------------------------------------------------------------------------------------

    def compute(self, request: Request, start: int, end: int) -> None:
        """Reads what tokens ``start`` to ``end`` attend to and writes what they are; wrong KV is a violation."""
        for i in range(len(self.shape.groups)):
            for rank in range(self.shape.rank_count):
                self._compute_group(request, i, rank, start, end)

    def _compute_group(self, request: Request, i: int, rank: int, start: int, end: int) -> None:
        group = self.shape.groups[i]
        size, table, wanted = group.block_tokens, request.tables[i], request.values[i][rank]
        if group.kind is Kind.STATE:
            if start:
                self._read(table[(start - 1) // size], rank, 0, wanted[start - 1], request)
            self._write(table[(end - 1) // size], rank, 0, wanted[end - 1])
            return
        for position in range(group.first_seen(start), start):
            block = table[position // size]
            if block.slots[rank][position % size] != wanted[position] or block.is_null:
                self._read(block, rank, position % size, wanted[position], request)
        for position in range(start, end):
            self._write(table[position // size], rank, position % size, wanted[position])

    def _read(self, block: Block, rank: int, slot: int, wanted: str, request: Request) -> None:
        must(not block.is_null, "wrong KV read, there is no block", request.request_id, wanted)
        found = block.slots[rank][slot]
        must(found == wanted, "wrong KV read", request.request_id, wanted, found)

    def _write(self, block: Block, rank: int, slot: int, value: str) -> None:
        must(not block.is_null, "KV written to the null block", value)
        if block.slots[rank][slot] != value:
            must(block.ref_cnt - block.pin_count == 1, "KV written to a block that others hold", value)
            must(block.cached_as is None, "KV written to a block that can be found", value)
            block.slots[rank][slot] = value

    def _has(self, request: Request, group_index: int, tokens: int) -> bool:
        group = self.shape.groups[group_index]
        size = group.block_tokens
        return all(
            (group_index, request.text[: (block_index + 1) * size]) in self.block_pool.cached
            for block_index in range(group.first_seen(tokens) // size, tokens // size)
        )
