"""Segments of one drive: who is free, open, sealed; generations; append-only allocation; the choice of a victim.

A plain state machine: no I/O, no clock. It keeps rule 2: the generation of a segment is increased, durably, before
any of its blocks is handed out again. Callers make the :class:`SegmentRecord` that an opening returns durable, in the
index and as the segment's header on the medium, then call :meth:`SegmentTable.opened`, and only then may extents of
that segment leave the service.

The first block of a segment is its header's. At its end room is kept for its summary, which is due once the segment is
*settled*: sealed, and no writer left, so that what is committed in it can only become less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice, takewhile

from meshfusion.jbof.segment_choice import Filled, MayReclaim, next_victim, openings_for, victims
from meshfusion.jbof.segment_format import SEGMENT_HEADER_LBAS
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.segment_states import (
    UNVALUED,
    Allocation,
    Segment,
    SegmentCounts,
    SegmentRecord,
    SegmentState,
    SegmentTally,
    SummaryState,
)


class SegmentTable:
    """All segments of one drive.

    ``records`` are the durable ones; a segment without a record was never used. A segment that was open when the
    service stopped comes back sealed: a former writer may still own space behind its last committed chunk (rule 3).
    Nothing more can be committed in it, so its summary is due.
    """

    def __init__(self, geometry: SegmentGeometry, records: Iterable[SegmentRecord] = ()) -> None:
        self.geometry = geometry
        self._segments = {
            i: Segment(SegmentState.FREE, generation=0, opened_seq=0, next_lba=geometry.first_lba(i))
            for i in geometry.segments
        }
        self._in_state = Counter({SegmentState.FREE: len(self._segments)})
        self.read_pinned_count = 0  # segments that some lease pins
        self._current: int | None = None
        self._last_seq = 0
        self._due: set[int] = set()  # segments whose summary is due
        for record in records:
            assert record.segment in geometry.segments, record
            segment = self._segments[record.segment]
            assert not segment.generation, f"two records for segment {record.segment}"
            segment.generation = record.generation
            if not record.opened_seq:
                continue
            segment.opened_seq = record.opened_seq
            segment.lifetime_class = record.lifetime_class
            self._last_seq = max(self._last_seq, record.opened_seq)
            self._enter(segment, SegmentState.SEALED)
            segment.summary = SummaryState.WRITTEN if record.is_summarized else SummaryState.DUE
            if not record.is_summarized:
                self._due.add(record.segment)
        self._free = [i for i, s in self._segments.items() if s.state is SegmentState.FREE]
        self._free.reverse()  # pop() hands out the lowest index first

    # ---- reading -------------------------------------------------------------------------------------------------

    def generation(self, segment: int) -> int:
        return self._segments[segment].generation

    def is_readable(self, segment: int, generation: int) -> bool:
        """Do extents of ``segment`` under ``generation`` still mean what they meant when they were written?"""
        found = self._segments.get(segment)
        if found is None:
            return False
        return found.generation == generation and found.state in (SegmentState.OPEN, SegmentState.SEALED)

    def counts(self) -> SegmentCounts:
        """Kept with every change: it is asked for every second, of very many segments."""
        return SegmentCounts(
            free=self._in_state[SegmentState.FREE],
            open=self._in_state[SegmentState.OPEN],
            sealed=self._in_state[SegmentState.SEALED],
            opening=self._in_state[SegmentState.OPENING] + self._in_state[SegmentState.EMPTYING],
        )

    def _enter(self, segment: Segment, state: SegmentState) -> None:
        self._in_state[segment.state] -= 1
        self._in_state[state] += 1
        segment.state = state

    def tally(self, segments: range, is_quarantined: Callable[[int], bool]) -> SegmentTally:
        """Of these, which are of this drive. ``is_quarantined`` is asked of those with writers: no other can be. It is
        asked for very many, under the pool's mutex: hence no look-up by state, whose hash is a call."""
        free = open_ = sealed = quarantined = read = written = 0
        for index in segments:
            segment = self._segments[index]
            state = segment.state
            read += segment.read_pins > 0
            written += segment.write_pins > 0
            if segment.write_pins and is_quarantined(index):
                quarantined += 1
            elif state is SegmentState.FREE:
                free += 1
            elif state is SegmentState.SEALED:
                sealed += 1
            elif state is SegmentState.OPEN:
                open_ += 1
        opening = len(segments) - free - sealed - open_ - quarantined
        return SegmentTally(free, opening, open_, sealed, quarantined, read, written)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def has_victim(self, may_reclaim: MayReclaim) -> bool:
        """Is there a segment that could be reclaimed now?"""
        return next(victims(self._segments, may_reclaim), None) is not None

    @property
    def is_in_use(self) -> bool:
        """Is any segment pinned, being opened, or being summarized?"""
        return any(
            segment.read_pins
            or segment.write_pins
            or segment.is_held
            or segment.state in (SegmentState.OPENING, SegmentState.EMPTYING)
            or segment.summary is SummaryState.UNDERWAY
            for segment in self._segments.values()
        )

    def at_rest(self) -> tuple[SegmentRecord, ...]:
        """Sealed segments in which nobody writes, so that nothing is added to them; the oldest use first."""
        found = [
            (segment.last_used_s, segment.opened_seq, index)
            for index, segment in self._segments.items()
            if segment.state is SegmentState.SEALED and not segment.write_pins
        ]
        return tuple(self._record(index) for *_, index in sorted(found))

    # ---- pins ----------------------------------------------------------------------------------------------------

    def pin_read(self, segment: int) -> None:
        self._segments[segment].read_pins += 1
        self.read_pinned_count += self._segments[segment].read_pins == 1

    def unpin_read(self, segment: int) -> None:
        self._segments[segment].read_pins -= 1
        assert self._segments[segment].read_pins >= 0, f"segment {segment} unpinned twice"
        self.read_pinned_count -= self._segments[segment].read_pins == 0

    def pin_write(self, segment: int) -> None:
        self._segments[segment].write_pins += 1

    def unpin_write(self, segment: int) -> None:
        self._segments[segment].write_pins -= 1
        assert self._segments[segment].write_pins >= 0, f"segment {segment} write-unpinned twice"

    def pins(self, segment: int) -> tuple[int, int]:
        """How many (readers, writers) pin the segment."""
        return self._segments[segment].read_pins, self._segments[segment].write_pins

    def used(self, segment: int, now_s: float) -> None:
        """A chunk in ``segment`` was matched: it is recent."""
        self._segments[segment].last_used_s = now_s

    def valued(self, segment: int, worth: float) -> None:
        """What is lost when the segment is reclaimed, in any unit, the same for all."""
        self._segments[segment].worth = worth

    def worth(self, segment: int) -> float:
        return self._segments[segment].worth

    # ---- appending -----------------------------------------------------------------------------------------------

    def within(self, numbers: Collection[int]) -> SegmentTable:
        """As of a shelf, of which this is the only drive."""
        assert self.geometry.drive_number in numbers, "a writer that does not reach the only drive"
        return self

    def allocate(self, lba_count: int) -> Allocation | None:
        """Append ``lba_count`` blocks to the current segment, or None when it has no room (or there is none).

        Behind them there is always room for the summary of what was handed out.
        """
        assert 0 < lba_count <= self.geometry.max_extent_lba_count, lba_count
        if self._current is None:
            return None
        segment = self._segments[self._current]
        assert segment.state in (SegmentState.OPEN, SegmentState.OPENING), segment.state
        if not self._filled(self._current).takes(lba_count, self.geometry.segment_lba_count):
            return None
        allocation = Allocation(self._current, segment.next_lba, lba_count, segment.generation)
        segment.next_lba += lba_count
        segment.extent_count += 1
        return allocation

    def can_place(self, now_s: float, lba_counts: Sequence[int], may_reclaim: MayReclaim) -> bool:
        """Can all of these be allocated, one after the other, with as many openings as that takes?"""
        openings, is_current_used = self._openings_for(lba_counts)
        if not openings:
            return True
        openable = self.openable_count(may_reclaim, openings)
        if openings <= openable:
            return True
        # Sealed by the first opening, the current one can be the last, unless it holds some of these.
        at = self._current
        is_current_free = (
            at is not None
            and not is_current_used
            and self._segments[at].state is SegmentState.OPEN
            and not any(self.pins(at))
            and may_reclaim(at)
        )
        return openable > 0 and openings <= openable + is_current_free

    def openable_count(self, may_reclaim: MayReclaim, most: int) -> int:
        """How many segments could be opened now, one after the other, with nothing released meanwhile; ``most`` when it
        is that many or more. It is asked for every chunk, and a drive may have very many segments."""
        count = min(len(self._free), most)
        return count + sum(1 for _ in islice(victims(self._segments, may_reclaim), most - count))

    def fitting_count(self, lba_counts: Sequence[int]) -> int:
        """How many of these, from the first on, can be appended to the current segment."""
        fits = (not self._openings_for(lba_counts[:count])[0] for count in range(1, len(lba_counts) + 1))
        return sum(takewhile(bool, fits))

    def _openings_for(self, lba_counts: Sequence[int]) -> tuple[int, bool]:
        current = None if self._current is None else self._filled(self._current)
        return openings_for(lba_counts, self.geometry.segment_lba_count, current)

    def _filled(self, index: int) -> Filled:
        segment = self._segments[index]
        return Filled(segment.next_lba - self.geometry.first_lba(index), segment.extent_count)

    def open_next(self, now_s: float, may_reclaim: MayReclaim) -> SegmentRecord | None:
        """Seal the current segment and open another: a free one, or the victim that is worth least; of those that are
        alike the one with the oldest use.

        Returns the record to make durable (with the victim's chunks removed from the index in the same transaction),
        or None when nothing can be opened: the current segment then stays as it is. One whose opening failed is free:
        while openings fail, no more than one segment loses what it held.
        """
        target = self._free.pop() if self._free else next_victim(self._segments, may_reclaim)
        if target is None:
            return None
        self.close_current()
        segment = self._segments[target]
        assert segment.read_pins == 0, f"segment {target} reclaimed under {segment.read_pins} readers"
        assert segment.write_pins == 0, f"segment {target} reclaimed under {segment.write_pins} writers"
        self._last_seq += 1
        self._enter(segment, SegmentState.OPENING)
        segment.generation += 1
        segment.opened_seq = self._last_seq
        segment.next_lba = self.geometry.first_lba(target) + SEGMENT_HEADER_LBAS
        segment.extent_count = 0
        segment.summary = SummaryState.NONE
        self._due.discard(target)
        segment.last_used_s = now_s
        segment.worth = UNVALUED
        self._current = target
        return self._record(target)

    def close_current(self) -> None:
        """Nothing more is appended to the current segment."""
        if self._current is not None and self._segments[self._current].state is SegmentState.OPEN:
            self._seal(self._current)
        self._current = None

    def allocate_elsewhere(self, lba_count: int) -> Allocation | None:
        """Where there may be room when :meth:`allocate` had none and nothing can be opened: nowhere, on one drive."""
        return None

    def to_tidy(self, free_fraction: float, may_reclaim: MayReclaim) -> SegmentRecord | None:
        """The segment to give up next, so that so much is free."""
        if len(self._free) >= int(free_fraction * self.geometry.segment_count):
            return None
        return self.next_victim(may_reclaim)

    def budget_level(self, now_s: float) -> float:
        """How much may be written now, 0 to 1: there are no bounds here."""
        return 1.0

    def opening_wait_s(self, now_s: float) -> float:
        """As of a shelf: nothing is waited for here."""
        return 0.0

    def budgets_left(self, now_s: float) -> dict[int, int]:
        """As of a shelf: there are none here."""
        return {}

    def open_elsewhere(self, now_s: float, may_reclaim: MayReclaim) -> SegmentRecord | None:
        """What else could be opened when :meth:`open_next` found nothing: nothing, on one drive."""
        return None

    def number_openings_after(self, opened_seq: int) -> None:
        """Openings on the pool's other drives have had numbers up to this one."""
        self._last_seq = max(self._last_seq, opened_seq)

    def opened(self, record: SegmentRecord) -> None:
        """The record is durable: extents of this segment may leave, and its chunks may be matched."""
        segment = self._segments[record.segment]
        assert segment.generation == record.generation, (segment.generation, record)
        assert segment.state is SegmentState.OPENING, segment.state
        if self._current == record.segment:
            self._enter(segment, SegmentState.OPEN)
        else:
            self._seal(record.segment)

    def open_failed(self, record: SegmentRecord) -> None:
        """The record did not become durable. Nothing was handed out, so the segment is free, and the next to be opened.

        The generation is not lowered again: whether the write reached the medium is unknown, and a generation may
        only grow.
        """
        segment = self._segments[record.segment]
        assert segment.generation == record.generation, (segment.generation, record)
        if self._current == record.segment:
            self._current = None
        self._enter(segment, SegmentState.FREE)
        self._free.append(record.segment)

    def next_victim(self, may_reclaim: MayReclaim) -> SegmentRecord | None:
        """The segment that would be reclaimed now."""
        victim = next_victim(self._segments, may_reclaim)
        return None if victim is None else self._record(victim)

    def is_scarce(self, free_fraction: float) -> bool:
        """Is no more than this free, so that what is written costs what goes next?"""
        return len(self._free) <= int(free_fraction * self.geometry.segment_count)

    def is_sealed(self, segment: int) -> bool:
        return self._segments[segment].state is SegmentState.SEALED

    def hold(self, index: int) -> None:
        """It is made ready to be given up: nobody else reclaims it until it is let go."""
        assert not self._segments[index].is_held, f"segment {index} is held twice"
        self._segments[index].is_held = True

    def let_go(self, index: int) -> None:
        self._segments[index].is_held = False

    def may_give_up(self, record: SegmentRecord) -> bool:
        """Is it still sealed, of this generation, and does nobody read or write it?"""
        segment = self._segments[record.segment]
        is_same = segment.generation == record.generation and segment.state is SegmentState.SEALED
        return is_same and self.pins(record.segment) == (0, 0)

    def give_up(self, index: int) -> SegmentRecord:
        """Nothing of a sealed segment that nobody holds counts any more. Returns the record to make durable as that of
        an opening; then comes :meth:`given_up`."""
        segment = self._segments[index]
        assert segment.state is SegmentState.SEALED, segment.state
        assert self.pins(index) == (0, 0), f"segment {index} given up under {self.pins(index)}"
        self._last_seq += 1
        self._enter(segment, SegmentState.EMPTYING)
        segment.generation += 1
        segment.opened_seq = self._last_seq
        segment.extent_count = 0
        segment.summary = SummaryState.NONE
        segment.worth = UNVALUED
        self._due.discard(index)
        return self._record(index)

    def given_up(self, record: SegmentRecord) -> None:
        """It is free; and if its record did not become durable, too: as one whose opening failed."""
        segment = self._segments[record.segment]
        assert segment.generation == record.generation, (segment.generation, record)
        assert segment.state is SegmentState.EMPTYING, segment.state
        self._enter(segment, SegmentState.FREE)
        self._free.insert(0, record.segment)  # those that are free for longest are opened first

    def _seal(self, index: int) -> None:
        segment = self._segments[index]
        self._enter(segment, SegmentState.SEALED)
        segment.summary = SummaryState.DUE
        self._due.add(index)

    def _record(self, index: int) -> SegmentRecord:
        segment = self._segments[index]
        is_summarized = segment.summary is SummaryState.WRITTEN
        return SegmentRecord(index, segment.generation, segment.opened_seq, segment.lifetime_class, is_summarized)

    # ---- summaries -----------------------------------------------------------------------------------------------

    def settled(self) -> tuple[SegmentRecord, ...]:
        """Segments whose summary is due and whose writers are all gone, as they are to be recorded then."""
        found = (index for index in sorted(self._due) if not self._segments[index].write_pins)
        return tuple(replace(self._record(index), is_summarized=True) for index in found)

    def summarizing(self, record: SegmentRecord) -> None:
        """Its summary is on its way to the medium."""
        segment = self._segments[record.segment]
        assert segment.summary is SummaryState.DUE, segment.summary
        assert segment.state is SegmentState.SEALED, segment.state
        assert segment.write_pins == 0, f"segment {record.segment} summarized under {segment.write_pins} writers"
        segment.summary = SummaryState.UNDERWAY
        self._due.discard(record.segment)

    def summarized(self, record: SegmentRecord, *, worked: bool) -> None:
        """The summary is on the medium, or is due again. The segment may have been opened anew meanwhile."""
        segment = self._segments[record.segment]
        if segment.generation != record.generation:
            return
        assert segment.summary is SummaryState.UNDERWAY, segment.summary
        segment.summary = SummaryState.WRITTEN if worked else SummaryState.DUE
        if not worked:
            self._due.add(record.segment)


__all__ = [
    "UNVALUED",
    "Allocation",
    "SegmentCounts",
    "SegmentGeometry",
    "SegmentRecord",
    "SegmentState",
    "SegmentTable",
    "SummaryState",
]
