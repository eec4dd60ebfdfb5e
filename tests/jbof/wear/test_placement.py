"""What a drive is told of how long data will live."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.wear.placement import most_open_segments, placement_handle


@pytest.mark.parametrize(
    ("class_count", "handle_count", "expected"),
    [
        (4, 0, [None, None, None, None]),
        (4, 1, [None, None, None, None]),
        (4, 2, [0, 0, 1, 1]),
        (4, 3, [0, 0, 1, 2]),
        (4, 4, [0, 1, 2, 3]),
        (4, 5, [1, 2, 3, 4]),  # handle 0 is left to what names none
        (4, 8, [1, 2, 3, 4]),
        (1, 8, [1]),
    ],
)
def test_handles_of_classes(class_count: int, handle_count: int, expected: list[int | None]) -> None:
    handles = [placement_handle(i, class_count=class_count, handle_count=handle_count) for i in range(class_count)]
    assert handles == expected


@given(st.integers(1, 16), st.integers(2, 128))
def test_handles_exist_and_keep_the_order_of_lifetimes(class_count: int, handle_count: int) -> None:
    handles = [placement_handle(i, class_count=class_count, handle_count=handle_count) for i in range(class_count)]
    known = [handle for handle in handles if handle is not None]
    assert len(known) == class_count
    assert known == sorted(known)
    assert 0 <= known[0] <= known[-1] < handle_count
    # No more are open than are kept apart.
    assert most_open_segments(class_count=class_count, handle_count=handle_count) == len(set(known))


@pytest.mark.parametrize("handle_count", [0, 1])
def test_without_handles_one_segment_is_open(handle_count: int) -> None:
    assert most_open_segments(class_count=4, handle_count=handle_count) == 1


def test_an_unknown_class_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        placement_handle(4, class_count=4, handle_count=8)
