"""What is remembered of requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.store.asked import CHAIN_CHUNKS, NOTHING_ASKED, AskedChain, AskedChains, ChainName, policy_keys


def chain(numbers: list[int], salt: int = 0) -> AskedChain:
    return AskedChain(np.array(numbers, np.intp), np.array([number + salt for number in numbers], np.uint64))


def test_keys_are_told_apart_by_their_first_bits() -> None:
    keys = [bytes([1]) + bytes(31), bytes([2]) + bytes(31)]
    found = policy_keys(keys)
    assert found.dtype == np.uint64
    assert len(set(found.tolist())) == 2
    assert len(policy_keys([])) == 0


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20), min_size=1))
def test_what_is_computed_continues_what_was_asked(asked: set[int], computed: set[int]) -> None:
    numbers = sorted(computed)
    merged = chain(sorted(asked)).with_chunks(np.array(numbers, np.intp), np.array(numbers, np.uint64) + 100)
    expected = {**{number: number for number in asked}, **{number: number + 100 for number in computed}}
    assert dict(zip(merged.numbers.tolist(), merged.keys.tolist(), strict=True)) == expected
    assert merged.numbers.tolist() == sorted(asked | computed)
    assert merged.numbers[merged.places(np.array(numbers, np.intp))].tolist() == numbers


def test_a_number_that_the_chain_does_not_have_is_a_mistake_of_ours() -> None:
    with pytest.raises((AssertionError, IndexError)):
        chain([1, 3]).places(np.array([2], np.intp))


def test_memory_is_bounded_by_chunks_and_the_latest_stay() -> None:
    chains = AskedChains(kept_chunks=3 * (3 + CHAIN_CHUNKS) + 1)
    for i in range(8):
        chains.put(ChainName("h", f"r{i}", 0), chain([0, 1, 2]))
    assert len(chains) == 3
    assert chains.get(ChainName("h", "r4", 0)) is NOTHING_ASKED
    assert len(chains.get(ChainName("h", "r7", 0)).keys) == 3
    chains.put(ChainName("h", "long", 0), chain(list(range(200))))
    assert len(chains) == 1
    chains.put(ChainName("other", "r", 0), chain([0]))
    assert chains.get(ChainName("h", "long", 0)) is NOTHING_ASKED
    chains.forget_holder("other")
    assert len(chains) == 0


def test_memory_is_bounded_for_requests_that_ask_for_nothing() -> None:
    chains = AskedChains(kept_chunks=10 * CHAIN_CHUNKS)
    for i in range(100):
        chains.put(ChainName("h", f"r{i}", 0), NOTHING_ASKED)
    assert len(chains) == 10


def test_what_has_no_requests_name_is_not_remembered() -> None:
    chains = AskedChains()
    chains.put(ChainName("h", "", 0), chain([0, 1]))
    assert len(chains) == 0
    assert chains.get(ChainName("h", "", 0)) is NOTHING_ASKED
