"""A shelf: where segments are opened and shards go, and that each drive keeps the rules of segments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshfusion.jbof.policy.write_budget import WriteBudget
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentCounts, SegmentGeometry, SegmentRecord, SegmentTable
from meshfusion.jbof.shelf import PASSED_OVER_OPENINGS, DriveWear, Shelf, ShelfDrive, stripe_width

SEGMENTS = 4
FULL = 10  # blocks of an extent that fills a segment


def anything(_: int) -> bool:
    return True


def drive(
    number: int,
    *,
    segments: int = SEGMENTS,
    takes: bool = True,
    wear: DriveWear | None = None,
    records: Iterable[SegmentRecord] = (),
    budget: WriteBudget | None = None,
) -> ShelfDrive:
    table = SegmentTable(SegmentGeometry(4096, 256, 12, segments, number), records)
    return ShelfDrive(table, takes, wear or DriveWear(), budget=budget)


def shelf_of(count: int) -> Shelf:
    return Shelf(drive(number) for number in range(count))


def put(shelf: Shelf, lba_count: int = FULL, now_s: float = 0.0) -> int | None:
    """The segment that took so many blocks; openings work at once."""
    allocation = shelf.allocate(lba_count)
    if allocation is None:
        record = shelf.open_next(now_s, anything)
        if record is not None:
            shelf.opened(record)
        allocation = shelf.allocate(lba_count) if record is not None else shelf.allocate_elsewhere(lba_count)
    return None if allocation is None else allocation.segment


def drives_of(segments: Iterable[int | None]) -> Counter[int]:
    return Counter(drive_of_segment(segment) for segment in segments if segment is not None)


def test_one_drive_is_as_its_own_table() -> None:
    shelf, table = shelf_of(1), SegmentTable(SegmentGeometry(4096, 256, 12, SEGMENTS))
    for now_s in range(9):
        allocation = table.allocate(4)
        if allocation is None:
            record = table.open_next(float(now_s), anything)
            assert record is not None
            table.opened(record)
            allocation = table.allocate(4)
        assert allocation is not None
        assert put(shelf, 4, float(now_s)) == allocation.segment
    assert shelf.counts() == table.counts()


def test_neighbours_go_to_different_drives() -> None:
    shelf = shelf_of(2)
    segments = [put(shelf, 2) for _ in range(8)]
    assert sorted(set(segments), key=str) == [0, 1 << 24]
    assert all(one != next_one for one, next_one in pairwise(segments))


def test_what_only_the_drive_of_another_place_can_open() -> None:
    shelf = Shelf(drive(number, segments=2) for number in range(2))
    segments = [segment for _ in range(4) if (segment := put(shelf)) is not None]
    assert drives_of(segments[::2]) == {drive_of_segment(segments[0]): 2}, "places take turns"
    for segment in (segments[0], segments[2], segments[3]):
        shelf.pin_write(segment)
    assert shelf.can_place(0.0, [FULL], anything)
    assert put(shelf) is None
    record = shelf.open_elsewhere(0.0, anything)
    assert record is not None
    assert record.segment == segments[1]
    shelf.opened(record)
    allocation = shelf.allocate(FULL)
    assert allocation is not None
    assert allocation.segment == segments[1]
    shelf.pin_write(segments[1])
    assert shelf.open_elsewhere(0.0, anything) is None


def test_the_stripe_leaves_drives_to_choose_from() -> None:
    assert [stripe_width(count) for count in (0, 1, 2, 3, 4, 6, 12, 24)] == [0, 1, 2, 2, 3, 4, 8, 16]
    shelf = shelf_of(6)
    assert len(drives_of(put(shelf, 1) for _ in range(40))) == 4
    assert shelf.counts().open == 4


def test_alike_drives_get_as_many_openings() -> None:
    got = drives_of(put(shelf, FULL, float(i)) for shelf in [shelf_of(6)] for i in range(120))
    assert set(got) == set(range(6))
    assert max(got.values()) - min(got.values()) <= 4


def test_a_worn_drive_gets_less() -> None:
    worn = drive(0, wear=DriveWear(percentage_used=20, bytes_written=0, rated_endurance_bytes=1 << 40))
    others = [drive(number, wear=DriveWear(rated_endurance_bytes=1 << 40)) for number in range(1, 6)]
    shelf = Shelf([worn, *others])
    got = drives_of(put(shelf, FULL, float(i)) for i in range(120))
    assert got[0] < min(got[number] for number in range(1, 6)) / 2


def test_a_drive_without_budget_gets_nothing() -> None:
    spent = drive(0, budget=WriteBudget(48 * 4096, 0.0, level_bytes=11 * 4096))
    shelf = Shelf([spent, drive(1)])
    assert set(drives_of(put(shelf, FULL, float(i)) for i in range(12))) == {1}


def test_all_of_a_segment_is_counted_when_it_is_opened() -> None:
    segment_bytes = 12 * 4096
    budget = WriteBudget(16 * segment_bytes, 0.0)  # a burst of four segments, then twelve in 24 hours
    shelf = Shelf([drive(0, budget=budget)])
    assert shelf.budget_level(0.0) == 1.0
    placed = [put(shelf, FULL, 0.0) for _ in range(5)]
    assert placed == [0, 1, 2, 3, None]
    assert (shelf.budget_level(0.0), shelf.budgets_left(0.0)) == (0.0, {0: 0})
    assert shelf.opening_wait_s(0.0) == pytest.approx(7200.0)
    assert not shelf.can_place(0.0, [1], anything), "nothing is reclaimed for what cannot be opened"
    assert put(shelf, FULL, 7199.0) is None
    assert shelf.opening_wait_s(7201.0) == 0.0
    assert shelf.can_place(7201.0, [1], anything)
    assert put(shelf, FULL, 7201.0) is not None


def test_room_is_scarce_when_no_drive_that_is_written_has_more_free_than_is_kept() -> None:
    shelf = Shelf([drive(0), drive(1), drive(2, takes=False)])
    assert not shelf.is_scarce(0.5)
    free = {0: SEGMENTS, 1: SEGMENTS}
    for now_s in range(2 * SEGMENTS):
        segment = put(shelf, FULL, float(now_s))
        assert segment is not None
        free[drive_of_segment(segment)] -= 1
        assert shelf.is_scarce(0.5) == (max(free.values()) <= SEGMENTS // 2)
    assert shelf.is_scarce(0.0)


def test_the_next_to_give_up_is_of_the_drive_that_lacks_most() -> None:
    shelf = Shelf([drive(0), drive(1)])
    filled = [put(shelf, FULL, float(i)) for i in range(2 * SEGMENTS)]
    assert shelf.to_tidy(0.0, anything) is None
    found = shelf.to_tidy(0.5, anything)
    assert found is not None
    assert found.segment in filled
    shelf.hold(found.segment)
    other = shelf.to_tidy(0.5, anything)
    assert other is not None
    assert other.segment != found.segment, "what is held is nobody else's"
    shelf.pin_read(found.segment)
    assert not shelf.may_give_up(found)
    shelf.unpin_read(found.segment)
    assert shelf.may_give_up(found)
    record = shelf.give_up(found.segment)
    assert (record.generation, shelf.is_readable(found.segment, found.generation)) == (found.generation + 1, False)
    assert shelf.counts().free == 0
    shelf.given_up(record)
    shelf.let_go(found.segment)
    assert shelf.counts().free == 1
    assert drive_of_segment(shelf.to_tidy(0.5, anything).segment) != drive_of_segment(found.segment)  # type: ignore[union-attr]


def test_what_takes_no_segments_is_still_read() -> None:
    kept = SegmentRecord(1, 7, 3)
    shelf = Shelf([drive(0, takes=False, records=[kept]), drive(1)], last_opened_seq=3)
    assert shelf.is_readable(1, 7)
    assert set(drives_of(put(shelf, FULL, float(i)) for i in range(9))) == {1}
    assert shelf.is_readable(1, 7), "and nothing of it is reclaimed"
    assert {drive_of_segment(record.segment) for record in shelf.settled()} == {1}, "segment 1 is due, and stays so"
    shelf.pin_read(1)
    assert (shelf.pins(1), shelf.read_pinned_count) == ((1, 0), 1)


def test_what_may_not_be_written_any_more_is_sealed_and_still_read() -> None:
    shelf = shelf_of(2)
    first = [put(shelf, 2) for _ in range(2)]
    assert drives_of(first) == {0: 1, 1: 1}
    shelf.stand(0, takes_segments=False, is_offered=True)
    assert shelf.counts().open == 1
    assert set(drives_of(put(shelf, FULL, float(i)) for i in range(6))) == {1}
    assert shelf.is_readable(0, 1)
    assert [record.segment for record in shelf.held(0)] == [0]
    shelf.stand(0, takes_segments=True, is_offered=True)
    assert set(drives_of(put(shelf, FULL, float(i)) for i in range(10, 16))) == {0, 1}


def test_a_segment_whose_opening_is_under_way_when_its_drive_stops_is_sealed_when_it_is_open() -> None:
    shelf = shelf_of(2)
    record = shelf.open_next(0.0, anything)
    assert record is not None
    shelf.stand(drive_of_segment(record.segment), takes_segments=False, is_offered=True)
    assert shelf.is_pinned(drive_of_segment(record.segment))
    shelf.opened(record)
    assert shelf.counts() == SegmentCounts(free=2 * SEGMENTS - 1, open=0, sealed=1, opening=0)


def test_a_drive_that_is_gone_is_not_found_and_keeps_what_is_known_of_it() -> None:
    shelf = shelf_of(2)
    segment = next(found for found in iter(lambda: put(shelf), None) if drive_of_segment(found) == 1)
    shelf.pin_read(segment)
    shelf.stand(1, takes_segments=False, is_offered=False)
    assert not shelf.is_readable(segment, 1)
    assert set(drives_of(put(shelf, FULL, float(i)) for i in range(9))) == {0}
    assert shelf.is_pinned(1), "a reader that began before"
    shelf.unpin_read(segment)
    shelf.stand(1, takes_segments=True, is_offered=True)
    assert shelf.is_readable(segment, 1)


def test_drives_are_put_on_and_taken_off() -> None:
    shelf = shelf_of(1)
    used = put(shelf)
    shelf.add(drive(3, segments=2))
    assert shelf.numbers == {0, 3}
    assert shelf.geometry.segment_count == SEGMENTS + 2
    assert 3 in drives_of(put(shelf, FULL, float(i)) for i in range(6))
    assert used is not None
    shelf.pin_write(used)
    with pytest.raises(AssertionError, match="in use"):
        shelf.remove(0)
    shelf.unpin_write(used)
    shelf.remove(0)
    assert not shelf.is_readable(used, 1)
    assert set(drives_of(put(shelf, FULL, float(i)) for i in range(9))) == {3}


def test_without_a_drive_to_write_nothing_is_opened() -> None:
    shelf = shelf_of(2)
    put(shelf)
    for number in (0, 1):
        shelf.stand(number, takes_segments=False, is_offered=True)
    assert put(shelf) is None
    assert not shelf.can_place(0.0, [1], anything)
    assert shelf.budget_level(0.0) == 1.0, "that is not why"
    assert shelf.opening_wait_s(0.0) == math.inf


def test_where_the_drive_in_turn_has_nothing_another_of_the_stripe_is_opened_on() -> None:
    shelf = shelf_of(2)
    taken = [put(shelf, FULL, float(i)) for i in range(2 * SEGMENTS)]
    held = [segment for segment in taken if segment is not None and drive_of_segment(segment) == 0]
    for _ in range(2):
        allocation = shelf.allocate(FULL)
        assert allocation is None
        if shelf.open_next(9.0, lambda segment: segment not in held) is None:
            record = shelf.open_elsewhere(9.0, lambda segment: segment not in held)
            assert record is not None
            assert (drive_of_segment(record.segment), shelf.allocate(FULL) is None) == (1, False)
            break
        shelf.allocate(FULL)
    else:
        pytest.fail("it was never the turn of drive 0")


def test_nothing_is_readable_on_a_drive_that_is_not_here() -> None:
    shelf = Shelf([drive(1, records=[SegmentRecord((1 << 24) + 2, 5, 9)])], last_opened_seq=20)
    assert shelf.is_readable((1 << 24) + 2, 5)
    assert not shelf.is_readable((1 << 24) + 2, 4)
    assert not shelf.is_readable(2, 5)
    assert not shelf.is_readable((1 << 24) + SEGMENTS, 0)
    record = shelf.open_next(0.0, anything)
    assert record is not None
    assert record.opened_seq == 21, "openings are numbered over all drives, those that are away too"


def test_without_any_drive_that_takes_segments_nothing_is_opened() -> None:
    shelf = Shelf([drive(0, takes=False)])
    assert shelf.allocate(1) is None
    assert shelf.open_next(0.0, anything) is None
    assert shelf.allocate_elsewhere(1) is None
    assert shelf.counts() == SegmentCounts(free=4, open=0, sealed=0, opening=0)


def test_room_elsewhere_is_used_when_nothing_can_be_opened() -> None:
    shelf = Shelf([drive(0, segments=1), drive(1, segments=1)])
    assert {put(shelf, 6), put(shelf, 6)} == {0, 1 << 24}
    for segment in (0, 1 << 24):
        shelf.pin_write(segment)
    assert put(shelf, 3) is not None
    assert put(shelf, 3) is not None
    assert put(shelf, 3) is None


def test_a_drive_whose_openings_fail_is_passed_over_and_tried_again() -> None:
    shelf = shelf_of(2)
    first = shelf.open_next(0.0, anything)
    assert first is not None
    shelf.open_failed(first)
    bad = drive_of_segment(first.segment)
    got = [put(shelf, FULL, float(i)) for i in range(PASSED_OVER_OPENINGS - 1)]
    assert bad not in drives_of(got)
    assert bad in drives_of(put(shelf, FULL, float(i)) for i in range(20, 24))


def test_a_drive_that_is_passed_over_is_better_than_none() -> None:
    shelf = Shelf([drive(0, segments=1), drive(1, segments=1)])
    first = shelf.open_next(0.0, anything)
    assert first is not None
    shelf.open_failed(first)
    segment = put(shelf)
    assert segment is not None
    assert segment != first.segment
    shelf.pin_write(segment)
    assert put(shelf) == first.segment


def test_when_all_drives_fail_all_are_tried() -> None:
    shelf = shelf_of(2)
    tried = []
    for i in range(6):
        record = shelf.open_next(float(i), anything)
        assert record is not None
        shelf.open_failed(record)
        tried.append(drive_of_segment(record.segment))
    assert set(tried) == {0, 1}
    assert put(shelf) is not None


def test_our_own_mistakes_are_caught() -> None:
    with pytest.raises(AssertionError):
        Shelf([])
    with pytest.raises(AssertionError):
        Shelf([drive(0), ShelfDrive(SegmentTable(SegmentGeometry(4096, 256, 16, 4, 1)))])


class Shelves(RuleBasedStateMachine):
    """Against a model: no block of any drive is handed out twice under one generation, no pinned segment is reopened,
    openings are numbered in order over all drives and restarts, whichever drives come and go with these."""

    @initialize(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def begin(self, counts: list[int]) -> None:
        self.sizes = counts
        self.durable: dict[int, SegmentRecord] = {}
        self.generations: Counter[int] = Counter()
        self.last_seq = 0
        self.now_s = 0.0
        self.handed_out: set[tuple[int, int, int]] = set()
        self.start(set(range(len(counts))), set(range(len(counts))))

    def start(self, here: set[int], takers: set[int]) -> None:
        self.here, self.takers = here, takers
        self.pending: list[SegmentRecord] = []
        self.pins: list[tuple[str, int]] = []
        self.shelf = Shelf(
            (
                drive(
                    number,
                    segments=self.sizes[number],
                    takes=number in takers,
                    records=[record for i, record in self.durable.items() if drive_of_segment(i) == number],
                )
                for number in sorted(here)
            ),
            max((record.opened_seq for record in self.durable.values()), default=0),
        )

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Of what was not settled, some is durable; some drives are away, and some take no segments."""
        for record in self.pending:
            if data.draw(st.booleans()):
                self.durable[record.segment] = record
        numbers = range(len(self.sizes))
        here = data.draw(st.sets(st.sampled_from(numbers), min_size=1))
        self.generations = Counter({i: record.generation for i, record in self.durable.items()})
        self.last_seq = max((record.opened_seq for record in self.durable.values()), default=0)
        # What was handed out under an opening that is not durable never left.
        self.handed_out = {place for place in self.handed_out if place[2] <= self.generations[place[0]]}
        self.start(here, data.draw(st.sets(st.sampled_from(sorted(here)))))

    @rule(lba_count=st.integers(1, 10), elsewhere=st.booleans())
    def allocate(self, lba_count: int, elsewhere: bool) -> None:
        found = (self.shelf.allocate_elsewhere if elsewhere else self.shelf.allocate)(lba_count)
        if found is None:
            return
        number = drive_of_segment(found.segment)
        assert number in self.takers
        assert found.generation == self.generations[found.segment]
        first = 256 + 12 * (found.segment & 0xFFFFFF)
        assert first + 1 <= found.lba
        assert found.lba + lba_count <= first + 11
        places = {(found.segment, found.lba + i, found.generation) for i in range(lba_count)}
        assert not places & self.handed_out
        self.handed_out |= places

    @rule()
    def open_next(self) -> None:
        self.now_s += 1
        record = self.shelf.open_next(self.now_s, anything)
        if record is None:
            return
        assert drive_of_segment(record.segment) in self.takers
        assert record.generation == self.generations[record.segment] + 1
        assert record.opened_seq == self.last_seq + 1
        assert record.segment not in [segment for _, segment in self.pins]
        self.last_seq = record.opened_seq
        self.generations[record.segment] = record.generation
        self.pending.append(record)
        assert self.shelf.allocate(10) is not None, "what was opened has room for the longest extent"

    @precondition(lambda self: self.pending)
    @rule(works=st.integers(0, 3))
    def settle(self, works: int) -> None:
        record = self.pending.pop(0)
        if works:
            self.durable[record.segment] = record
            self.shelf.opened(record)
        else:
            self.shelf.open_failed(record)

    @rule(kind=st.sampled_from(("read", "write")), data=st.data())
    def pin(self, kind: str, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(self.segments()))
        if self.shelf.is_readable(segment, self.generations[segment]):
            (self.shelf.pin_read if kind == "read" else self.shelf.pin_write)(segment)
            self.pins.append((kind, segment))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        kind, segment = self.pins.pop()
        (self.shelf.unpin_read if kind == "read" else self.shelf.unpin_write)(segment)

    @rule()
    def summarize(self) -> None:
        for record in self.shelf.settled():
            assert ("write", record.segment) not in self.pins
            assert drive_of_segment(record.segment) in self.takers
            self.shelf.summarizing(record)
            self.shelf.summarized(record, worked=True)
            assert replace(self.durable[record.segment], is_summarized=True) == record
            self.durable[record.segment] = record

    def segments(self) -> list[int]:
        return [(number << 24) + i for number, size in enumerate(self.sizes) for i in range(size)]

    @invariant()
    def readable_is_what_is_durable_and_here(self) -> None:
        opening = {record.segment for record in self.pending}
        for segment in self.segments():
            if drive_of_segment(segment) not in self.here:
                assert not self.shelf.is_readable(segment, self.generations[segment])
            elif segment in self.durable and segment not in opening:
                known = self.durable[segment].generation == self.generations[segment]
                assert self.shelf.is_readable(segment, self.generations[segment]) == known

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.shelf.counts()
        total = sum(self.sizes[number] for number in self.here)
        assert counts.free + counts.open + counts.sealed + counts.opening == total == self.shelf.geometry.segment_count
        assert counts.opening == len(self.pending)
        assert counts.open <= max(1, len(self.takers)), "no more than one on each drive"


