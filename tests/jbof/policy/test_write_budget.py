"""The budget of writes: over any 24 hours, whatever is asked for, no more than a day's is given out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.policy.write_budget import DAY_S, WriteBudget, months_left, used_share_per_day

ASKS = st.lists(
    st.tuples(st.one_of(st.just(0.0), st.floats(0, 3 * DAY_S)), st.integers(0, 400)), min_size=1, max_size=60
)


@given(st.integers(1, 1000), ASKS)
def test_no_window_of_24_hours_gets_more_than_a_day(bytes_per_day: int, asks: list[tuple[float, int]]) -> None:
    budget = WriteBudget(bytes_per_day, 0.0)
    now_s = 0.0
    given_out: list[tuple[float, int]] = []
    for wait_s, length_bytes in asks:
        now_s += wait_s
        # All that is left is asked for too: the worst that a writer can do.
        for length in (length_bytes, budget.left_bytes(now_s)):
            if budget.take(length, now_s):
                given_out.append((now_s, length))
    for start_s, _ in given_out:
        window = sum(length for at_s, length in given_out if start_s <= at_s <= start_s + DAY_S)
        assert window <= bytes_per_day * (1 + 1e-9)


def test_a_steady_writer_gets_three_quarters_and_an_idle_drive_a_quarter_at_once() -> None:
    budget = WriteBudget(8640.0, 0.0)
    assert budget.level(0.0) == 1.0
    assert budget.take(2160, 0.0)
    assert not budget.take(1, 0.0)
    assert budget.level(0.0) == 0.0
    assert budget.left_bytes(1000.0) == 75  # 6480 bytes in 86400 s
    assert budget.left_bytes(100 * DAY_S) == 2160


def test_a_clock_that_steps_back_brings_nothing() -> None:
    budget = WriteBudget(86400.0, 1000.0, level_bytes=0.0)
    assert budget.left_bytes(0.0) == 0
    assert budget.left_bytes(1000.0) == 0
    assert budget.left_bytes(1100.0) == 75


def test_a_restart_does_not_fill_the_bucket() -> None:
    before = WriteBudget(1000.0, 0.0)
    assert before.take(250, 0.0)
    after = WriteBudget(1000.0, 1.0, level_bytes=before.left_bytes(1.0))
    assert after.left_bytes(1.0) == 0


def test_of_a_drive() -> None:
    assert WriteBudget.of_drive(1000, 2.0, 0.0).left_bytes(0.0) == 500


def test_months_of_life() -> None:
    # 1 DWPD for 5 years is the rating of many drives: at that rate a new one lasts 60 months.
    rated_bytes = 1e12 * 365.25 * 5
    a_day = used_share_per_day(1e12, rated_bytes)
    assert months_left(0, a_day) == pytest.approx(60)
    assert months_left(50, a_day) == pytest.approx(30)
    assert months_left(120, a_day) == 0
    assert months_left(0, used_share_per_day(1e12, rated_bytes, 2.0)) == pytest.approx(30)
    assert months_left(10, 0.0) == math.inf
    assert months_left(100, 0.0) == 0
