"""Five years of a shelf of drives: even wear with ours and not with simpler ways; no drive above its writes a day."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest

from meshfusion.jbof.wear.outlook import WearPosition, least_spread_points
from meshfusion.tools.bench.fleet import (
    HOURS_PER_DAY,
    HOURS_PER_YEAR,
    SEGMENT_BYTES,
    Drive,
    DriveModel,
    Event,
    History,
    Placement,
    ReadOnly,
    by_wear,
    most_free,
    round_robin,
    simulate,
)
from meshfusion.tools.bench.fleet_wear import EVENTS, SHELF, capacity_bytes

AIM_POINTS = 2.0


def five_years(place: Placement, drive_writes_per_day: float, events: tuple[Event, ...] = EVENTS) -> History:
    return simulate(
        SHELF,
        place,
        years=5,
        written_bytes_per_hour=capacity_bytes(SHELF) * drive_writes_per_day / HOURS_PER_DAY,
        events=events,
    )


def most_in_24_hours(drive: Drive) -> int:
    """Of all windows of 24 hours, from the log of what was written in each hour."""
    hours = max(drive.log) + 1
    sums = [0, *accumulate(drive.log.get(hour, 0) for hour in range(hours))]
    return max(sums[min(start + HOURS_PER_DAY, hours)] - sums[start] for start in range(hours))


def test_wear_is_even_after_five_years() -> None:
    """From 0 to 30 points, with drives of three sizes, one that turns read-only and one that is replaced."""
    history = five_years(by_wear(), 0.4)
    assert history.spread_points[0] == pytest.approx(30, abs=0.5)
    assert history.spread_points[-1] <= AIM_POINTS
    assert history.refused == 0
    settled = history.level_after_days(AIM_POINTS)
    assert settled is not None
    assert settled < 4 * 365
    # What a host sees agrees: SMART's whole percents lie as close.
    seen = [drive.state(0).percentage_used for drive in history.drives if not drive.is_read_only]
    assert max(seen) - min(seen) <= AIM_POINTS
    for drive in (*history.drives, *history.gone):
        assert most_in_24_hours(drive) <= drive.model.budget_bytes
    (read_only,) = [drive for drive in history.drives if drive.is_read_only]
    assert max(read_only.log) < HOURS_PER_YEAR


@pytest.mark.parametrize("naive", [round_robin, most_free])
def test_simpler_ways_leave_wear_apart(naive: Callable[[], Placement]) -> None:
    history = five_years(naive(), 0.4)
    assert history.spread_points[-1] > 10 * AIM_POINTS


def test_no_drive_exceeds_its_budget_when_more_is_asked_than_all_may_take() -> None:
    history = simulate(SHELF, by_wear(), years=0.1, written_bytes_per_hour=capacity_bytes(SHELF) * 1.5 / HOURS_PER_DAY)
    assert history.refused > 0
    for drive in history.drives:
        # All of them are used to their limit, but for the part of a segment, and none beyond.
        assert drive.model.budget_bytes - SEGMENT_BYTES < most_in_24_hours(drive) <= drive.model.budget_bytes


def shelf_of(*wear_points: float) -> list[DriveModel]:
    return [
        DriveModel(f"drive {index}", ("enclosure",), 7_680 * 10**9, wear_points=wear)
        for index, wear in enumerate(wear_points)
    ]


def least_possible(models: list[DriveModel], days: float, written_bytes: float) -> float:
    positions = [WearPosition(m.wear_points, m.endurance_bytes, days * m.budget_bytes) for m in models]
    return least_spread_points(positions, written_bytes)


def test_it_takes_at_most_twice_the_time_that_any_way_would() -> None:
    """Two drives, 20 points apart, at 0.3 writes a day: the more worn one goes on taking a part."""
    models = shelf_of(0, 20)
    per_day = 0.3 * capacity_bytes(models)
    soonest = next(day for day in range(5 * 365) if least_possible(models, day, per_day * day) <= AIM_POINTS)
    history = simulate(models, by_wear(), years=3, written_bytes_per_hour=per_day / HOURS_PER_DAY)
    settled = history.level_after_days(AIM_POINTS)
    assert settled is not None
    assert soonest <= settled <= 2 * soonest


def test_a_new_drive_catches_up_as_far_as_its_budget_lets_it() -> None:
    """One of four drives was replaced when the others were at 40 points: a year later no way could have got it nearer
    than 24, since a year of one drive write a day is a fifth of its rated life."""
    models = shelf_of(0, 40, 40, 40)
    per_day = 0.4 * capacity_bytes(models)
    history = simulate(models, by_wear(), years=1, written_bytes_per_hour=per_day / HOURS_PER_DAY)
    assert least_possible(models, 365, per_day * 365) == pytest.approx(24, abs=0.01)
    # The model's segments are an eighth of a drive: each waits up to two hours for room in the budget.
    assert 24 <= history.spread_points[-1] <= 26
    assert history.refused == 0


def test_the_same_inputs_give_the_same_history() -> None:
    def some() -> History:
        return simulate(
            SHELF, by_wear(), years=0.2, written_bytes_per_hour=1e12, events=[ReadOnly(100, SHELF[0].drive_id)]
        )

    assert some() == some()
