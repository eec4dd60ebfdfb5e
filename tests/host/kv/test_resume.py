"""What a boundary needs is compared with which tokens the next token attends to, counted one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.kv.resume import (
    GroupPlan,
    LastWindow,
    LocalChunk,
    ResumeRule,
    StateAtBoundary,
    WholePrefix,
)
from tests.host.support.attention import attended

RULES = st.one_of(
    st.just(WholePrefix()),
    st.builds(LastWindow, st.integers(1, 100)),
    st.builds(LocalChunk, st.integers(1, 100)),
    st.just(StateAtBoundary()),
)
PLANS = st.builds(
    lambda rule, block, per_chunk: GroupPlan(0, rule, block, block * per_chunk),
    RULES,
    st.integers(1, 16),
    st.integers(1, 8),
)


@given(PLANS, st.integers(0, 12))
def test_the_blocks_needed_are_those_that_any_later_token_reads(plan: GroupPlan, boundary: int) -> None:
    start = boundary * plan.chunk_tokens
    later = range(start, start + (1 if plan.is_snapshot else 110))
    read = {key // plan.block_tokens for token in later for key in attended(plan.rule, token) if key < start}
    assert set(plan.needed_blocks(boundary)) == read


@given(PLANS, st.integers(0, 12))
def test_what_is_stored_of_the_chunks_named_covers_what_a_boundary_needs(plan: GroupPlan, boundary: int) -> None:
    first = plan.first_needed_chunk(boundary)
    stored = {block for chunk in range(first, boundary) for block in plan.kept_blocks(chunk)}
    assert stored >= set(plan.needed_blocks(boundary))
    if first < boundary:
        without_first = {block for chunk in range(first + 1, boundary) for block in plan.kept_blocks(chunk)}
        assert not without_first >= set(plan.needed_blocks(boundary)), "a chunk is named that is not needed"


@given(PLANS, st.integers(0, 12))
def test_nothing_is_stored_that_no_boundary_needs(plan: GroupPlan, chunk: int) -> None:
    assert len(plan.kept_blocks(chunk)) <= plan.kept_blocks_max
    own = set(
        range(chunk * plan.chunk_tokens // plan.block_tokens, (chunk + 1) * plan.chunk_tokens // plan.block_tokens)
    )
    needed = {block for boundary in range(chunk + 1, chunk + 60) for block in plan.needed_blocks(boundary)}
    assert set(plan.kept_blocks(chunk)) == own & needed


@given(RULES, st.integers(0, 1000))
def test_needs_never_begin_earlier_as_the_boundary_moves_on(rule: ResumeRule, tokens: int) -> None:
    assert rule.first_token(tokens) <= rule.first_token(tokens + 1) <= tokens + 1


@pytest.mark.parametrize(
    ("rule", "boundary", "needed", "kept"),
    [
        (WholePrefix(), 2, range(8), range(4, 8)),
        (LastWindow(17), 2, range(7, 8), range(7, 8)),  # 16 tokens before: one block
        (LastWindow(18), 2, range(6, 8), range(6, 8)),  # 17 tokens: two blocks
        (LastWindow(1), 2, range(8, 8), range(8, 8)),  # a token that sees only itself
        (LastWindow(1000), 2, range(8), range(4, 8)),
        (LocalChunk(128), 2, range(8, 8), range(8, 8)),  # the boundary begins a stretch
        (LocalChunk(96), 2, range(6, 8), range(6, 8)),
        (LocalChunk(1024), 2, range(8), range(4, 8)),
        (StateAtBoundary(), 2, range(7, 8), range(7, 8)),
    ],
)
def test_by_hand(rule: ResumeRule, boundary: int, needed: range, kept: range) -> None:
    """Blocks of 16 tokens, chunks of 64."""
    plan = GroupPlan(3, rule, 16, 64)
    assert plan.needed_blocks(boundary) == needed
    assert plan.kept_blocks(boundary - 1) == kept


def test_before_the_first_chunk_nothing_is_needed() -> None:
    for rule in (WholePrefix(), LastWindow(20), LocalChunk(20), StateAtBoundary()):
        assert not GroupPlan(0, rule, 16, 64).needed_blocks(0)
