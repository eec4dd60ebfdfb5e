"""Numbers of segments and blocks in a pool of several drives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.pool_addresses import (
    drive_of_segment,
    first_segment,
    is_on_a_drive,
    namespace_of,
    pool_lba,
    split_pool_lba,
)


def test_drive_0_keeps_its_own_numbers() -> None:
    assert (first_segment(0), namespace_of(0), pool_lba(1, 4711)) == (0, 1, 4711)


def test_numbers_as_they_are_written_down() -> None:
    assert (first_segment(3), namespace_of(3), pool_lba(4, 256)) == (0x03000000, 4, 0x0000030000000100)
    assert first_segment(254) + (1 << 24) - 1 < 1 << 32


@given(namespace=st.integers(1, 255), lba=st.integers(0, (1 << 40) - 1))
def test_a_pool_lba_is_a_namespace_and_its_block(namespace: int, lba: int) -> None:
    assert split_pool_lba(pool_lba(namespace, lba)) == (namespace, lba)
    assert pool_lba(namespace, lba) < 1 << 63, "a signed 64-bit column can hold it"


@given(number=st.integers(0, 254), segment=st.integers(0, (1 << 24) - 1))
def test_a_segments_number_names_its_drive(number: int, segment: int) -> None:
    assert drive_of_segment(first_segment(number) + segment) == number


def test_what_no_pool_can_have() -> None:
    """Asked of what a service answers, before it is taken for an address."""
    assert is_on_a_drive(1, 0, 1)
    assert is_on_a_drive(255, (1 << 40) - 8, 8)
    for namespace, lba, lba_count in ((0, 0, 1), (256, 0, 1), (1, (1 << 40) - 8, 9), (1, -1, 1)):
        assert not is_on_a_drive(namespace, lba, lba_count)


def test_our_own_mistakes_are_caught() -> None:
    with pytest.raises(AssertionError):
        namespace_of(255)
    for namespace, lba in ((0, 1), (256, 1), (1, 1 << 40)):
        with pytest.raises(AssertionError):
            pool_lba(namespace, lba)
    with pytest.raises(AssertionError):
        split_pool_lba(255 << 40)
