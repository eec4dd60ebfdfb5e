from __future__ import annotations

import pytest

from meshfusion.host.connector.estimate import (
    PREFILL_STEP_TOKENS_MIN,
    REFUSALS_BETWEEN_PROBES,
    SAMPLES,
    SAMPLES_MIN,
    EstimateOptions,
    LoadEstimate,
)

OPTIONS = EstimateOptions(
    load_overhead_s=0.01, abandon_factor=2.0, abandon_floor_s=1.0, assumed_load_bytes_per_s=1_000_000.0
)


def test_until_both_rates_are_known_a_load_is_worth_it() -> None:
    estimate = LoadEstimate(OPTIONS)
    assert estimate.is_load_worth(1, 1 << 40)
    for _ in range(SAMPLES_MIN):
        estimate.observe_load(1, 100.0)
    assert estimate.is_load_worth(1, 1 << 40)
    for _ in range(SAMPLES_MIN - 1):
        estimate.observe_prefill(1000, 0.001)
        assert estimate.is_load_worth(1, 1 << 40)
    estimate.observe_prefill(1000, 0.001)
    assert not estimate.is_load_worth(1, 1 << 40)


def test_now_and_then_a_load_is_let_through_to_be_measured() -> None:
    estimate = LoadEstimate(OPTIONS)
    for _ in range(SAMPLES_MIN):
        estimate.observe_load(1000, 1.0)
        estimate.observe_prefill(1000, 0.001)
    answers = [estimate.is_load_worth(1, 1_000_000) for _ in range(2 * (REFUSALS_BETWEEN_PROBES + 1))]
    assert [i for i, worth in enumerate(answers) if worth] == [16, 33]


def test_the_faster_way_wins() -> None:
    estimate = LoadEstimate(OPTIONS)
    for _ in range(SAMPLES_MIN):
        estimate.observe_load(2_000_000, 1.0)  # 2 MB/s
        estimate.observe_prefill(1000, 10.0)  # 100 tokens/s
    # 100 tokens take 1 s to recompute; in 1 s less 10 ms, 1.98 MB can be loaded.
    assert estimate.is_load_worth(100, 1_970_000)
    assert not estimate.is_load_worth(100, 1_990_000)
    assert not estimate.is_load_worth(1, 1)  # 10 ms to recompute, as much as the overhead alone


def test_expected_and_allowed_time() -> None:
    estimate = LoadEstimate(OPTIONS)
    assert estimate.load_s(3_000_000) == pytest.approx(3.01)  # the assumed rate
    for _ in range(SAMPLES_MIN):
        estimate.observe_load(10_000_000, 1.0)
    assert estimate.load_s(3_000_000) == pytest.approx(0.31)
    assert estimate.abandon_after_s(30_000_000) == pytest.approx(2 * 3.01)
    assert estimate.abandon_after_s(1) == 1.0


def test_one_outlier_among_many_does_not_count_and_old_samples_go() -> None:
    estimate = LoadEstimate(OPTIONS)
    for _ in range(4):
        estimate.observe_load(1_000_000, 1.0)
    estimate.observe_load(1_000_000, 1000.0)
    assert estimate.load_s(1_000_000) == pytest.approx(1.01)
    for _ in range(SAMPLES):
        estimate.observe_load(4_000_000, 1.0)
    assert estimate.load_s(1_000_000) == pytest.approx(0.26)


def test_steps_and_loads_that_tell_nothing_are_left_out() -> None:
    estimate = LoadEstimate(OPTIONS)
    estimate.observe_prefill(PREFILL_STEP_TOKENS_MIN - 1, 100.0)
    estimate.observe_prefill(1000, 0.0)
    estimate.observe_load(0, 1.0)
    estimate.observe_load(1000, 0.0)
    assert estimate.is_load_worth(1, 1 << 40)
    assert estimate.load_s(1_000_000) == pytest.approx(1.01)
