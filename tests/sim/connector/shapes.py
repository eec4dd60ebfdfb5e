"""Engines to simulate: their KV groups, and what a token of each attends to, said by its definition.

Nothing here is taken from ``meshfusion.host.kv.resume``, which the simulation judges.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, LastWindow, LocalChunk, ResumeRule, StateAtBoundary, WholePrefix

UNIT_BYTES: Final = 128 << 10  # eight of them fill the smallest queue of saves that can be configured


class Kind(enum.Enum):
    WHOLE = "whole"
    WINDOW = "window"
    LOCAL = "local"
    STATE = "state"


@dataclass(frozen=True)
class Group:
    """``span_tokens``: of the window, or of the stretch; else unused."""

    kind: Kind
    block_tokens: int
    span_tokens: int = 0

    def first_seen(self, position: int) -> int:
        """The first token that the one at ``position`` attends to; for a state, the one after which it must be."""
        match self.kind:
            case Kind.WHOLE:
                return 0
            case Kind.WINDOW:
                return max(0, position + 1 - self.span_tokens)
            case Kind.LOCAL:
                return position - position % self.span_tokens
            case Kind.STATE:
                return max(0, position - 1)

    @property
    def rule(self) -> ResumeRule:
        match self.kind:
            case Kind.WHOLE:
                return WholePrefix()
            case Kind.WINDOW:
                return LastWindow(self.span_tokens)
            case Kind.LOCAL:
                return LocalChunk(self.span_tokens)
            case Kind.STATE:
                return StateAtBoundary()


@dataclass(frozen=True)
class Shape:
    """``ranks_per_shard``: of each group, how many of ``rank_count`` ranks, side by side, hold the same."""

    groups: tuple[Group, ...]
    chunk_tokens: int
    rank_count: int = 1
    ranks_per_shard: tuple[int, ...] = ()

    def shards_by_rank(self, group: int) -> tuple[int, ...]:
        """Which shard of the group each rank holds."""
        return tuple(rank // (self.ranks_per_shard or {group: 1})[group] for rank in range(self.rank_count))

    def shard_count(self, group: int) -> int:
        return len(set(self.shards_by_rank(group)))

    @cached_property
    def step_tokens(self) -> int:
        """The scheduler's block: a place where all groups' blocks end."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def hash_tokens(self) -> int:
        return math.gcd(*(group.block_tokens for group in self.groups))

    @cached_property
    def has_states(self) -> bool:
        return any(group.kind is Kind.STATE for group in self.groups)

    @cached_property
    def form(self) -> ChunkForm:
        plans = tuple(
            GroupPlan(i, group.rule, group.block_tokens, self.chunk_tokens) for i, group in enumerate(self.groups)
        )
        return ChunkForm(plans, (UNIT_BYTES,) * len(plans), self.rank_count, self.ranks_per_shard)

    def boundary_max(self, token_count: int) -> int:
        """In chunks. The last token of a prompt is computed, so a group that is not whole must stop before it."""
        is_whole = all(group.kind is Kind.WHOLE for group in self.groups)
        return (token_count if is_whole else token_count - 1) // self.chunk_tokens


_WHOLE: Final = Group(Kind.WHOLE, 2)

SHAPES: Final = (
    Shape((_WHOLE,), 4),
    Shape((_WHOLE,), 2),
    Shape((_WHOLE, Group(Kind.WINDOW, 2, 3)), 4),
    Shape((Group(Kind.WHOLE, 4), Group(Kind.WINDOW, 2, 6)), 4),
    Shape((Group(Kind.WINDOW, 2, 4), Group(Kind.WHOLE, 2)), 2),
    Shape((_WHOLE, Group(Kind.LOCAL, 2, 8)), 4),
    Shape((_WHOLE, Group(Kind.STATE, 4)), 4),
    Shape((_WHOLE, Group(Kind.WINDOW, 2, 5), Group(Kind.STATE, 4)), 4),
    Shape((Group(Kind.WINDOW, 2, 4),), 4),
    Shape((Group(Kind.STATE, 4),), 4),
    Shape((_WHOLE,), 4, 2),
    Shape((_WHOLE, Group(Kind.WINDOW, 2, 3)), 4, 2),
    Shape((_WHOLE, Group(Kind.STATE, 4)), 4, 2, (2, 1)),
    Shape((_WHOLE,), 2, 2, (2,)),
)
