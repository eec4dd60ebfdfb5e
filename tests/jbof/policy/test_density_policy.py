"""The default policy as the store would call it."""

from __future__ import annotations

import numpy as np
import pytest

from meshfusion.jbof.policy.chain import Chain
from meshfusion.jbof.policy.density_policy import DensityPolicy, PolicySettings
from meshfusion.jbof.policy.medium_policy import MediumPolicy, Refusal, SegmentStats

SETTINGS = PolicySettings(history_entries=4096, sample_entries=4096)


def chain_of(session: int, chunks: int, group: int = 0) -> Chain:
    numbers = [(session * 1000 + i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(chunks)]
    return Chain(group, np.array(numbers, np.uint64), 512, 1 << 20, chunks)


def policy_of(settings: PolicySettings = SETTINGS) -> DensityPolicy:
    policy = DensityPolicy(settings)
    _: MediumPolicy = policy
    return policy


def learned() -> DensityPolicy:
    """500 short prompts, each continued after 20 s and then never; 500 long ones that nobody continues."""
    policy = policy_of()
    for number in range(500):
        now_s = 40.0 * number
        policy.on_match(chain_of(number, 2), now_s)
        policy.on_match(chain_of(10000 + number, 32), now_s)
        policy.refresh_if_due(now_s)
        policy.on_match(chain_of(number, 3), now_s + 20)
        policy.refresh_if_due(now_s + 20)
    return policy


def test_at_first_everything_is_written() -> None:
    policy = policy_of()
    policy.on_match(chain_of(1, 4), 0.0)
    answer = policy.admit(chain_of(1, 4), np.arange(4), 0.0)
    assert answer.admitted.all()
    assert (answer.lifetimes >= 0).all()


def test_admission_follows_what_was_seen() -> None:
    policy, now_s = learned(), 20001.0
    for session, chunks, is_wanted in ((20001, 2, True), (20002, 32, False)):
        policy.on_match(chain_of(session, chunks), now_s)
        answer = policy.admit(chain_of(session, chunks), np.arange(chunks), now_s)
        assert answer.admitted.tolist() == [is_wanted] * chunks
    assert set(answer.refusals.tolist()) <= {Refusal.GAIN, Refusal.ANCESTOR}


def test_nothing_is_admitted_behind_what_is_not() -> None:
    policy, now_s = learned(), 20001.0
    policy.on_match(chain_of(20002, 32), now_s)
    chain = Chain(0, np.concatenate([chain_of(20002, 1).keys, chain_of(20004, 2).keys]), 512, 1 << 20, 3)
    policy.on_match(chain_of(20004, 2), now_s + 21)
    assert policy.admit(chain, np.arange(3), now_s + 21).refusals.tolist() == [
        Refusal.GAIN, Refusal.ANCESTOR, Refusal.ANCESTOR,
    ]  # fmt: skip
    assert policy.admit(chain, np.array([1, 2]), now_s + 21).admitted.all()  # the first is held, so not offered


def test_as_the_budget_runs_out_a_write_must_yield_more() -> None:
    policy = policy_of()
    assert [policy.write_price(level) for level in (1.0, 0.5, 0.0)] == pytest.approx([0.08, 0.08, 1.0])
    assert 0.08 < policy.write_price(0.25) < 1.0


def test_leaves_go_first() -> None:
    policy = learned()
    chain = chain_of(20001, 2)
    policy.on_match(chain, 20001.0)
    densities = policy.densities(0, chain.keys, np.arange(2), 20001.0)
    assert densities[0] > densities[1] > 0


def test_what_is_not_known_is_worth_nothing() -> None:
    policy = policy_of()
    assert policy.densities(0, chain_of(1, 2).keys, np.arange(2), 0.0).tolist() == [0.0, 0.0]
    policy.on_match(chain_of(1, 2), 0.0)
    assert policy.densities(0, chain_of(2, 2).keys, np.arange(2), 0.0).tolist() == [0.0, 0.0]
    policy.on_dropped(5, chain_of(1, 2).keys)  # a group that was never asked for, after a restart


def test_bytes_that_save_more_tokens_are_worth_more() -> None:
    policy = policy_of()
    small, large = chain_of(1, 4), Chain(1, chain_of(1, 4).keys, 512, 4 << 20, 4)
    policy.on_match(small, 0.0)
    policy.on_match(large, 0.0)
    positions = np.arange(4)
    of_small, of_large = (policy.densities(g, small.keys, positions, 1.0) for g in (0, 1))
    assert of_small == pytest.approx(4 * of_large)


def test_attention_makes_later_tokens_dearer() -> None:
    policy = policy_of(PolicySettings(history_entries=4096, sample_entries=4096, attention_tokens=1024.0))
    chain = chain_of(1, 3)
    policy.on_match(chain, 0.0)
    densities = policy.densities(0, chain.keys, np.arange(3), 1.0)
    assert densities / densities[0] == pytest.approx([1.0, 1.5, 2.0], rel=2e-3)


def test_the_victim_is_the_least_valuable_and_then_the_oldest() -> None:
    policy = policy_of()
    stats = [SegmentStats(1, 10, 5.0, 1), SegmentStats(2, 20, 4.0, 3), SegmentStats(3, 10, 2.0, 2)]
    assert policy.victim(stats).segment == 3
    assert policy.victim(stats[:2]).segment == 2


def test_what_reclaim_costs_becomes_the_price_of_room() -> None:
    policy = learned()
    policy.on_match(chain_of(50000, 3), 20000.0)
    policy.on_stored(0, chain_of(50000, 3).keys)
    policy.on_dropped(0, chain_of(50000, 3).keys[2:])
    for _ in range(100):
        policy.victim([SegmentStats(1, 10, 5.0, 1)])
    for number in range(128):
        policy.on_match(chain_of(30000 + number % 50, 1), 20001.0)
    policy.refresh_if_due(20001.0)
    assert policy.room_price == pytest.approx(0.5, rel=0.02)
    for number in range(128 * 60):
        now_s = 20002.0 + number / 128
        policy.on_match(chain_of(40000 + number % 50, 1), now_s)
        policy.refresh_if_due(now_s)
    assert policy.room_price < 0.03  # nothing is reclaimed, so room is not dear


def test_kept_is_what_is_worth_its_room_within_the_budget() -> None:
    policy = policy_of()
    policy.room_price = 1.0
    densities = np.array([0.5, 3.0, 1.0, 2.0])
    assert policy.keep(densities, 10).tolist() == [False, True, False, True]
    assert policy.keep(densities, 1).tolist() == [False, True, False, False]
    assert not policy.keep(densities, 0).any()
    assert not policy.keep(densities, -3).any()
    rows = np.stack([densities, densities[::-1], np.zeros(4)])
    assert policy.keep(rows, 1).tolist() == [[False, True, False, False], [False, False, True, False], [False] * 4]


def test_a_clock_that_steps_back_is_no_time() -> None:
    policy = policy_of()
    policy.on_match(chain_of(1, 2), 100.0)
    before = policy.densities(0, chain_of(1, 2).keys, np.arange(2), 100.0)
    assert policy.densities(0, chain_of(1, 2).keys, np.arange(2), 50.0).tolist() == before.tolist()


def test_an_empty_chain_is_nothing() -> None:
    policy = policy_of()
    policy.on_match(chain_of(1, 0), 0.0)
    assert not policy.admit(chain_of(1, 0), np.arange(0), 0.0).admitted.size


# ---- learning beside the lookups ---------------------------------------------------------------------------------


def test_a_lookup_changes_no_tables() -> None:
    policy = policy_of()
    chain = chain_of(1, 2)
    policy.on_match(chain, 290.0)
    before = policy.densities(0, chain.keys, np.arange(2), 300.0)
    for number in range(300):
        policy.on_match(chain_of(1000 + number % 50, 2), 300.0)
    assert policy.densities(0, chain.keys, np.arange(2), 300.0).tolist() == before.tolist()
    policy.refresh_if_due(300.0)
    assert policy.densities(0, chain.keys, np.arange(2), 300.0).tolist() != before.tolist()


def refreshes(policy: DensityPolicy, matches: int, chunks: int, gap_s: float, start_s: float) -> list[int]:
    """After which requests, from 1, the tables were made anew."""
    found = []
    for number in range(1, matches + 1):
        now_s = start_s + number * gap_s
        policy.on_match(chain_of(int(now_s * 1000), chunks), now_s)
        gains = policy._groups[0].model.gain
        policy.refresh_if_due(now_s)
        if policy._groups[0].model.gain is not gains:
            found.append(number)
    return found


def test_at_first_it_learns_often_and_then_by_requests_or_chunks() -> None:
    policy = policy_of(PolicySettings(4096, 4096, refresh_chunks=640))
    assert refreshes(policy, 127, 2, 1.0, 0.0) == [1, 2, 4, 8, 16, 32, 64]
    assert refreshes(policy, 300, 2, 1.0, 200.0) == [65, 193]  # 128 after the last
    assert refreshes(policy, 60, 32, 1.0, 600.0) == [14, 34, 54]  # 107 of two chunks before, then 20 of 32
    assert refreshes(policy, 60, 32, 0.03, 700.0) == [14, 48]  # no more often than each second


def test_settings_for_a_pool() -> None:
    small, large = PolicySettings.for_pool(100), PolicySettings.for_pool(10_000_000, attention_tokens=4096.0)
    assert small.history_entries == small.sample_entries == 131072  # a small pool learns from all it remembers
    assert large.history_entries >= 20_000_000
    assert large.sample_entries == 131072
    assert (small.refresh_chunks, large.refresh_chunks) == (8192, 1_250_000)
    assert (small.attention_tokens, large.attention_tokens) == (None, 4096.0)


# ---- room --------------------------------------------------------------------------------------------------------


def test_what_is_worth_less_than_the_room_it_needs_is_not_written() -> None:
    policy = policy_of()
    chain = chain_of(1, 4)
    policy.on_match(chain, 0.0)
    worth = float(policy.densities(0, chain.keys[:1], np.arange(1), 0.0)[0])
    assert policy.admit(chain, np.arange(4), 0.0, 1.0, worth * 0.99).admitted.all()
    refused = policy.admit(chain, np.arange(4), 0.0, 1.0, worth * 1.01).refusals
    assert refused.tolist() == [Refusal.GAIN] * 4


# ---- after a restart ---------------------------------------------------------------------------------------------


def test_what_is_found_at_the_start_has_a_value_by_its_age() -> None:
    policy = policy_of()
    young, old = chain_of(1, 2), chain_of(2, 2)
    for chain, age_s in ((young, 10.0), (old, 5000.0)):
        policy.on_found(0, chain.keys, 512, 1 << 20, age_s, 1000.0)
        assert policy.is_held(0, chain.keys).all()
    of_young, of_old = (policy.densities(0, chain.keys, np.arange(2), 1000.0) for chain in (young, old))
    assert (of_young > 5 * of_old).all()
    assert (of_old > 0).all()
    policy.on_found(0, chain_of(3, 2).keys, 512, 1 << 20, 1e9, 1000.0)  # from before all that is remembered
    assert (policy.densities(0, chain_of(3, 2).keys, np.arange(2), 1000.0) > 0).all()


def test_what_was_found_is_learned_of_by_its_uses() -> None:
    """Of two kinds that were there, none is known; chunks that are used then are known by that use."""
    policy = policy_of()
    for number in range(400):
        policy.on_found(0, chain_of(number, 2).keys, 512, 1 << 20, 100.0, 0.0)
    before = policy.densities(0, chain_of(399, 2).keys, np.arange(2), 10.0)
    for number in range(300):
        now_s = 1.0 + number / 10
        policy.on_match(chain_of(number, 2), now_s)
        policy.refresh_if_due(now_s)
    policy.on_found(0, chain_of(500, 2).keys, 512, 1 << 20, 110.0, 32.0)
    after = policy.densities(0, chain_of(500, 2).keys, np.arange(2), 32.0)
    assert (after > 2 * before).all()  # of the same age: most of those were used within the half minute
    assert policy.is_held(0, chain_of(1, 2).keys).all()


def test_what_is_stored_without_having_been_asked_for_is_remembered() -> None:
    policy = policy_of()
    policy.on_match(chain_of(1, 2), 0.0)
    policy.on_stored(0, chain_of(2, 2).keys)
    assert policy.is_held(0, chain_of(2, 2).keys).all()
    assert (policy.densities(0, chain_of(2, 2).keys, np.arange(2), 0.0) > 0).all()
    policy.on_dropped(0, chain_of(2, 2).keys)
    assert not policy.is_held(0, chain_of(2, 2).keys).any()
    policy.on_stored(7, chain_of(2, 2).keys)  # of a group that nobody asked for: nothing is known of it
