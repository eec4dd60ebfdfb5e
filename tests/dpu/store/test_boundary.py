"""The longest boundary of all groups, against a search that tries every boundary by the definition."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.boundary import longest_boundary
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord, SegmentTable

SEGMENT_COUNT = 6
GEOMETRY = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=10, segment_count=SEGMENT_COUNT)
Place = tuple[int, int]  # group, chunk


def key(group: int, i: int) -> bytes:
    return bytes([group, i]) * 16


def record(group: int, i: int, segment: int) -> api.ChunkRecord:
    shard = api.Shard(0, api.Extent(1, segment, 256, 5, 1), 1, 1, 4096, (b"8 bytes!",) * 4)
    return api.ChunkRecord(key(group, i), b"I" * 32, "default", group, 16 * i, 16, (shard,))


def segments(pinned: set[int]) -> SegmentTable:
    table = SegmentTable(GEOMETRY, [SegmentRecord(i, 1, i + 1) for i in range(SEGMENT_COUNT)])
    for segment in pinned:
        table.pin_read(segment)
    return table


def by_definition(
    groups: tuple[api.GroupKeys, ...], stored: dict[Place, api.ChunkRecord], pinned: set[int], pinned_max: int
) -> tuple[int, tuple[api.ChunkRecord, ...]]:
    for boundary in range(len(groups[0].keys) if groups else 0, 0, -1):
        needed = [(g.group, i) for g in groups for i in range(g.first_needed[boundary - 1], boundary)]
        if needed and all(place in stored for place in needed):
            chunks = tuple(stored[place] for place in needed)
            if len(pinned | {chunk.shards[0].extent.segment for chunk in chunks}) <= pinned_max:
                return boundary, chunks
    return 0, ()


@st.composite
def lookups(draw: st.DrawFn) -> tuple[tuple[api.GroupKeys, ...], dict[Place, api.ChunkRecord]]:
    """Groups of every kind and shape, and what is stored of them."""
    count = draw(st.integers(0, 9))
    groups, stored = [], {}
    for group in range(draw(st.integers(0, 4))):
        window = draw(st.integers(1, 10))
        first_needed: list[int] = []
        for i in range(count):
            low = first_needed[-1] if first_needed else 0
            any_step = st.integers(low, i + 1)
            first_needed.append(draw(st.just(max(0, i - window + 1)) if window <= count + 1 else any_step))
        names = tuple(b"" if need > i and draw(st.booleans()) else key(group, i) for i, need in enumerate(first_needed))
        groups.append(api.GroupKeys(group, names, tuple(first_needed)))
        for i in range(count):
            if draw(st.integers(0, 5)):
                stored[group, i] = record(group, i, draw(st.integers(0, SEGMENT_COUNT - 1)))
    return tuple(groups), stored


@given(
    lookup=lookups(),
    pinned=st.sets(st.integers(0, SEGMENT_COUNT - 1), max_size=3),
    spare=st.integers(0, SEGMENT_COUNT),
)
def test_it_is_the_longest_by_definition_and_no_chunk_is_looked_at_twice(
    lookup: tuple[tuple[api.GroupKeys, ...], dict[Place, api.ChunkRecord]], pinned: set[int], spare: int
) -> None:
    groups, stored = lookup
    looked_at: Counter[Place] = Counter()

    def find(group: api.GroupKeys, i: int) -> api.ChunkRecord | None:
        looked_at[group.group, i] += 1
        return stored.get((group.group, i))

    pinned_max = len(pinned) + spare
    found = longest_boundary(groups, find, segments(pinned), pinned_max)
    assert (found.chunk_count, found.chunks) == by_definition(groups, stored, pinned, pinned_max)
    assert set(found.segments) == {chunk.shards[0].extent.segment for chunk in found.chunks}
    unbounded, _ = by_definition(groups, stored, pinned, SEGMENT_COUNT)
    assert found.is_shortened == (unbounded > found.chunk_count)
    assert all(times == 1 for times in looked_at.values()), looked_at


def test_a_miss_of_the_whole_prefix_looks_at_one_chunk() -> None:
    looked_at: list[int] = []

    def find(group: api.GroupKeys, i: int) -> api.ChunkRecord | None:
        looked_at.append(i)
        return None

    asked = api.GroupKeys(0, tuple(key(0, i) for i in range(200)), (0,) * 200)
    assert longest_boundary((asked,), find, segments(set()), SEGMENT_COUNT).chunk_count == 0
    assert looked_at == [0]
