"""Segments: what may be handed out, what may be reopened, and that a generation only grows."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshfusion.jbof.segments import Allocation, SegmentCounts, SegmentGeometry, SegmentRecord, SegmentTable

GEOMETRY = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=12, segment_count=4)


def anything(_: int) -> bool:
    return True


def nothing(_: int) -> bool:
    return False


def opened(table: SegmentTable, now_s: float = 0.0) -> SegmentRecord:
    record = table.open_next(now_s, anything)
    assert record is not None
    table.opened(record)
    return record


def filled(count: int = 4) -> SegmentTable:
    table = SegmentTable(GEOMETRY)
    for i in range(count):
        opened(table, float(i))
        table.allocate(10)
    return table


def test_geometry() -> None:
    assert [GEOMETRY.first_lba(i) for i in range(4)] == [256, 268, 280, 292]
    assert GEOMETRY.segment_bytes == 49152
    assert GEOMETRY.capacity_bytes == 196608
    assert GEOMETRY.max_extent_lba_count == 10
    assert GEOMETRY.end_lba(3) == 304
    with pytest.raises(AssertionError):
        GEOMETRY.first_lba(4)


def test_nothing_to_allocate_before_the_first_opening() -> None:
    table = SegmentTable(GEOMETRY)
    assert table.allocate(1) is None
    assert table.counts() == SegmentCounts(free=4, open=0, sealed=0, opening=0)


def test_room_is_found_without_a_look_at_every_segment() -> None:
    """It is asked for every chunk, and a drive may have very many segments."""
    count = 1000
    geometry = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=12, segment_count=count)
    table = SegmentTable(geometry, (SegmentRecord(i, 1, i + 1) for i in range(count)))
    asked: list[int] = []

    def counted(segment: int) -> bool:
        asked.append(segment)
        return True

    assert table.can_place(0.0, [10, 10], counted)
    assert table.openable_count(counted, 3) == 3
    assert len(asked) == 2 + 3
    assert table.openable_count(counted, 2 * count) == count


def test_allocation_appends_and_ends_with_the_segment() -> None:
    table = SegmentTable(GEOMETRY)
    assert opened(table) == SegmentRecord(segment=0, generation=1, opened_seq=1)
    assert table.allocate(4) == Allocation(0, 257, 4, 1)
    assert table.allocate(6) == Allocation(0, 261, 6, 1)
    assert table.allocate(1) is None


def test_a_segment_is_unreadable_until_its_record_is_durable() -> None:
    table = SegmentTable(GEOMETRY)
    record = table.open_next(0.0, anything)
    assert record is not None
    assert table.counts().opening == 1
    assert not table.is_readable(0, 1)
    table.opened(record)
    assert table.is_readable(0, 1)
    assert not table.is_readable(0, 2)
    assert not table.is_readable(1, 0)
    assert not table.is_readable(4, 1)
    assert not table.is_readable(-1, 1)


def test_opening_another_seals_the_current_one() -> None:
    table = filled(2)
    assert table.counts() == SegmentCounts(free=2, open=1, sealed=1, opening=0)
    assert table.is_readable(0, 1)


def test_two_openings_may_be_on_their_way_at_once() -> None:
    table = SegmentTable(GEOMETRY)
    first, second = table.open_next(0.0, anything), table.open_next(0.0, anything)
    assert first is not None
    assert second is not None
    table.opened(first)
    table.opened(second)
    assert table.counts() == SegmentCounts(free=2, open=1, sealed=1, opening=0)
    assert table.allocate(1) == Allocation(1, 269, 1, 1)


def test_the_oldest_use_is_reclaimed_first_then_the_oldest_opening() -> None:
    table = filled()
    table.used(0, 10.0)
    assert opened(table, 11.0) == SegmentRecord(1, generation=2, opened_seq=5)
    assert not table.is_readable(1, 1)
    restarted = SegmentTable(GEOMETRY, [SegmentRecord(i, 1, 9 - i) for i in range(4)])
    record = restarted.open_next(0.0, anything)
    assert record == SegmentRecord(3, generation=2, opened_seq=10)


def test_pinned_and_forbidden_segments_are_not_reclaimed() -> None:
    table = filled()
    table.pin_read(0)
    table.pin_write(1)
    assert table.pins(0) == (1, 0)
    assert table.open_next(9.0, lambda segment: segment != 2) is None
    assert table.allocate(1) is None, "the current segment stays as it was"
    table.unpin_read(0)
    record = table.open_next(9.0, anything)
    assert record is not None
    assert record.segment == 0


def test_the_open_segment_is_never_the_victim() -> None:
    table = filled()
    assert [opened(table, 10.0 + i).segment for i in range(5)] == [0, 1, 2, 3, 0]


def test_free_segments_may_be_opened_when_nothing_may_be_reclaimed() -> None:
    table = filled(3)
    record = table.open_next(9.0, nothing)
    assert record is not None
    assert record.segment == 3


def test_a_failed_opening_keeps_the_generation_and_hides_what_was_there() -> None:
    table = filled()
    record = table.open_next(9.0, anything)
    assert record == SegmentRecord(0, 2, 5)
    assert record is not None
    table.open_failed(record)
    assert table.allocate(1) is None
    assert not table.is_readable(0, 1)
    assert table.counts() == SegmentCounts(free=1, open=0, sealed=3, opening=0)
    again = table.open_next(10.0, nothing)
    assert again == SegmentRecord(0, 3, 6), "the next to be opened: no other loses what it holds"


def test_segments_come_back_sealed() -> None:
    table = SegmentTable(GEOMETRY, [SegmentRecord(2, 7, 3)])
    assert table.counts() == SegmentCounts(free=3, open=0, sealed=1, opening=0)
    assert table.is_readable(2, 7)
    assert table.allocate(1) is None
    assert opened(table) == SegmentRecord(0, 1, 4)


def test_a_segment_of_which_only_the_generation_is_known_is_free() -> None:
    table = SegmentTable(GEOMETRY, [SegmentRecord(0, 9, 0), SegmentRecord(1, 4, 6, is_summarized=True)])
    assert table.counts() == SegmentCounts(free=3, open=0, sealed=1, opening=0)
    assert not table.is_readable(0, 9)
    assert opened(table) == SegmentRecord(0, 10, 7)


def test_room_for_the_summary_is_kept() -> None:
    """Of 260 blocks one is the header's; 250 entries fit a summary's block, so the 251st extent needs another."""
    table = SegmentTable(SegmentGeometry(4096, 256, 260, 4))
    opened(table)
    got = []
    while (found := table.allocate(1)) is not None:
        got.append(found.lba)
    assert got == list(range(257, 257 + 257)), "257 extents, and two blocks for their summary"
    other = SegmentTable(SegmentGeometry(4096, 256, 260, 4))
    opened(other)
    assert other.allocate(258) == Allocation(0, 257, 258, 1)
    assert other.allocate(1) is None


def test_a_summary_is_due_once_no_writer_is_left() -> None:
    table = filled(1)
    table.pin_write(0)
    assert table.settled() == (), "it is open"
    opened(table)
    assert table.settled() == (), "it has a writer"
    table.unpin_write(0)
    (record,) = table.settled()
    assert record == SegmentRecord(0, 1, 1, is_summarized=True)
    table.summarizing(record)
    assert table.settled() == ()
    table.summarized(record, worked=False)
    assert table.settled() == (record,)
    table.summarizing(record)
    table.summarized(record, worked=True)
    assert table.settled() == ()


def test_a_summary_of_a_segment_opened_anew_is_nobodys() -> None:
    table = filled()
    record = table.settled()[0]
    table.summarizing(record)
    assert opened(table, 9.0).segment == record.segment == 0
    table.summarized(record, worked=False)
    assert 0 not in [due.segment for due in table.settled()]


def test_what_was_open_when_the_service_stopped_is_due() -> None:
    table = SegmentTable(GEOMETRY, [SegmentRecord(2, 7, 3), SegmentRecord(1, 7, 2, is_summarized=True)])
    assert [record.segment for record in table.settled()] == [2]
    with pytest.raises(AssertionError):
        table.summarizing(SegmentRecord(1, 7, 2))


def test_our_own_mistakes_are_caught() -> None:
    table = filled(1)
    with pytest.raises(AssertionError):
        table.unpin_read(0)
    with pytest.raises(AssertionError):
        table.unpin_write(1)
    with pytest.raises(AssertionError):
        table.allocate(11)
    with pytest.raises(AssertionError):
        SegmentTable(GEOMETRY, [SegmentRecord(1, 1, 1), SegmentRecord(1, 2, 2)])


class Segments(RuleBasedStateMachine):
    """Against a model: no block is handed out twice under one generation, no pinned segment is reopened."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SegmentTable(GEOMETRY)
        self.pending: list[SegmentRecord] = []
        self.generations = [0] * 4
        self.handed_out: set[tuple[int, int]] = set()
        self.pins: list[tuple[str, int]] = []
        self.now_s = 0.0

    @rule(lba_count=st.integers(1, 10))
    def allocate(self, lba_count: int) -> None:
        found = self.table.allocate(lba_count)
        if found is None:
            return
        assert found.generation == self.generations[found.segment]
        first = GEOMETRY.first_lba(found.segment)
        assert first + 1 <= found.lba
        assert found.lba + lba_count <= first + 11
        blocks = {(found.lba + i, found.generation) for i in range(lba_count)}
        assert not blocks & self.handed_out
        self.handed_out |= blocks

    @rule()
    def open_next(self) -> None:
        self.now_s += 1
        record = self.table.open_next(self.now_s, anything)
        if record is not None:
            assert record.generation == self.generations[record.segment] + 1
            assert record.segment not in [segment for _, segment in self.pins]
            self.generations[record.segment] = record.generation
            self.pending.append(record)

    @precondition(lambda self: self.pending)
    @rule(works=st.booleans())
    def settle(self, works: bool) -> None:
        record = self.pending.pop(0)
        (self.table.opened if works else self.table.open_failed)(record)

    @rule(kind=st.sampled_from(("read", "write")), segment=st.integers(0, 3))
    def pin(self, kind: str, segment: int) -> None:
        if not self.table.is_readable(segment, self.generations[segment]):
            return  # nobody can pin what was not handed out
        (self.table.pin_read if kind == "read" else self.table.pin_write)(segment)
        self.pins.append((kind, segment))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        kind, segment = self.pins.pop()
        (self.table.unpin_read if kind == "read" else self.table.unpin_write)(segment)

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.table.counts()
        assert counts.free + counts.open + counts.sealed + counts.opening == 4
        assert counts.opening == len(self.pending)
        counted = self.table.tally(self.table.geometry.segments, lambda _: False)
        assert counts == SegmentCounts(counted.free, counted.open, counted.sealed, counted.opening)


TestSegments = Segments.TestCase
TestSegments.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
