"""What part of the openings each drive should get."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.wear.shares import DEFAULT_POLICY, SharePolicy, target_shares
from meshfusion.jbof.wear.state import DriveState
from tests.jbof.wear.drives import drive, shelves


def test_equal_wear_means_shares_by_endurance() -> None:
    drives = [drive("A", rated_endurance_bytes=10**15), drive("B", rated_endurance_bytes=3 * 10**15)]
    assert target_shares(drives) == pytest.approx({"A": 0.25, "B": 0.75})


def test_a_point_of_wear_is_worth_the_gain() -> None:
    drives = [drive("A", percentage_used=10), drive("B", percentage_used=11)]
    assert target_shares(drives) == pytest.approx({"A": 0.5 * 1.25, "B": 0.5 * 0.75})


def test_a_young_drive_takes_no_more_than_the_limit() -> None:
    drives = [drive("A"), *(drive(name, percentage_used=40) for name in "BCDEFGHIJK")]
    shares = target_shares(drives)
    assert shares["A"] == pytest.approx(4 / 11)
    assert shares["B"] == pytest.approx((1 - 4 / 11) / 10)


def test_a_worn_drive_goes_on_taking_some() -> None:
    shares = target_shares([drive("A", percentage_used=90), drive("B"), drive("C")])
    assert shares["A"] == pytest.approx(0.25 / 3)
    assert shares["B"] == shares["C"]


def test_an_empty_drive_takes_more_until_it_is_full() -> None:
    full = [drive(name, free_segments=0) for name in "ABC"]
    shares = target_shares([*full, drive("D", free_segments=100, reclaimable_segments=0)])
    # The mean is a quarter free: factors 0.75 and 1.75.
    assert shares == pytest.approx({"A": 0.1875, "B": 0.1875, "C": 0.1875, "D": 0.4375})


def test_drives_that_take_nothing_have_no_share_and_no_weight() -> None:
    drives = [drive("A"), drive("B"), drive("C", accepts_segments=False, percentage_used=80)]
    assert target_shares(drives) == pytest.approx({"A": 0.5, "B": 0.5})
    assert target_shares(drives[2:]) == {}


def test_two_drives_with_one_id_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="one id"):
        target_shares([drive("A"), drive("A")])


@given(shelves())
def test_shares_sum_to_one_within_the_limits(drives: list[DriveState]) -> None:
    shares = target_shares(drives)
    takers = [state for state in drives if state.accepts_segments]
    assert set(shares) == {state.drive_id for state in takers}
    if not takers:
        return
    assert sum(shares.values()) == pytest.approx(1)
    endurance = sum(state.rated_endurance_bytes for state in takers)
    for state in takers:
        factor = shares[state.drive_id] * endurance / state.rated_endurance_bytes
        assert DEFAULT_POLICY.least_factor - 1e-6 <= factor <= DEFAULT_POLICY.most_factor + 1e-6


@given(shelves(), st.floats(0.01, 2))
def test_less_worn_drives_get_at_least_the_factor_of_more_worn_ones(drives: list[DriveState], gain: float) -> None:
    shares = target_shares(drives, SharePolicy(gain_per_point=gain, space_gain=0))
    takers = [state for state in drives if state.accepts_segments]
    by_wear = sorted(takers, key=lambda state: state.wear_points)
    factors = [shares[state.drive_id] / state.rated_endurance_bytes for state in by_wear]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(factors))
