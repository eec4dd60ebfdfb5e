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
        policy.on_match(chain_of(number, 3), now_s + 20)
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
    assert of_small == pytest.approx(4 * of_large, rel=0.05)  # the tables were made anew in between


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
    assert policy.room_price == pytest.approx(0.5, rel=0.02)
    for number in range(128 * 60):
        policy.on_match(chain_of(40000 + number % 50, 1), 20002.0)
    assert policy.room_price < 0.03  # nothing is reclaimed, so room is not dear


def test_kept_is_what_is_worth_its_room_within_the_budget() -> None:
    policy = policy_of()
    policy.room_price = 1.0
    densities = np.array([0.5, 3.0, 1.0, 2.0])
    assert policy.keep(densities, 10).tolist() == [False, True, False, True]
    assert policy.keep(densities, 1).tolist() == [False, True, False, False]
    assert not policy.keep(densities, 0).any()
    assert not policy.keep(densities, -3).any()


def test_a_clock_that_steps_back_is_no_time() -> None:
    policy = policy_of()
    policy.on_match(chain_of(1, 2), 100.0)
    before = policy.densities(0, chain_of(1, 2).keys, np.arange(2), 100.0)
    assert policy.densities(0, chain_of(1, 2).keys, np.arange(2), 50.0).tolist() == before.tolist()


def test_an_empty_chain_is_nothing() -> None:
    policy = policy_of()
    policy.on_match(chain_of(1, 0), 0.0)
    assert not policy.admit(chain_of(1, 0), np.arange(0), 0.0).admitted.size
