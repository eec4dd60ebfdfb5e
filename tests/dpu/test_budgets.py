"""What may be written to a pool's drives in a day: which bounds are refused, and how long one that is spent takes."""

from __future__ import annotations

import pytest

from meshfusion.dpu.budgets import Budgets, budget_problem, spent_budgets
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.policy.write_budget import WriteBudget
from meshfusion.jbof.segment_geometry import SegmentGeometry

SEGMENT_BYTES = 64 << 20


def drive(number: int, segment_count: int) -> SegmentGeometry:
    return SegmentGeometry(4096, 256, SEGMENT_BYTES // 4096, segment_count, number)


def test_a_bound_must_hold_a_segment_at_once() -> None:
    """A quarter of a day's bytes is there at once: of 40 segments and 0.1 writes a day that is one segment."""
    assert budget_problem(0.1, [drive(0, 40)]) is None
    found = budget_problem(0.0999, [drive(0, 40)])
    assert found is not None
    assert "drive 0 may be written in a day is less than a segment of 64MiB" in found.problem
    assert found.fix.startswith("use 0.1 or more")
    assert budget_problem(0.0999, []) is None


def test_the_fix_is_enough_for_every_drive() -> None:
    drives = [drive(0, 40), drive(1, 8), drive(2, 400)]
    found = budget_problem(0.01, drives)
    assert found is not None
    assert "drive 1" in found.problem
    assert found.fix.startswith("use 0.5 or more")
    assert budget_problem(0.5, drives) is None
    with pytest.raises(ConfigError) as refused:
        Budgets(0.01, {}).check(*drives)
    assert refused.value.message == f"medium.drive_writes_per_day = 0.01: {found.problem}"
    assert refused.value.next_step == found.fix
    Budgets(None, {}).check(*drives)


@pytest.mark.parametrize("drive_writes_per_day", [0.5, 1.0, 3.0])
def test_a_spent_budget_is_back_when_it_is_said_to_be(drive_writes_per_day: float) -> None:
    """Against the bucket itself, minute by minute."""
    drives = [drive(0, 40), drive(1, 100)]
    told = spent_budgets(drives)
    first_s = told.first_segment_s_at_1_dwpd / drive_writes_per_day
    budgets = [Budgets(drive_writes_per_day, {0: 0, 1: 0}).of(one, 0.0) for one in drives]
    buckets = [budget for budget in budgets if isinstance(budget, WriteBudget)]
    assert not any(bucket.take(SEGMENT_BYTES, first_s - 1) for bucket in buckets)
    assert [bucket.take(SEGMENT_BYTES, first_s + 1) for bucket in buckets] == [False, True], "on the larger drive"
    fresh = Budgets(drive_writes_per_day, {0: 0}).of(drives[0], 0.0)
    assert fresh is not None
    assert fresh.level(told.whole_s - 60) < 1
    assert fresh.level(told.whole_s + 1) == 1
    assert told.whole_s == pytest.approx(8 * 3600), "a quarter at once, and three quarters in 24 hours"
