"""The segments of a pool's drives as one: which drive the next segment is opened on, and the next shard goes to.

A plain state machine, like the :class:`~meshfusion.jbof.segments.SegmentTable` of each drive that it asks. One segment
is open on each drive of the *stripe*, and shards go to these in turn, so that a prefix is read from several drives at
once. When one is full, :func:`~meshfusion.jbof.wear.choice.choose_drive` says which drive takes its place, and the
victim, if one is needed, is of that drive.

A drive that takes no segments (read-only, draining, failing) is still read from, and one that is not offered (gone, for
as long as it may come back) is not. One that was never here is not on the shelf: none of its segments is readable. All
of that may change while the pool is served (:meth:`Shelf.stand`); what is pinned stays pinned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from meshfusion.jbof.policy.write_budget import WriteBudget
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.segment_states import SegmentTally
from meshfusion.jbof.segments import Allocation, SegmentCounts, SegmentRecord, SegmentTable
from meshfusion.jbof.shelf_drive import (
    UNKNOWN_WEAR,
    DriveWear,
    ShelfDrive,
    ShelfGeometry,
    never,
    shelf_geometry,
    state_of,
)
from meshfusion.jbof.wear.choice import Choice, choose_drive
from meshfusion.jbof.wear.shares import target_shares

# After failed openings a drive is passed over for so many openings elsewhere, doubled with each failure in a row.
PASSED_OVER_OPENINGS: Final = 8
_MOST_DOUBLINGS: Final = 6


@dataclass(slots=True)
class _Failures:
    in_a_row: int = 0
    passed_over_until: int = 0  # counted in openings on any drive


class Shelf:
    """``drives``: of one pool, each with a number of its own, all with segments of one size. ``last_opened_seq``: of
    all segments of the pool, those on drives that are not here too: openings are numbered over all of them."""

    def __init__(self, drives: Iterable[ShelfDrive], last_opened_seq: int = 0) -> None:
        self._drives = {drive.number: drive for drive in drives}
        assert self._drives, "a shelf without drives"
        self.geometry = shelf_geometry([drive.segments.geometry for drive in self._drives.values()])
        self._last_seq = last_opened_seq
        self._stripe: list[int] = []  # numbers of the drives with an open segment each
        self._place = 0  # of the next shard in the stripe
        self._credits: Mapping[str, float] = {}
        self._openings = 0
        self._failures = {number: _Failures() for number in self._drives}

    # ---- drives come, go and change --------------------------------------------------------------------------------

    @property
    def numbers(self) -> frozenset[int]:
        """Of the drives that are on the shelf, offered or not."""
        return frozenset(self._drives)

    def add(self, drive: ShelfDrive) -> None:
        """One that was not here. ``last_opened_seq`` has counted its segments already."""
        assert drive.number not in self._drives, f"drive {drive.number} is on the shelf"
        self._drives[drive.number] = drive
        self._failures[drive.number] = _Failures()
        self._measure()

    def remove(self, number: int) -> None:
        """For good. Nobody may read or write it any more (:meth:`is_pinned`), and it is not the last."""
        assert not self.is_pinned(number), f"drive {number} is in use"
        self._leave_stripe(number)
        del self._drives[number]
        del self._failures[number]
        self._measure()

    def stand(self, number: int, *, takes_segments: bool, is_offered: bool) -> None:
        """How the drive is used from now on. What is open on one that takes no more is sealed."""
        assert is_offered or not takes_segments, "written, and nothing of it would be found"
        before = self._drives[number]
        self._drives[number] = replace(before, takes_segments=takes_segments, is_offered=is_offered)
        if before.takes_segments and not takes_segments:
            self._leave_stripe(number)
        if takes_segments and not before.takes_segments:
            self._failures[number] = _Failures()

    def wear(self, number: int, wear: DriveWear, domain: tuple[str, ...]) -> None:
        """What is known of its wear and its failure domain now."""
        self._drives[number] = replace(self._drives[number], wear=wear, domain=domain)

    def rebudget(self, number: int, budget: WriteBudget | None) -> None:
        """Another bound of what may be written to it, from now on."""
        self._drives[number] = replace(self._drives[number], budget=budget)

    def geometry_of(self, number: int) -> SegmentGeometry:
        """Of one drive's segments."""
        return self._drives[number].segments.geometry

    def is_offered(self, number: int) -> bool:
        """One that is not on the shelf is not."""
        drive = self._drives.get(number)
        return drive is not None and drive.is_offered

    def is_pinned(self, number: int) -> bool:
        """Is there a reader, a writer, or something of ours under way on it?"""
        return self._drives[number].segments.is_in_use

    def held(self, number: int) -> tuple[SegmentRecord, ...]:
        """The drive's sealed segments without a writer, the least recently used first: what can be emptied."""
        return self._drives[number].segments.at_rest()

    def segments_of(self, number: int) -> range:
        """The drive's, as the pool numbers them."""
        return self._drives[number].segments.geometry.segments

    def tally(self, number: int, segments: range, is_quarantined: Callable[[int], bool]) -> SegmentTally | None:
        """As of one drive; None of one that has left."""
        drive = self._drives.get(number)
        return None if drive is None else drive.segments.tally(segments, is_quarantined)

    # ---- one drive's affair --------------------------------------------------------------------------------------

    def _of(self, segment: int) -> SegmentTable:
        return self._drives[drive_of_segment(segment)].segments

    def generation(self, segment: int) -> int:
        return self._of(segment).generation(segment)

    def is_readable(self, segment: int, generation: int) -> bool:
        """As of one drive; no segment of a drive that is not here, or not offered, is."""
        drive = self._drives.get(drive_of_segment(segment))
        return drive is not None and drive.is_offered and drive.segments.is_readable(segment, generation)

    def pin_read(self, segment: int) -> None:
        self._of(segment).pin_read(segment)

    def unpin_read(self, segment: int) -> None:
        self._of(segment).unpin_read(segment)

    def pin_write(self, segment: int) -> None:
        self._of(segment).pin_write(segment)

    def unpin_write(self, segment: int) -> None:
        self._of(segment).unpin_write(segment)

    def pins(self, segment: int) -> tuple[int, int]:
        """How many (readers, writers) pin the segment."""
        return self._of(segment).pins(segment)

    def used(self, segment: int, now_s: float) -> None:
        self._of(segment).used(segment, now_s)

    def valued(self, segment: int, worth: float) -> None:
        """As of one drive. What nobody has here any more has no worth either."""
        drive = self._drives.get(drive_of_segment(segment))
        if drive is not None:
            drive.segments.valued(segment, worth)

    def summarizing(self, record: SegmentRecord) -> None:
        self._of(record.segment).summarizing(record)

    def summarized(self, record: SegmentRecord, *, worked: bool) -> None:
        self._of(record.segment).summarized(record, worked=worked)

    # ---- all drives ----------------------------------------------------------------------------------------------

    @property
    def read_pinned_count(self) -> int:
        return sum(drive.segments.read_pinned_count for drive in self._drives.values())

    def counts(self) -> SegmentCounts:
        each = [drive.segments.counts() for drive in self._drives.values()]
        return SegmentCounts(
            free=sum(counts.free for counts in each),
            open=sum(counts.open for counts in each),
            sealed=sum(counts.sealed for counts in each),
            opening=sum(counts.opening for counts in each),
        )

    def budget_level(self, now_s: float) -> float:
        """How much may be written now, 0 to 1: that of the drive with most left, of those that take segments. Where
        none does, it is not for its budget."""
        levels = [
            1.0 if drive.budget is None else drive.budget.level(now_s)
            for drive in self._drives.values()
            if drive.takes_segments
        ]
        return max(levels, default=1.0)

    def opening_wait_s(self, now_s: float) -> float:
        """How long until a segment may be opened on some drive, as far as budgets go; 0 for now, infinite while no
        drive takes any."""
        segment_bytes = self.geometry.segment_bytes
        takers = (drive.budget for drive in self._drives.values() if drive.takes_segments)
        waits = (0.0 if budget is None else budget.wait_s(segment_bytes, now_s) for budget in takers)
        return min(waits, default=math.inf)

    def budgets_left(self, now_s: float) -> dict[int, int]:
        """Bytes by drive number, of drives with a budget: to be kept over a restart."""
        return {
            number: drive.budget.left_bytes(now_s) for number, drive in self._drives.items() if drive.budget is not None
        }

    def settled(self) -> tuple[SegmentRecord, ...]:
        """As of one drive. What cannot be written any more cannot be summarized either."""
        takers = (drive.segments for drive in self._drives.values() if drive.takes_segments)
        return tuple(record for segments in takers for record in segments.settled())

    # ---- appending -----------------------------------------------------------------------------------------------
    # ``within``: only on drives of these numbers (None: on any), for a writer that does not reach all.

    def within(self, numbers: Collection[int]) -> ShelfPart:
        """Only these drives, for a writer that reaches no others."""
        return ShelfPart(self, numbers)

    def allocate(self, lba_count: int, within: Collection[int] | None = None) -> Allocation | None:
        """Append to the open segment of the drive whose turn it is, or None when it has no room or none is open."""
        self._turn_to(within)
        number = self._drive_in_turn()
        if number is None or not _is_in(number, within):
            return None
        found = self._drives[number].segments.allocate(lba_count)
        if found is not None:
            self._next_turn()
        return found

    def allocate_elsewhere(self, lba_count: int, within: Collection[int] | None = None) -> Allocation | None:
        """Append to any open segment that has room: for when nothing can be opened."""
        for number in self._stripe:
            found = self._drives[number].segments.allocate(lba_count) if _is_in(number, within) else None
            if found is not None:
                self._next_turn()
                return found
        return None

    def can_place(
        self,
        now_s: float,
        lba_counts: Sequence[int],
        may_reclaim: Callable[[int], bool],
        within: Collection[int] | None = None,
    ) -> bool:
        """Is there room for all of these? An opening for each, on whatever drives, or what the open segments have left;
        what takes some of both is not looked for."""
        openable = 0
        for drive in self._drives.values():
            if drive.takes_segments and _is_in(drive.number, within):
                wanted = len(lba_counts) - openable
                affordable = drive.budget_left_bytes(now_s) // self.geometry.segment_bytes
                openable += drive.segments.openable_count(may_reclaim, min(wanted, affordable))
            if openable >= len(lba_counts):
                return True
        left = list(lba_counts)
        for number in self._stripe:
            if _is_in(number, within):
                left = left[self._drives[number].segments.fitting_count(left) :]
        return not left

    def open_next(
        self, now_s: float, may_reclaim: Callable[[int], bool], within: Collection[int] | None = None
    ) -> SegmentRecord | None:
        """Open a segment for the place in the stripe whose turn it is: see
        :meth:`~meshfusion.jbof.segments.SegmentTable.open_next`. What was open there is sealed, on whatever drive."""
        self._turn_to(within)
        return self._open_at(self._place, now_s, may_reclaim, within)

    def open_elsewhere(
        self, now_s: float, may_reclaim: Callable[[int], bool], within: Collection[int] | None = None
    ) -> SegmentRecord | None:
        """The same for any other place, whose turn it then is: for when nothing has room. What could be opened may lie
        on the drive of another place alone."""
        for place in range(len(self._stripe)):
            record = self._open_at(place, now_s, may_reclaim, within)
            if record is not None:
                return record
        return None

    def _open_at(
        self, place: int, now_s: float, may_reclaim: Callable[[int], bool], within: Collection[int] | None
    ) -> SegmentRecord | None:
        before = self._stripe[place] if place < len(self._stripe) else None
        choice = self._choose(now_s, before, may_reclaim, within)
        if choice is None:
            return None
        number = int(choice.drive_id)
        segments = self._drives[number].segments
        segments.number_openings_after(self._last_seq)
        record = segments.open_next(now_s, may_reclaim)
        assert record is not None, f"drive {number} was chosen and has nothing to open"
        budget = self._drives[number].budget
        if budget is not None:
            is_taken = budget.take(self.geometry.segment_bytes, now_s)
            assert is_taken, f"drive {number} was chosen and has no budget left"
        if before is None:
            self._place = len(self._stripe)
            self._stripe.append(number)
        else:
            if before != number:
                self._drives[before].segments.close_current()
            self._place = place
            self._stripe[place] = number
        self._credits = choice.credits
        self._last_seq = record.opened_seq
        self._openings += 1
        return record

    def to_tidy(self, free_fraction: float, may_reclaim: Callable[[int], bool]) -> SegmentRecord | None:
        """The segment to give up next, so that so much of each drive is free; of the drive that lacks most."""
        lacking = []
        for drive in self._drives.values():
            wanted = int(free_fraction * drive.segments.geometry.segment_count)
            if drive.takes_segments and drive.segments.free_count < wanted:
                lacking.append((drive.segments.free_count / wanted, drive.number))
        for _, number in sorted(lacking):
            found = self._drives[number].segments.next_victim(may_reclaim)
            if found is not None:
                return found
        return None

    def is_scarce(self, free_fraction: float) -> bool:
        """As of one drive, on all that take segments."""
        return all(drive.segments.is_scarce(free_fraction) for drive in self._drives.values() if drive.takes_segments)

    def is_sealed(self, segment: int) -> bool:
        drive = self._drives.get(drive_of_segment(segment))
        return drive is not None and drive.segments.is_sealed(segment)

    def hold(self, segment: int) -> None:
        self._of(segment).hold(segment)

    def let_go(self, segment: int) -> None:
        """As of one drive, which may have left."""
        drive = self._drives.get(drive_of_segment(segment))
        if drive is not None:
            drive.segments.let_go(segment)

    def may_give_up(self, record: SegmentRecord) -> bool:
        """As of one drive; not on one that takes no segments any more, since that takes a write."""
        drive = self._drives.get(drive_of_segment(record.segment))
        return drive is not None and drive.takes_segments and drive.segments.may_give_up(record)

    def give_up(self, segment: int) -> SegmentRecord:
        """As of one drive."""
        segments = self._of(segment)
        segments.number_openings_after(self._last_seq)
        record = segments.give_up(segment)
        self._last_seq = record.opened_seq
        return record

    def given_up(self, record: SegmentRecord) -> None:
        self._of(record.segment).given_up(record)

    def opened(self, record: SegmentRecord) -> None:
        self._of(record.segment).opened(record)
        self._failures[drive_of_segment(record.segment)].in_a_row = 0

    def open_failed(self, record: SegmentRecord) -> None:
        """As of one drive; which leaves the stripe, and is passed over for a while where there are others."""
        self._of(record.segment).open_failed(record)
        number = drive_of_segment(record.segment)
        failures = self._failures[number]
        failures.passed_over_until = self._openings + (PASSED_OVER_OPENINGS << min(failures.in_a_row, _MOST_DOUBLINGS))
        failures.in_a_row += 1
        self._leave_stripe(number)

    def _leave_stripe(self, number: int) -> None:
        """What is open there is sealed; and on other drives, where the stripe is less wide without it."""
        left = [other for other in self._stripe if other != number][: self._width()]
        for gone in {*self._stripe, number} - set(left):
            self._drives[gone].segments.close_current()
        self._stripe = left

    def _measure(self) -> None:
        self.geometry = shelf_geometry([drive.segments.geometry for drive in self._drives.values()])

    def _takers(self) -> list[ShelfDrive]:
        """Drives that take segments: those that are not passed over, unless all are."""
        takers = [drive for drive in self._drives.values() if drive.takes_segments]
        return [drive for drive in takers if self._failures[drive.number].passed_over_until <= self._openings] or takers

    def _width(self) -> int:
        return stripe_width(len(self._takers()))

    def _next_turn(self) -> None:
        """Only now may the stripe have become wider: what was just opened takes the shard it was opened for."""
        self._place = (self._place + 1) % max(1, self._width())

    def _drive_in_turn(self) -> int | None:
        """None: its place is not taken yet."""
        return self._stripe[self._place] if self._place < len(self._stripe) else None

    def _turn_to(self, within: Collection[int] | None) -> None:
        """The next place of one of these drives gets its turn: that of another is not sealed for a writer that does not
        reach it. Where there is none, a place that is not taken yet."""
        number = self._drive_in_turn()
        if within is None or _is_in(number, within):
            return
        if number is None and any(
            taker.number in within and taker.number not in self._stripe for taker in self._takers()
        ):
            return
        places = [(self._place + step) % len(self._stripe) for step in range(len(self._stripe))]
        found = next((place for place in places if self._stripe[place] in within), None)
        if found is not None:
            self._place = found
        elif len(self._stripe) < self._width():
            self._place = len(self._stripe)

    def _choose(
        self, now_s: float, before: int | None, may_reclaim: Callable[[int], bool], within: Collection[int] | None
    ) -> Choice | None:
        """The drive of the next segment, apart from those of the stripe's other places; one that is passed over only
        where no other can take it."""
        others = [number for number in self._stripe if number != before]
        neighbours = [state_of(self._drives[number], now_s, never, is_open=True) for number in others]
        for takers in (self._takers(), [drive for drive in self._drives.values() if drive.takes_segments]):
            candidates = [drive for drive in takers if drive.number not in others and _is_in(drive.number, within)]
            free = [state_of(drive, now_s, may_reclaim) for drive in candidates]
            found = choose_drive(
                [*free, *neighbours],
                target_shares([*free, *neighbours]),
                self._credits,
                segment_bytes=self.geometry.segment_bytes,
                beside=[str(number) for number in others],
            )
            if isinstance(found, Choice):
                return found
        return None


