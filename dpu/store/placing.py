"""Where shards go: extents in open segments, and the segments that are opened for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from meshfusion.dpu.api.types import Extent
from meshfusion.dpu.store.effects import Effect, NoteBudget, OpenSegment
from meshfusion.dpu.store.segments import Places, Segments
from meshfusion.dpu.store.steps import AnyReply, Pending, Step, Transactions
from meshfusion.jbof.pool_addresses import drive_of_segment, namespace_of
from meshfusion.jbof.segments import SegmentRecord


class Placing:
    """Knows which openings are not durable yet: no extent in such a segment may leave before its ticket is."""

    def __init__(self, segments: Segments, transactions: Transactions) -> None:
        self._segments = segments
        self._transactions = transactions
        self._opening: dict[int, int] = {}  # segment -> ticket of its opening
        self.counters: Counter[str] = Counter()

    def place(
        self,
        now_s: float,
        lba_counts: Sequence[int],
        opened: list[SegmentRecord],
        may_reclaim: Callable[[int], bool],
        drives: Collection[int] | None = None,
    ) -> tuple[Extent, ...] | None:
        """Extents of so many blocks each, all of them or None. Segments opened for that are added to ``opened``.
        ``drives``: those that the writer reaches; None: all."""
        places: Places = self._segments if drives is None else self._segments.within(drives)
        if not places.can_place(now_s, lba_counts, may_reclaim):  # nothing is to be reclaimed in vain
            return None
        extents: list[Extent] = []
        for lba_count in lba_counts:
            extent = self._allocate(places, now_s, lba_count, opened, may_reclaim)
            if extent is not None:
                extents.append(extent)
                self._segments.pin_write(extent.segment)  # it must not be reclaimed for the next shard
        for extent in extents:
            self._segments.unpin_write(extent.segment)
        return tuple(extents) if len(extents) == len(lba_counts) else None

    def step(self, now_s: float, reply: AnyReply, pending: Pending, extents: Iterable[Extent]) -> Step[AnyReply]:
        """The reply leaves when the openings that its ``extents`` stand on are durable: this step's own, and those of
        earlier ones."""
        after = max((self._opening.get(extent.segment, 0) for extent in extents), default=0)
        if not pending.opened:
            return Step(reply, after=after)
        step = self._transactions.begin(reply, self._effects_of(now_s, pending.opened), pending, after=after)
        for record in pending.opened:
            self._opening[record.segment] = step.ticket
        return step

    def opened(self, ticket: int, record: SegmentRecord) -> None:
        self._segments.opened(record)
        if self._opening.get(record.segment) == ticket:
            del self._opening[record.segment]

    def failed(self, record: SegmentRecord) -> None:
        """Whatever was placed there is given back already."""
        self._opening.pop(record.segment, None)
        self._segments.open_failed(record)

    def _effects_of(self, now_s: float, opened: Iterable[SegmentRecord]) -> tuple[Effect, ...]:
        """Of these openings, with what is left of the budgets that they were counted against: in one transaction, so
        that no restart forgets an opening."""
        budgets = self._segments.budgets_left(now_s).items()
        return (*(OpenSegment(record) for record in opened), *(NoteBudget(number, left) for number, left in budgets))

    def _allocate(
        self,
        places: Places,
        now_s: float,
        lba_count: int,
        opened: list[SegmentRecord],
        may_reclaim: Callable[[int], bool],
    ) -> Extent | None:
        allocation = places.allocate(lba_count)
        record = None
        if allocation is None:
            record = places.open_next(now_s, may_reclaim)
        if allocation is None and record is None:
            allocation = places.allocate_elsewhere(lba_count)
        if allocation is None and record is None:
            record = places.open_elsewhere(now_s, may_reclaim)
        if record is not None:
            opened.append(record)
            self.counters["segments_opened"] += 1
            allocation = places.allocate(lba_count)
            assert allocation is not None
        if allocation is None:
            return None
        namespace = namespace_of(drive_of_segment(allocation.segment))
        return Extent(namespace, allocation.segment, allocation.lba, allocation.lba_count, allocation.generation)
