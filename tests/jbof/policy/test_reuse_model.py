"""The learned rates and what is made of them, against lives with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.policy.reuse_classes import INHERITED
from meshfusion.jbof.policy.reuse_model import AGE_EDGES_S, AGES, ReuseModel, age_bins

A, B = 3, 40


def fed(model: ReuseModel, class_id: int, ages_s: list[float], count: int) -> None:
    classes = np.full(len(ages_s), class_id, np.uint8)
    ages = np.array(ages_s)
    for _ in range(count):
        model.exposed(classes, np.zeros(len(ages)), ages)
        model.reused(classes, ages)


def test_a_constant_rate_is_found() -> None:
    """With exponential times between uses the best use of room is the rate itself, at any age."""
    rate = 1 / 50
    times_s = np.random.default_rng(1).exponential(1 / rate, 20000)
    model = ReuseModel()
    classes = np.full(len(times_s), A, np.uint8)
    model.exposed(classes, np.zeros(len(times_s)), times_s)
    model.reused(classes, times_s)
    model.refresh(0.0)
    model.refresh(0.0)  # rewards take the gain of the refresh before
    first = model.index[A, : age_bins(np.array([100.0]))[0]]
    reward = 1 + 0.7 * model.gain[B, 0]
    assert first.max() / first.min() < 1.2
    assert first[0] / rate == pytest.approx(reward, rel=0.35)


def test_what_is_reused_soon_is_worth_more() -> None:
    model = ReuseModel()
    fed(model, A, [10.0, 12.0], 5000)
    fed(model, B, [1000.0, 1200.0], 5000)
    model.refresh(1e-2)
    assert model.index[A, 0] > 10 * model.index[B, 0]
    assert model.gain[A, 0] > model.gain[B, 0]
    assert 11.0 < model.stay_s[A] <= 16.0  # gone 12 s after its last use, a second costs 0.01 uses
    assert model.stay_s[B] == 0.0  # 1000 s of room cost ten uses
    assert model.gain[B, 0] == 0.0


def test_what_was_found_says_nothing_about_others() -> None:
    model, untouched = ReuseModel(), ReuseModel()
    fed(model, INHERITED, [100.0], 5000)
    for _ in range(2):  # rewards take the gain of the refresh before
        model.refresh(0.0)
        untouched.refresh(0.0)
    assert model.index[A].tolist() == untouched.index[A].tolist()
    at_100_s = age_bins(np.array([99.0]))[0]
    assert model.index[INHERITED, at_100_s] > 3 * untouched.index[INHERITED, at_100_s]


def test_room_that_costs_more_makes_gains_smaller() -> None:
    model = ReuseModel()
    fed(model, A, [100.0], 5000)
    gains = []
    for price_per_s in (0.0, 1e-3, 1e-2, 1.0):
        for _ in range(5):  # rewards take the gain of the refresh before
            model.refresh(price_per_s)
        gains.append(float(model.gain[A, 0]))
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] == 0.0


def test_before_anything_is_known_the_older_is_worth_less() -> None:
    index = ReuseModel().index
    assert (np.diff(index, axis=1) <= 0).all()
    assert (ReuseModel().gain[:, 0] > 0.5).all()


@given(st.lists(st.tuples(st.floats(0, 20000), st.floats(0, 20000)), min_size=1, max_size=30))
def test_exposure_is_the_overlap_with_each_bin(spans: list[tuple[float, float]]) -> None:
    low = np.array([min(span) for span in spans])
    high = np.array([max(span) for span in spans])
    model = ReuseModel()
    model.exposed(np.full(len(spans), A, np.uint8), low, high)
    for age in range(AGES):
        edges = AGE_EDGES_S[age], AGE_EDGES_S[age + 1]
        overlap = sum(max(0.0, min(h, edges[1]) - max(lo, edges[0])) for lo, h in zip(low, high, strict=True))
        assert model._exposure_s[A, age] == pytest.approx(overlap, abs=1e-6)
    assert model._exposure_s.sum() == pytest.approx(model._exposure_s[A].sum())
