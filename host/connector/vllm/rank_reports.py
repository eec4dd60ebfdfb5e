"""What several ranks report of one order, until all have. Each says it once, in any order."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class OfRank(Protocol):
    @property
    def rank(self) -> int: ...


Order = TypeVar("Order", bound=Hashable)
Report = TypeVar("Report", bound=OfRank)


class RankReports(Generic[Order, Report]):
    """``Order``: what tells orders apart that are under way at the same time."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._reports: dict[Order, dict[int, Report]] = {}

    def add(self, order: Order, report: Report) -> list[Report] | None:
        """All reports of the order, by rank, when this is the last of them; they are then forgotten here."""
        reports = self._reports.setdefault(order, {})
        assert 0 <= report.rank < self._rank_count, report
        assert report.rank not in reports, f"reported twice: {report}"
        reports[report.rank] = report
        if len(reports) < self._rank_count:
            return None
        del self._reports[order]
        return [reports[rank] for rank in range(self._rank_count)]

    def forget(self, order: Order) -> None:
        self._reports.pop(order, None)

    def __len__(self) -> int:
        """Orders of which some ranks have reported, and others have not."""
        return len(self._reports)
