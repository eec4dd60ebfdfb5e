"""Summaries of segments that are due are written, a few at once. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshfusion.dpu.store.effects import SummarizeSegment
from meshfusion.dpu.store.save_health import SAVE_RETRY_S
from meshfusion.dpu.store.segments import Segments
from meshfusion.dpu.store.steps import Pending, Step, Transactions
from meshfusion.jbof.segments import SegmentRecord

SUMMARIES_AT_ONCE = 16  # what waits behind them is held up no longer than that takes


class Summarizing:
    """A summary that is not there costs a longer rebuild and nothing else: after a failure it is tried again later."""

    def __init__(self, segments: Segments, transactions: Transactions, *, now_s: float) -> None:
        self._segments = segments
        self._transactions = transactions
        self._from_s = now_s
        self.counters: Counter[str] = Counter()

    def step(self, now_s: float) -> Step[None]:
        due = self._segments.settled()[:SUMMARIES_AT_ONCE]
        if not due or now_s < self._from_s:
            return Step(None)
        for record in due:
            self._segments.summarizing(record)
        effects = tuple(SummarizeSegment(record) for record in due)
        return self._transactions.begin(None, effects, Pending(summarizing=due))

    def worked(self, records: Iterable[SegmentRecord]) -> None:
        for record in records:
            self._segments.summarized(record, worked=True)
            self.counters["segments_summarized"] += 1

    def failed(self, now_s: float, records: Iterable[SegmentRecord]) -> None:
        self._from_s = now_s + SAVE_RETRY_S
        for record in records:
            self._segments.summarized(record, worked=False)
