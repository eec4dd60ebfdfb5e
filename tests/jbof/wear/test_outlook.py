"""How even wear can become at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.wear.outlook import WearPosition, least_spread_points

ANY_BYTES = 1e9


def position(wear_points: float, most_bytes: float = ANY_BYTES, endurance: int = 1000) -> WearPosition:
    return WearPosition(wear_points, endurance, most_bytes)


@pytest.mark.parametrize(
    ("drives", "written_bytes", "expected"),
    [
        ([position(0), position(30)], 0, 30),
        ([position(0), position(30)], 100, 20),  # 100 of 1000 bytes are 10 points, all to the young one
        ([position(0), position(30)], 300, 0),
        ([position(0), position(30)], 900, 0),
        ([position(0, most_bytes=200), position(30)], 500, 40),  # it may not take more: 20 against 60
        ([position(0), position(10), position(30)], 300, 10),  # both to 20
        ([position(0, endurance=2000), position(10)], 200, 0),
        ([position(5)], 100, 0),
    ],
)
def test_known_values(drives: list[WearPosition], written_bytes: float, expected: float) -> None:
    assert least_spread_points(drives, written_bytes) == pytest.approx(expected, abs=1e-6)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 500), st.integers(100, 2000), st.floats(0, 1)), min_size=1, max_size=6
    )
)
def test_no_other_division_is_more_even(drives: list[tuple[float, float, int, float]]) -> None:
    positions = [WearPosition(wear, endurance, most) for wear, most, endurance, _ in drives]
    division = [share * most for _, most, _, share in drives]
    worn = [one.worn_by(part) for one, part in zip(positions, division, strict=True)]
    assert least_spread_points(positions, sum(division)) <= max(worn) - min(worn) + 1e-6