class ShelfPart:
    """Some of a shelf's drives: what is placed through it lies on them alone."""

    def __init__(self, shelf: Shelf, numbers: Collection[int]) -> None:
        self._shelf = shelf
        self._numbers = frozenset(numbers)

    def can_place(self, now_s: float, lba_counts: Sequence[int], may_reclaim: Callable[[int], bool]) -> bool:
        return self._shelf.can_place(now_s, lba_counts, may_reclaim, self._numbers)

    def allocate(self, lba_count: int) -> Allocation | None:
        return self._shelf.allocate(lba_count, self._numbers)

    def allocate_elsewhere(self, lba_count: int) -> Allocation | None:
        return self._shelf.allocate_elsewhere(lba_count, self._numbers)

    def open_next(self, now_s: float, may_reclaim: Callable[[int], bool]) -> SegmentRecord | None:
        return self._shelf.open_next(now_s, may_reclaim, self._numbers)

    def open_elsewhere(self, now_s: float, may_reclaim: Callable[[int], bool]) -> SegmentRecord | None:
        return self._shelf.open_elsewhere(now_s, may_reclaim, self._numbers)


def _is_in(number: int | None, within: Collection[int] | None) -> bool:
    return within is None or number in within


def stripe_width(writable_drives: int) -> int:
    """On how many of the drives that take segments one is open: two of three, so that wear can be steered by which.
    Of two drives both: they are written alike, and what is read comes from both."""
    return writable_drives if writable_drives <= 2 else writable_drives - writable_drives // 3


__all__ = [
    "PASSED_OVER_OPENINGS",
    "UNKNOWN_WEAR",
    "DriveWear",
    "Shelf",
    "ShelfDrive",
    "ShelfGeometry",
    "ShelfPart",
    "stripe_width",
]
