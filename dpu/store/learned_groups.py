"""The KV groups that a policy learns of: each has a number there, and chunks of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.asked import AskedChain
from meshfusion.jbof.policy.chain import Chain

GROUPS_MAX = 64
"""KV groups of all models of the pool that are learned of; each takes memory of its own. Chunks of more are all
written, and are the first to go."""


@dataclass(frozen=True, slots=True)
class LearnedGroup:
    """A KV group of one model, as the policy knows it: its number there, and what its chunks are like."""

    number: int
    chunk_tokens: int
    chunk_bytes: int

    def chain(self, asked: AskedChain) -> Chain:
        """As the policy takes it."""
        skipped = int(asked.numbers[0]) if len(asked.numbers) else 0
        return Chain(self.number, asked.keys, self.chunk_tokens, self.chunk_bytes, len(asked.keys), skipped)


class LearnedGroups:
    """Numbered as they come. None where one is asked for: there are more than are learned of."""

    def __init__(self) -> None:
        self._groups: dict[tuple[bytes, int, int], LearnedGroup] = {}  # by identity, KV group, tokens of a chunk
        self._by_number: list[LearnedGroup] = []
        self._latest: dict[tuple[bytes, int], LearnedGroup] = {}

    def __getitem__(self, number: int) -> LearnedGroup:
        """That with this number, which was given out."""
        return self._by_number[number]

    def latest(self, identity: bytes, kv_group: int) -> LearnedGroup | None:
        """The one that a chunk of this KV group was last of, however many tokens it has; None: there was none."""
        return self._latest.get((identity, kv_group))

    def of_chunk(self, chunk: api.ChunkRecord) -> LearnedGroup | None:
        return self._group(chunk.identity, chunk.group, chunk.token_count, payload_bytes(chunk))

    def of_item(self, identity: bytes, item: api.ReserveItem) -> LearnedGroup | None:
        item_bytes = sum(shard.unit_bytes * shard.unit_count for shard in item.shards)
        return self._group(identity, item.group, item.token_count, item_bytes)

    def sorted_out(self, chunks: Sequence[api.ChunkRecord]) -> dict[LearnedGroup, list[int]]:
        """Which of the chunks are of each group."""
        found: dict[LearnedGroup, list[int]] = {}
        for i, chunk in enumerate(chunks):
            group = self.of_chunk(chunk)
            if group is not None:
                found.setdefault(group, []).append(i)
        return found

    def _group(self, identity: bytes, kv_group: int, chunk_tokens: int, chunk_bytes: int) -> LearnedGroup | None:
        """``chunk_bytes`` may differ a little from chunk to chunk (at the end of a window): the first one's stands for
        all."""
        name = (identity, kv_group, chunk_tokens)
        found = self._groups.get(name)
        if found is None and len(self._by_number) < GROUPS_MAX:
            found = self._groups[name] = LearnedGroup(len(self._by_number), chunk_tokens, chunk_bytes)
            self._by_number.append(found)
        if found is not None:
            self._latest[identity, kv_group] = found
        return found


def payload_bytes(chunk: api.ChunkRecord) -> int:
    return sum(shard.payload_bytes for shard in chunk.shards)
