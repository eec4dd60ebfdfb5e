"""What is known of a drive's wear."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.wear.state import DriveState, rated_endurance_bytes
from tests.jbof.wear.drives import drive

PIB = 10**15


@pytest.mark.parametrize(
    ("percentage_used", "bytes_written", "expected"),
    [
        (0, 0, 0.0),
        (0, PIB // 200, 0.5),  # SMART counts whole percent, the bytes tell the rest
        (12, PIB // 8, 12.5),
        (30, PIB // 10, 30.0),  # it was worn by more than its hosts wrote
        (10, PIB // 2, 11.0),  # it wears less than rated
        (255, PIB, 255.0),
    ],
)
def test_wear_is_smart_refined_by_bytes(percentage_used: int, bytes_written: int, expected: float) -> None:
    state = drive(percentage_used=percentage_used, bytes_written=bytes_written, rated_endurance_bytes=PIB)
    assert state.wear_points == pytest.approx(expected)


@given(st.integers(0, 255), st.integers(0, 3 * PIB))
def test_wear_never_leaves_smarts_percent(percentage_used: int, bytes_written: int) -> None:
    state = drive(percentage_used=percentage_used, bytes_written=bytes_written, rated_endurance_bytes=PIB)
    assert percentage_used <= state.wear_points <= percentage_used + 1


def test_endurance_of_a_rating() -> None:
    """7.68 TB at 1 DWPD over 5 years are 14,016 TBW: what makers print for such drives."""
    assert rated_endurance_bytes(capacity_bytes=7_680 * 10**9, drive_writes_per_day=1, rated_years=5) == 14_016 * 10**12
    assert rated_endurance_bytes(capacity_bytes=1_600 * 10**9, drive_writes_per_day=3, rated_years=5) == 8_760 * 10**12


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment_count": 0},
        {"free_segments": -1},
        {"reclaimable_segments": -1},
        {"free_segments": 60, "reclaimable_segments": 41},
        {"percentage_used": 256},
        {"percentage_used": -1},
        {"rated_endurance_bytes": 0},
    ],
)
def test_what_cannot_be_is_our_mistake(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        drive(**wrong)
    assert isinstance(drive(), DriveState)