TestShelves = Shelves.TestCase
TestShelves.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- a writer that does not reach every drive ------------------------------------------------------------------------


def put_within(shelf: Shelf, numbers: set[int], lba_count: int = FULL) -> int | None:
    """As :func:`put`."""
    places = shelf.within(numbers)
    allocation = places.allocate(lba_count)
    if allocation is None:
        record = places.open_next(0.0, anything) or places.open_elsewhere(0.0, anything)
        if record is not None:
            shelf.opened(record)
            allocation = places.allocate(lba_count)
            assert allocation is not None, "what was just opened has room"
        else:
            allocation = places.allocate_elsewhere(lba_count)
    return None if allocation is None else allocation.segment


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sets(st.integers(0, 6)), st.sampled_from([1, 3, FULL])), max_size=60),
)
def test_no_writer_gets_a_place_on_a_drive_that_it_does_not_reach(
    count: int, writes: list[tuple[set[int], int]]
) -> None:
    """Whoever else writes meanwhile; also when it reaches drives that are not here. Room that is there is found."""
    shelf = shelf_of(count)
    for numbers, lba_count in writes:
        can_place = shelf.within(numbers).can_place(0.0, [lba_count], anything)
        segment = put_within(shelf, numbers, lba_count)
        assert can_place == (segment is not None)
        assert segment is None or drive_of_segment(segment) in numbers


