"""How one engine's KV is cut into chunks: what both halves of a connector, and the pool client, agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshfusion.dpu.api.limits import MAX_KEYS_PER_MATCH, MAX_MESSAGE_BYTES
from meshfusion.dpu.api.types import UNIT_DIGEST_BYTES, ShardSize
from meshfusion.host.kv.resume import GroupPlan, ResumeRule, StateAtBoundary, WholePrefix
from meshfusion.jbof.errors import UnsupportedError

_RECORD_BYTES, _SHARD_BYTES = 112, 48
"""In an answer, without digests: a little more than they take."""
_ANSWER_BYTES_MAX = MAX_MESSAGE_BYTES * 7 // 8


class BlockSize(Protocol):
    """What of a :class:`~meshfusion.host.kv.group_layout.GroupLayout` decides how it is cut into chunks."""

    @property
    def group(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def unit_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """``plans``: of all KV groups, group ``i`` in place ``i``; ``unit_bytes``: of a block of each, on one rank.

    Chunk ``i`` of every group covers the same ``chunk_tokens`` tokens: the end of a chunk is a boundary of all.
    ``rank_count``: workers, each with its part of every block. ``ranks_per_shard``: of each group, how many of them,
    next to each other, have the same part, which is then one shard; empty: each has another.
    """

    plans: tuple[GroupPlan, ...]
    unit_bytes: tuple[int, ...]
    rank_count: int = 1
    ranks_per_shard: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.plans, "an engine without KV groups"
        assert len(self.plans) == len(self.unit_bytes), (self.plans, self.unit_bytes)
        assert [plan.group for plan in self.plans] == list(range(len(self.plans))), self.plans
        assert len({plan.chunk_tokens for plan in self.plans}) == 1, self.plans
        assert len(self.ranks_per_shard) in (0, len(self.plans)), self.ranks_per_shard
        assert all(n > 0 and self.rank_count % n == 0 for n in self.ranks_per_shard), self.ranks_per_shard

    @property
    def chunk_tokens(self) -> int:
        return self.plans[0].chunk_tokens

    @property
    def may_end_with_prompt(self) -> bool:
        """May a request resume at the very end of its tokens?

        The engine then computes its last token once more, as the one *before* the boundary. Keys and values of whole
        prefixes are there for it, and it writes the same ones again. A state would take the token in twice, and a
        window or a local stretch would lack what it sees on its far side: their requests resume earlier.
        """
        return all(isinstance(plan.rule, WholePrefix) for plan in self.plans)

    @property
    def may_load_in_part(self) -> bool:
        """May a request go on from the first block that a load did not bring?

        With whole prefixes alone every block is a boundary. A window, a stretch or a state is of use at the boundary
        that it was loaded for and nowhere before. And with several groups, the engine cannot tell which of them a
        block's number means.
        """
        return len(self.plans) == 1 and self.may_end_with_prompt

    def boundary_max(self, token_count: int) -> int:
        """The last boundary, in chunks, at which a request of ``token_count`` tokens may resume, among those that one
        lookup can ask for: of a very long prompt the first ones, since one that asks for more is refused whole."""
        last = (token_count if self.may_end_with_prompt else max(0, token_count - 1)) // self.chunk_tokens
        return min(last, MAX_KEYS_PER_MATCH // len(self.plans), _ANSWER_BYTES_MAX // max(1, self._answer_bytes))

    @property
    def _answer_bytes(self) -> int:
        """At most so much of the answer to a lookup is about one chunk of every group that needs all its chunks."""
        return sum(
            _RECORD_BYTES + self.shard_count(p.group) * (_SHARD_BYTES + UNIT_DIGEST_BYTES * p.kept_blocks_max)
            for p in self.plans
            if isinstance(p.rule, WholePrefix)
        )

    def shard_count(self, group: int) -> int:
        """Shards of each of the group's chunks."""
        return self.rank_count // self._ranks_per_shard(group)

    def shard_at(self, group: int, rank: int) -> int:
        """Which of the group's shards (from 0) holds what ``rank`` has of it."""
        return rank // self._ranks_per_shard(group)

    def is_writer(self, group: int, rank: int) -> bool:
        """Of the ranks that have the same part of a group the first one stores it."""
        return rank % self._ranks_per_shard(group) == 0

    def shards_of(self, group: int, chunk: int) -> tuple[ShardSize, ...]:
        """What is stored of a chunk, in the order of ranks; ``unit_count`` is 0 where that is nothing."""
        unit_bytes, unit_count = self.unit_bytes[group], len(self.plans[group].kept_blocks(chunk))
        writers = range(0, self.rank_count, self._ranks_per_shard(group))
        return tuple(ShardSize(rank, unit_bytes, unit_count) for rank in writers)

    def _ranks_per_shard(self, group: int) -> int:
        return self.ranks_per_shard[group] if self.ranks_per_shard else 1


def form_of(
    layouts: Sequence[BlockSize],
    rules: Sequence[ResumeRule],
    *,
    chunk_min_bytes: int,
    rank_count: int = 1,
    ranks_per_shard: Sequence[int] = (),
) -> ChunkForm:
    """Chunks of an engine whose KV groups lie as ``layouts`` on each rank and resume by ``rules``; the others as in
    :class:`ChunkForm`.

    Chunks are as short as the groups' blocks allow together, but for whole prefixes of which a shard would have less
    than ``chunk_min_bytes``. Where a group has states they stay short: an engine keeps states at few places, and a
    place in the middle of a chunk could not be resumed at.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when no group has anything that a later token reads.
    """
    step_tokens = math.lcm(*(layout.block_tokens for layout in layouts))
    steps = 1
    if not any(isinstance(rule, StateAtBoundary) for rule in rules):
        whole = [
            layout for layout, rule in zip(layouts, rules, strict=True) if isinstance(rule, WholePrefix)
        ] or layouts
        step_bytes = max(layout.unit_bytes * (step_tokens // layout.block_tokens) for layout in whole)
        steps = max(1, -(-chunk_min_bytes // step_bytes))
    plans = tuple(
        GroupPlan(layout.group, rule, layout.block_tokens, step_tokens * steps)
        for layout, rule in zip(layouts, rules, strict=True)
    )
    if not any(plan.kept_blocks_max for plan in plans):
        raise UnsupportedError(
            "no token reads the KV of tokens before it: nothing of this model is worth storing",
            next_step="start the engine without this connector",
        )
    unit_bytes = tuple(layout.unit_bytes for layout in layouts)
    return ChunkForm(plans, unit_bytes, rank_count, tuple(ranks_per_shard))
