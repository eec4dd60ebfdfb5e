"""The classic policies against another implementation, and the clairvoyant one against all choices there are."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.tools.sim import classic
from meshfusion.tools.sim.classic import simulate_classic
from meshfusion.tools.sim.trace import flat_blocks
from tests.tools.sim.traces import conversations, trace_of

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim has no wheel for this Python and processor")
TRACE = conversations(60, 6)


@pytest.mark.parametrize("capacity", [1, 7, 30, 100])
def test_lru_as_libcachesim_has_it(capacity: int) -> None:
    peer, request = libcachesim.LRU(cache_size=capacity), libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for block in flat_blocks(TRACE.requests).tolist():
        request.obj_id = block
        hits += peer.get(request)
    ours = simulate_classic(TRACE, "lru", capacity, 1)
    assert ours.hits == hits
    assert ours.admitted == ours.accesses - hits


@pytest.mark.parametrize("name", sorted(classic.LIBRARY_POLICIES))
def test_policies_of_the_library_run(name: str) -> None:
    found = simulate_classic(TRACE, name, TRACE.unique_blocks * 2, 1)
    most = found.accesses - TRACE.unique_blocks
    assert 0 < found.hits <= most
    assert found.admitted == found.accesses - found.hits


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "libcachesim", None)
    with pytest.raises(UnsupportedError, match="libcachesim"):
        simulate_classic(TRACE, "arc", 10, 1)


def test_frequency_2_writes_at_the_second_use() -> None:
    found = simulate_classic(trace_of([[0, 1], [0], [0], [0, 1], [1]]), "frequency-2", 10, 1)
    assert (found.hits, found.admitted) == (3, 2)


def most_hits(blocks: list[int], capacity: int) -> int:
    """By trying every choice: after a miss, drop any block for the new one, or do not keep it."""

    @cache
    def best(position: int, held: frozenset[int]) -> int:
        if position == len(blocks):
            return 0
        block = blocks[position]
        if block in held:
            return 1 + best(position + 1, held)
        choices = [held]
        if len(held) < capacity:
            choices.append(held | {block})
        choices += [held - {other} | {block} for other in held]
        return max(best(position + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 3))
def test_the_clairvoyant_policy_hits_most(blocks: list[int], capacity: int) -> None:
    numbers = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
    trace = trace_of([[numbers[block]] for block in blocks])
    found = simulate_classic(trace, "clairvoyant", capacity, 1)
    assert found.hits == most_hits(blocks, capacity)


def test_the_clairvoyant_policy_writes_nothing_that_is_never_used_again() -> None:
    found = simulate_classic(trace_of([[0, 1, 2], [0, 3], [4]]), "clairvoyant", 10, 1)
    assert (found.hits, found.admitted) == (1, 1)


def test_next_uses() -> None:
    never = np.iinfo(np.int64).max
    assert classic.next_uses(np.array([3, 1, 3, 3, 1])).tolist() == [2, 4, 3, never, never]


def test_usable_hits_and_tokens() -> None:
    """With room for two, the third block of a prompt displaces its first: hits that nobody can load."""
    found = simulate_classic(trace_of([[0, 1, 2], [0, 1, 2], [2]]), "lru", 2, 100)
    assert (found.hits, found.usable_hits) == (1, 1)
    found = simulate_classic(trace_of([[0, 1, 2], [3, 1, 2]]), "lru", 3, 100)
    assert (found.hits, found.usable_hits, found.usable_hit_tokens) == (2, 0, 0)
