"""A transfer in pieces: every byte once, at its place, and one end that is as bad as that of the worst piece."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.path.flexpath.pieces import Whole, pieces_of
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.memory import RegionPart, RegisteredRegion
from meshfusion.jbof.nvme.pending import FateUnknownError, PendingTransfer
from meshfusion.jbof.nvme.sgl import RemoteMemory

LBA = 512
REGION = RegisteredRegion(RemoteMemory(0, 1 << 20, 1), None, lambda: None)
BAD = MediaError("bad", next_step="none")
LOST = MediaError("lost", next_step="none")


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 5000)), min_size=1, max_size=8),
    st.integers(1, 9000),
    st.integers(0, 1 << 40),
)
def test_every_byte_is_in_one_piece_at_its_place(
    places: list[tuple[int, int]], piece_bytes: int, first_lba: int
) -> None:
    """Byte i of the memory belongs to block ``first_lba + i // LBA``."""
    total = sum(length for _, length in places)
    places = [*places, (0, -total % LBA)] if total % LBA else places
    memory = [REGION.part(offset, length) for offset, length in places]
    expected = [
        (first_lba + i // LBA, address)
        for i, address in enumerate(offset + k for offset, length in places for k in range(length))
    ]
    found = []
    pieces = list(pieces_of(first_lba, memory, LBA, piece_bytes))
    for piece in pieces:
        addresses = [part.offset_bytes + k for part in piece.memory for k in range(part.length_bytes)]
        assert len(addresses) == piece.length_bytes <= max(LBA, piece_bytes)
        assert piece.length_bytes % LBA == 0
        found += [(piece.lba + i // LBA, address) for i, address in enumerate(addresses)]
    assert found == expected


def whole(count: int) -> tuple[Whole, PendingTransfer]:
    pending = PendingTransfer([RegionPart(REGION, 0, LBA)], 0.0)
    return Whole(pending, count), pending


def test_it_is_done_when_all_pieces_are() -> None:
    made, pending = whole(2)
    made.done()
    assert not pending.has_ended
    made.done()
    pending.wait()
    assert pending.wait_memory_free(0)


def test_one_failed_piece_fails_it_once_nothing_is_under_way() -> None:
    made, pending = whole(3)
    made.failed(BAD, is_retryable=False)
    made.failed(LOST, is_retryable=True)
    assert not pending.has_ended
    made.done()
    with pytest.raises(MediaError, match="bad"):
        pending.wait()
    assert not pending.is_retryable
    assert pending.wait_memory_free(0)


@pytest.mark.parametrize("last", ["ended", "free"])
def test_one_piece_in_doubt_puts_it_in_doubt_until_its_memory_is_free(last: str) -> None:
    made, pending = whole(2)
    made.in_doubt(LOST)

    def end() -> None:
        made.failed(BAD, is_retryable=False)
        assert pending.is_in_doubt

    rest: list[Callable[[], None]] = [end, made.memory_free]
    if last == "ended":
        rest.reverse()
    for step in rest:
        assert not pending.wait_memory_free(0)
        step()
    with pytest.raises(FateUnknownError, match="lost"):
        pending.wait()
    assert pending.wait_memory_free(0)
