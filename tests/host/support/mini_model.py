"""What the mini engine computes: KV that is a function of the tokens before it, so that every byte can be judged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from meshfusion.host.kv.resume import ResumeRule, StateAtBoundary
from tests.host.support.attention import attended
from tests.host.support.kv_memory import U8, KvMemory
from tests.host.support.mini_blocks import Block, Manager
from tests.host.support.mini_request import Request


def content(group: int, tokens: list[int], unit_bytes: int, shard: int = 0) -> bytes:
    """What a block of ``group`` holds that ends after ``tokens``: KV, or a state, is a function of all before it.
    ``shard``: on which ranks."""
    about = (group, tokens, shard) if shard else (group, tokens)
    seed = int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:8], "little")
    raw: U8 = np.random.default_rng(seed).integers(0, 256, unit_bytes, dtype=np.uint8)
    raw[1::2] &= 0xBF  # as bfloat16 they are numbers between -2 and 2
    return raw.tobytes()


class MiniModel:
    """In the blocks that ``manager`` gives. ``ranks``: of each its memory of every KV group; ``ranks_per_shard``: of
    each group, how many of them hold the same; empty: each holds something else."""

    def __init__(
        self,
        ranks: Sequence[tuple[KvMemory, ...]],
        rules: Sequence[ResumeRule],
        manager: Manager,
        ranks_per_shard: Sequence[int],
    ) -> None:
        self._ranks = ranks
        self._rules = rules
        self._manager = manager
        self._ranks_per_shard = ranks_per_shard

    def compute(self, request: Request, first: int, last: int) -> None:
        """Fills every block that these tokens complete. A block is whole or not at all: enough for full blocks."""
        if first == last:
            return
        for group, kv, rule in self.groups():
            size, table = kv.layout.block_tokens, self._manager.tables[request.request_id][group]
            if isinstance(rule, StateAtBoundary):
                self._write_all(group, table[(last - 1) // size], request.tokens[:last])
                continue
            for index in range(first // size, last // size):
                if not table[index].is_null:
                    self._write_all(group, table[index], request.tokens[: (index + 1) * size])

    def wrong_reads(self, request: Request) -> list[str]:
        """What the next token reads of full blocks, and of the state, and finds to be something else."""
        wrong = []
        done = request.num_computed_tokens
        for group, kv, rule in self.groups():
            size, table = kv.layout.block_tokens, self._manager.tables[request.request_id][group]
            for index in sorted({token // size for token in attended(rule, done)}):
                is_state = isinstance(rule, StateAtBoundary)
                end = done if is_state else (index + 1) * size
                if end > done:
                    continue  # not full: this engine writes whole blocks only
                block = table[index]
                for rank, kvs in enumerate(self._ranks):
                    right = self._content(rank, group, request.tokens[:end])
                    if block.is_null or kvs[group].unit(block.block_id) != right:
                        wrong.append(
                            f"{request.request_id}: rank {rank}, group {group}, block {index} of {done} tokens"
                        )
        return wrong

    def write(self, rank: int, group: int, block: Block, tokens: list[int]) -> None:
        kv = self._ranks[rank][group]
        unit: U8 = np.frombuffer(self._content(rank, group, tokens), dtype=np.uint8)
        kv.memory[kv.byte_places[block.block_id]] = unit

    def retire(self, request: Request) -> None:
        """Blocks that no token to come reads are given back, as the engine does at every pass."""
        for group, kv, rule in self.groups():
            first_token = rule.first_token(request.num_computed_tokens)
            self._manager.retire(request.request_id, group, first_token // kv.layout.block_tokens)

    def groups(self) -> Iterator[tuple[int, KvMemory, ResumeRule]]:
        return ((i, kv, rule) for i, (kv, rule) in enumerate(zip(self._ranks[0], self._rules, strict=True)))

    def _write_all(self, group: int, block: Block, tokens: list[int]) -> None:
        for rank in range(len(self._ranks)):
            self.write(rank, group, block, tokens)

    def _content(self, rank: int, group: int, tokens: list[int]) -> bytes:
        unit_bytes = self._ranks[rank][group].layout.unit_bytes
        per_shard = self._ranks_per_shard[group] if self._ranks_per_shard else 1
        return content(group, tokens, unit_bytes, rank // per_shard)
