"""How fast a drive is written now."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.wear.rate import WriteRate

HOUR_S, DAY_S = 3600.0, 86_400.0
GB, TB = 10**9, 10**12


def after(*seen: tuple[float, int]) -> WriteRate:
    rate = WriteRate()
    for now_s, written_bytes in seen:
        rate.saw(now_s, written_bytes)
    return rate


def test_an_hour_must_be_seen() -> None:
    assert WriteRate().bytes_per_day is None
    assert after((0.0, 0), (HOUR_S - 1, GB)).bytes_per_day is None
    assert after((0.0, 0), (HOUR_S, GB)).bytes_per_day == pytest.approx(24 * GB)


def test_what_is_older_than_a_day_does_not_count() -> None:
    minutes = [(60.0 * i, 1000 * GB * min(i, 60)) for i in range(4 * 24 * 60)]  # an hour's burst, then nothing
    assert after(*minutes[:120]).bytes_per_day == pytest.approx(24 * 60_000 * GB / 119 * 60, rel=0.01)
    assert after(*minutes).bytes_per_day == 0.0


@given(st.lists(st.tuples(st.floats(1.0, 5000.0), st.integers(0, TB)), min_size=2, max_size=80))
def test_the_rate_is_that_of_a_window_of_a_day_or_what_was_seen(steps: list[tuple[float, int]]) -> None:
    now_s, written = 0.0, 0
    seen = [(now_s, written)]
    for step_s, step_bytes in steps:
        now_s, written = now_s + step_s, written + step_bytes
        seen.append((now_s, written))
    found = after(*seen).bytes_per_day
    # Among the rates from every sample that is old enough to the last one there is this one.
    windows = [(now_s - at_s, written - at) for at_s, at in seen if now_s - at_s >= HOUR_S]
    rates = [moved / long_s * DAY_S for long_s, moved in windows if long_s < DAY_S + 600.0 + 5000.0]
    assert found is None if now_s < HOUR_S else any(math.isclose(found or 0.0, rate) for rate in rates)


def test_another_drives_counter_begins_anew() -> None:
    rate = after((0.0, 50 * TB), (HOUR_S, 51 * TB), (HOUR_S + 60, TB))
    assert rate.bytes_per_day is None
    rate.saw(2 * HOUR_S + 60, 2 * TB)
    assert rate.bytes_per_day == pytest.approx(24 * TB)


def test_months_left() -> None:
    # 14,016 TB rated (7.68 TB, 1 DWPD over five years); half of it is used; 7.68 TB a day: half of five years.
    rate = after((0.0, 7_008 * TB), (HOUR_S, 7_008 * TB + 320 * GB))
    assert rate.months_left(50, 14_016 * TB) == pytest.approx(30, rel=0.001)
    assert rate.months_left(50, 0) == pytest.approx(30, rel=0.001), "what was written for each percent stands for it"
    assert rate.months_left(0, 0) is None
    assert rate.months_left(100, 0) == 0.0
    assert after((0.0, TB), (HOUR_S, TB)).months_left(1, 14_016 * TB) == math.inf
    assert WriteRate().months_left(50, 14_016 * TB) is None
