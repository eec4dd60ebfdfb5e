"""What ranks report, in any order."""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import pytest

from meshfusion.host.connector.vllm.rank_reports import RankReports


class Said(NamedTuple):
    rank: int
    what: str = ""


def test_all_reports_come_by_rank_with_the_last_of_them() -> None:
    for order in permutations(range(3)):
        reports = RankReports[str, Said](3)
        answers = [reports.add("a", Said(rank)) for rank in order]
        assert answers == [None, None, [Said(0), Said(1), Said(2)]]
        assert len(reports) == 0


def test_orders_are_apart_and_may_be_forgotten() -> None:
    reports = RankReports[str, Said](2)
    assert reports.add("a", Said(0, "of a")) is None
    assert reports.add("b", Said(1, "of b")) is None
    assert reports.add("b", Said(0)) == [Said(0), Said(1, "of b")]
    assert len(reports) == 1
    reports.forget("a")
    reports.forget("never there")
    assert len(reports) == 0
    assert reports.add("a", Said(0, "again")) is None


@pytest.mark.parametrize("report", [Said(0, "twice"), Said(2), Said(-1)])
def test_a_rank_says_it_once_and_is_one_of_them(report: Said) -> None:
    reports = RankReports[str, Said](2)
    reports.add("a", Said(0))
    with pytest.raises(AssertionError):
        reports.add("a", report)