def test_a_writer_that_reaches_some_drives_fills_them_alike() -> None:
    shelf = shelf_of(4)
    assert drives_of(put_within(shelf, {1, 3}) for _ in range(2 * SEGMENTS)) == {1: SEGMENTS, 3: SEGMENTS}
    assert not shelf.within({1, 3}).can_place(0.0, [FULL], lambda _: False), "though others are empty"
    assert shelf.can_place(0.0, [FULL], lambda _: False)
    assert drives_of(put(shelf) for _ in range(2 * SEGMENTS)).keys() >= {0, 2}, "the rest is others'"


@pytest.mark.parametrize("numbers", [set(), {7}], ids=("nothing", "a drive that is not here"))
def test_a_writer_that_reaches_no_drive_gets_nothing_and_leaves_what_is_open(numbers: set[int]) -> None:
    shelf = shelf_of(2)
    segments = [put(shelf, 1), put(shelf, 1)]
    assert put_within(shelf, numbers, 1) is None
    assert not shelf.within(numbers).can_place(0.0, [1], anything)
    assert {put(shelf, 1) for _ in segments} == set(segments)


def test_what_is_open_for_others_is_not_sealed_for_a_writer_that_does_not_reach_it() -> None:
    shelf = shelf_of(2)
    first, second = put(shelf, 1), put(shelf, 1)
    assert first is not None
    assert second is not None
    other = drive_of_segment(second)
    for _ in range(FULL - 1):
        assert put_within(shelf, {other}, 1) == second
    assert drive_of_segment(put_within(shelf, {other}, 1) or 0) == other
    assert shelf.within({drive_of_segment(first)}).allocate(1) is not None, "there is room yet in what was open there"
