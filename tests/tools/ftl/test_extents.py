"""A file system's free space, against a plain set of pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.tools.ftl.extents import Extent, FreeExtents

FIRST, COUNT = 100, 60


def test_pieces_where_nothing_is_large_enough() -> None:
    space = FreeExtents(0, 30)
    taken = [space.take(10)[0] for _ in range(3)]
    assert taken == [Extent(0, 10), Extent(10, 10), Extent(20, 10)]
    space.give_back(taken[0])
    space.give_back(taken[2])
    assert space.take(15) == [Extent(0, 10), Extent(20, 5)]
    assert space.free_pages == 5


def test_the_search_goes_on_where_it_ended() -> None:
    space = FreeExtents(0, 30)
    first, second, _ = (space.take(10)[0] for _ in range(3))
    space.give_back(first)
    assert space.take(5) == [Extent(0, 5)]
    space.give_back(second)
    assert space.take(5) == [Extent(5, 5)]
    assert space.take(10) == [second]


def test_neighbours_become_one() -> None:
    space = FreeExtents(0, 30)
    first, second, third = (space.take(10)[0] for _ in range(3))
    for extent in (first, third, second):
        space.give_back(extent)
    assert len(space) == 1
    assert space.take(30) == [Extent(0, 30)]


@pytest.mark.parametrize("twice", [Extent(0, 10), Extent(5, 10), Extent(8, 1), Extent(25, 2)])
def test_giving_back_what_is_free_is_our_mistake(twice: Extent) -> None:
    space = FreeExtents(0, 30)
    space.take(25)
    space.give_back(Extent(0, 10))
    with pytest.raises(AssertionError, match="free already"):
        space.give_back(twice)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 25)), max_size=80))
def test_no_page_is_handed_out_twice_or_lost(steps: list[tuple[bool, int]]) -> None:
    space, free = FreeExtents(FIRST, COUNT), set(range(FIRST, FIRST + COUNT))
    held: list[list[Extent]] = []
    for is_take, number in steps:
        if is_take and number <= len(free):
            taken = space.take(number)
            pages = [
                page for extent in taken for page in range(extent.first_page, extent.first_page + extent.page_count)
            ]
            assert len(pages) == number
            assert free.issuperset(pages)
            assert len(set(pages)) == number
            free.difference_update(pages)
            held.append(taken)
        elif held:
            for extent in held.pop(number % len(held)):
                space.give_back(extent)
                free.update(range(extent.first_page, extent.first_page + extent.page_count))
        assert space.free_pages == len(free)
        assert len(space) == sum(page - 1 not in free for page in free)
