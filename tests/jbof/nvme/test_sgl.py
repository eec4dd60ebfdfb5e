"""SGL descriptors: vectors, round trips read by hand, and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.fields import NvmeFieldError
from meshfusion.jbof.nvme.sgl import (
    NO_DATA,
    DataPlace,
    RemoteMemory,
    capsule_data,
    remote_data,
    remote_data_list,
)
from tests.jbof.nvme.layout import Descriptor, descriptor, le

MEMORY = RemoteMemory(address=0x7F0011223344, length_bytes=0x123456, rkey=0xA1B2C3D4)
memories = st.builds(
    RemoteMemory,
    address=st.integers(0, 2**64 - 2**24),
    length_bytes=st.integers(1, 2**24 - 1),
    rkey=st.integers(0, 2**32 - 1),
)


def test_keyed_descriptor() -> None:
    """Base Figure 122: address, length, key, identifier."""
    pointer = remote_data(MEMORY)
    assert pointer.sgl1 == bytes.fromhex("44332211007f0000 563412 d4c3b2a1 40")
    assert (pointer.place, pointer.length_bytes, pointer.in_capsule) == (DataPlace.REMOTE, 0x123456, b"")


def test_keyed_descriptor_with_invalidation() -> None:
    """RDMA Figure 10: sub type Fh."""
    assert remote_data(MEMORY, invalidate_key=True).sgl1 == bytes.fromhex("44332211007f0000 563412 d4c3b2a1 4f")


def test_no_data_is_an_empty_keyed_descriptor() -> None:
    assert NO_DATA.sgl1 == bytes.fromhex("0000000000000000 000000 00000000 40")
    assert (NO_DATA.place, NO_DATA.length_bytes, NO_DATA.in_capsule) == (DataPlace.NONE, 0, b"")


def test_in_capsule_data() -> None:
    """Base Figures 117 and 118: type 0h, sub type 1h, an offset instead of an address."""
    pointer = capsule_data(bytes(range(256)) * 16)
    assert pointer.sgl1 == bytes.fromhex("0000000000000000 00100000 000000 01")
    assert pointer.in_capsule == bytes(range(256)) * 16
    assert (pointer.place, pointer.length_bytes) == (DataPlace.CAPSULE, 4096)


def test_in_capsule_data_begins_at_the_offset_that_the_controller_wants() -> None:
    """Base Figure 77: at ICDOFF times 16 behind the submission queue entry; the descriptor counts from there."""
    pointer = capsule_data(b"abc", data_offset_bytes=32)
    assert pointer.in_capsule == bytes(32) + b"abc"
    assert le(pointer.sgl1, 0, 8) == 0
    assert (le(pointer.sgl1, 8, 4), pointer.length_bytes) == (3, 3)


def test_descriptor_list() -> None:
    """Base Figure 121: a last segment at offset 0 with the length of the list, which follows in the capsule."""
    pointer = remote_data_list([RemoteMemory(0x10000, 0x2000, 0x11), RemoteMemory(0x20004, 0xFFE000, 0x22334455)])
    assert pointer.sgl1 == bytes.fromhex("0000000000000000 20000000 000000 31")
    assert pointer.in_capsule == bytes.fromhex(
        "0000010000000000 002000 11000000 40" + "0400020000000000 00e0ff 55443322 40"
    )
    assert (pointer.place, pointer.length_bytes) == (DataPlace.REMOTE_LIST, 0x2000 + 0xFFE000)


def test_a_list_of_one_is_no_list() -> None:
    assert remote_data_list([MEMORY]) == remote_data(MEMORY)


@given(memory=memories, invalidate=st.booleans())
def test_keyed_descriptors_read_back(memory: RemoteMemory, invalidate: bool) -> None:
    pointer = remote_data(memory, invalidate_key=invalidate)
    expected = Descriptor(memory.address, memory.length_bytes, memory.rkey, 0x4F if invalidate else 0x40)
    assert descriptor(pointer.sgl1, 0) == expected


@given(pieces=st.lists(memories, min_size=2, max_size=16))
def test_lists_read_back(pieces: list[RemoteMemory]) -> None:
    pointer = remote_data_list(pieces)
    assert le(pointer.sgl1, 8, 4) == len(pointer.in_capsule) == 16 * len(pieces)
    assert [descriptor(pointer.in_capsule, 16 * i) for i in range(len(pieces))] == [
        Descriptor(piece.address, piece.length_bytes, piece.rkey, 0x40) for piece in pieces
    ]
    assert pointer.length_bytes == sum(piece.length_bytes for piece in pieces)


@pytest.mark.parametrize(
    ("memory", "field"),
    [
        (RemoteMemory(-1, 1, 1), "SGL address"),
        (RemoteMemory(2**64, 1, 1), "SGL address"),
        (RemoteMemory(2**64 - 1, 2, 1), "SGL address"),
        (RemoteMemory(0, 0, 1), "SGL length"),
        (RemoteMemory(0, 2**24, 1), "SGL length"),
        (RemoteMemory(0, 1, -1), "SGL key"),
        (RemoteMemory(0, 1, 2**32), "SGL key"),
    ],
)
def test_refusals_name_the_field(memory: RemoteMemory, field: str) -> None:
    for pieces in ([memory], [MEMORY, memory]):
        with pytest.raises(NvmeFieldError, match=field) as caught:
            remote_data_list(pieces)
        assert caught.value.field == field
        assert caught.value.next_step


def test_memory_may_end_at_the_end_of_the_address_space() -> None:
    assert descriptor(remote_data(RemoteMemory(2**64 - 8, 8, 1)).sgl1, 0) == Descriptor(2**64 - 8, 8, 1, 0x40)


@pytest.mark.parametrize("count", [0, 17])
def test_a_list_has_1_to_16_pieces(count: int) -> None:
    with pytest.raises(NvmeFieldError, match="descriptor count"):
        remote_data_list([MEMORY] * count)


def test_empty_in_capsule_data_is_refused() -> None:
    with pytest.raises(NvmeFieldError, match="in-capsule data length"):
        capsule_data(b"")


def test_a_part_of_memory() -> None:
    assert MEMORY.part(0x10, 0x20) == RemoteMemory(0x7F0011223354, 0x20, 0xA1B2C3D4)
    for offset_bytes, length_bytes in [(-1, 1), (0, 0x123457), (0x123456, 1), (1, -1)]:
        with pytest.raises(AssertionError):
            MEMORY.part(offset_bytes, length_bytes)
