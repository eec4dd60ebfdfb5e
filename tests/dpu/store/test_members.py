"""Which chunks lie in which segment."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.store.members import Members

added = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2**64 - 1), st.integers(0, 2**20))


@given(st.lists(added, max_size=40), st.integers(0, 3))
def test_members_are_told_by_segment_and_group(chunks: list[tuple[int, int, int, int]], removed: int) -> None:
    members = Members()
    model: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for segment, group, key, position in chunks:
        members.add(segment, group, key, position)
        model[segment, group].append((key, position))
    assert set(members) == {segment for segment, _ in model}
    for segment in range(4):
        found = {
            group.group: list(zip(group.keys.tolist(), group.positions.tolist(), strict=True))
            for group in members.by_group(segment)
        }
        assert found == {group: listed for (of, group), listed in model.items() if of == segment}
        assert members.count_in(segment) == sum(map(len, found.values()))
    members.clear(removed)
    assert set(members) == {segment for segment, _ in model} | {removed}
    assert members.by_group(removed) == []
