"""Latency and bandwidth are found from answers; values are those that the answers were made from."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshfusion.host.path.flexpath.speed import SAMPLES_MIN, Speed

MIB = 1 << 20


def assumed() -> Speed:
    return Speed(1e9, 0.001)


def test_before_there_are_answers_it_is_as_assumed() -> None:
    speed = assumed()
    for _ in range(SAMPLES_MIN - 1):
        speed.observe(0.0, MIB, 5.0)
    assert not speed.is_measured
    assert speed.completion_s(500_000_000) == pytest.approx(0.501)


@pytest.mark.parametrize(("bandwidth", "latency_s"), [(10e9, 0.0005), (100e6, 0.004), (2e9, 0.0)])
def test_answers_of_different_sizes_tell_latency_from_bandwidth(bandwidth: float, latency_s: float) -> None:
    speed, rng = assumed(), random.Random(1)
    for _ in range(100):
        ahead_bytes = rng.randint(1, 64) * MIB
        speed.observe(0.0, ahead_bytes, (latency_s + ahead_bytes / bandwidth) * rng.uniform(0.9, 1.1))
    assert speed.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.1)
    assert speed.completion_s(32 * MIB) == pytest.approx(latency_s + 32 * MIB / bandwidth, rel=0.1)


def test_answers_of_one_size_tell_what_that_size_takes() -> None:
    speed = assumed()
    for _ in range(50):
        speed.observe(0.0, MIB, 0.002)
    assert speed.completion_s(MIB) == pytest.approx(0.002)


def test_a_path_that_slows_down_is_seen_to() -> None:
    speed = assumed()
    for seconds in [0.001] * 100 + [0.1] * 100:
        speed.observe(0.0, MIB, seconds)
    assert speed.completion_s(MIB) == pytest.approx(0.1, rel=0.1)


def test_a_slow_time_is_soon_forgotten_where_answers_are_rare() -> None:
    speed = assumed()
    for i in range(100):
        speed.observe(i * 0.001, MIB, 0.1)
    for i in range(10):
        speed.observe(1.0 + i, MIB, 0.001)
    assert speed.completion_s(MIB) < 0.003


def test_one_answer_that_was_held_up_does_not_decide() -> None:
    speed = assumed()
    for seconds in [0.001] * 100 + [10.0]:
        speed.observe(0.0, MIB, seconds)
    assert speed.completion_s(MIB) < 0.0015


def test_forgetting_keeps_the_guess_and_drops_the_proof() -> None:
    speed = assumed()
    for _ in range(10):
        speed.observe(0.0, MIB, 0.002)
    speed.forget()
    assert not speed.is_measured
    assert speed.completion_s(MIB) == pytest.approx(0.002)
    for _ in range(SAMPLES_MIN):
        speed.observe(0.0, MIB, 0.1)
    assert speed.completion_s(MIB) == pytest.approx(0.1), "what was before counts for nothing"


ANSWERS = st.tuples(st.floats(0, 3000), st.integers(0, 1 << 34), st.floats(0, 1e4))


@example([(0.0, 1, 1.0)] * 3 + [(1075.0, 2, 5e-324)], 1)
@given(st.lists(ANSWERS, max_size=80), st.integers(1, 1 << 34))
def test_whatever_was_seen_more_bytes_take_longer(seen: list[tuple[float, int, float]], ahead_bytes: int) -> None:
    speed, now_s = assumed(), 0.0
    for gap_s, seen_bytes, seconds in seen:
        now_s += gap_s
        speed.observe(now_s, seen_bytes, seconds)
    assert 0 <= speed.latency_s <= speed.completion_s(ahead_bytes) <= speed.completion_s(2 * ahead_bytes) < float("inf")
    assert speed.bandwidth_bytes_per_s > 0
