"""Splitting transfers: every byte once, in order, at the right block, within every limit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.fields import NvmeFieldError
from meshfusion.jbof.nvme.io_commands import write
from meshfusion.jbof.nvme.sgl import RemoteMemory, remote_data_list
from meshfusion.jbof.nvme.split import TransferLimits, TransferPart, split_transfer

MIB = 1 << 20
LBA = 512


def piece(address: int, length_bytes: int, rkey: int = 1) -> RemoteMemory:
    return RemoteMemory(address, length_bytes, rkey)


def shape(parts: tuple[TransferPart, ...]) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    return [(part.lba, part.lba_count, [(m.address, m.length_bytes, m.rkey) for m in part.memory]) for part in parts]


def test_one_command_is_enough() -> None:
    limits = TransferLimits(lba_bytes=4096, max_transfer_bytes=MIB)
    assert shape(split_transfer(100, 256, [piece(0x1000, MIB)], limits)) == [(100, 256, [(0x1000, MIB, 1)])]


def test_the_transfer_limit() -> None:
    """128 KiB, as MDTS 5 says: 300 KiB become 128, 128 and 44."""
    limits = TransferLimits(lba_bytes=4096, max_transfer_bytes=131072)
    assert shape(split_transfer(10, 75, [piece(0, 300 << 10)], limits)) == [
        (10, 32, [(0, 131072, 1)]),
        (42, 32, [(131072, 131072, 1)]),
        (74, 11, [(262144, 45056, 1)]),
    ]


def test_a_transfer_limit_that_is_no_multiple_of_a_block() -> None:
    limits = TransferLimits(lba_bytes=4096, max_transfer_bytes=10000)
    assert [part.lba_count for part in split_transfer(0, 5, [piece(0, 5 * 4096)], limits)] == [2, 2, 1]


def test_the_block_count_field() -> None:
    """NLB holds 65536 blocks: 32 MiB of 512 bytes, in pieces of 24-bit length."""
    limits = TransferLimits(lba_bytes=512, max_transfer_bytes=None, max_descriptors=16)
    parts = split_transfer(0, 65537, [piece(0, 65537 * 512)], limits)
    assert [part.lba_count for part in parts] == [65536, 1]
    # 2^24 - 1 bytes hold 32767 whole blocks
    assert [m.length_bytes for m in parts[0].memory] == [32767 * 512, 32767 * 512, 2 * 512]


def test_the_length_of_a_descriptor() -> None:
    limits = TransferLimits(lba_bytes=4096, max_transfer_bytes=None)
    parts = split_transfer(7, 4097, [piece(0, 4097 * 4096)], limits)
    assert shape(parts) == [
        (7, 4095, [(0, 4095 * 4096, 1)]),
        (4102, 2, [(4095 * 4096, 8192, 1)]),
    ]


def test_pieces_share_a_command_where_lists_are_taken() -> None:
    memory = [piece(0, 512), piece(0x2000, 1024, 2), piece(0x4000, 512)]
    lists = TransferLimits(LBA, MIB, max_descriptors=16)
    assert shape(split_transfer(5, 4, memory, lists)) == [(5, 4, [(0, 512, 1), (0x2000, 1024, 2), (0x4000, 512, 1)])]
    single = TransferLimits(LBA, MIB)
    assert shape(split_transfer(5, 4, memory, single)) == [
        (5, 1, [(0, 512, 1)]),
        (6, 2, [(0x2000, 1024, 2)]),
        (8, 1, [(0x4000, 512, 1)]),
    ]


def test_a_block_may_lie_in_two_pieces() -> None:
    """Three descriptors reach byte 1300; the command ends with the second block and the next goes on inside."""
    memory = [piece(0, 500), piece(0x2000, 300), piece(0x4000, 500), piece(0x6000, 236)]
    parts = split_transfer(0, 3, memory, TransferLimits(LBA, MIB, max_descriptors=3))
    assert shape(parts) == [
        (0, 2, [(0, 500, 1), (0x2000, 300, 1), (0x4000, 224, 1)]),
        (2, 1, [(0x4000 + 224, 276, 1), (0x6000, 236, 1)]),
    ]


def test_pieces_that_continue_each_other_are_one() -> None:
    memory = [piece(0, 512), piece(512, 512), piece(1024, 512, 2), piece(1536, 512, 2)]
    assert shape(split_transfer(0, 4, memory, TransferLimits(LBA, MIB))) == [
        (0, 2, [(0, 1024, 1)]),
        (2, 2, [(1024, 1024, 2)]),
    ]


def test_a_block_that_is_too_scattered() -> None:
    memory = [piece(0, 100), piece(0x2000, 412)]
    with pytest.raises(UnsupportedError, match="more than 1 pieces") as caught:
        split_transfer(0, 1, memory, TransferLimits(LBA, MIB))
    assert "block boundaries" in caught.value.next_step
    assert len(split_transfer(0, 1, memory, TransferLimits(LBA, MIB, max_descriptors=2))) == 1


def test_a_controller_that_cannot_move_one_block() -> None:
    with pytest.raises(UnsupportedError, match="less than one logical block"):
        split_transfer(0, 1, [piece(0, 8192)], TransferLimits(8192, 4096))


@pytest.mark.parametrize(
    ("lba", "count", "memory", "limits", "field"),
    [
        (0, 1, [], TransferLimits(LBA, MIB), "data length"),
        (0, 1, [piece(0, 511)], TransferLimits(LBA, MIB), "data length"),
        (0, 1, [piece(0, 1024)], TransferLimits(LBA, MIB), "data length"),
        (0, 1, [piece(0, 512), piece(9, 0)], TransferLimits(LBA, MIB), "data length"),
        (0, 1, [piece(0, 1024), piece(9, -512)], TransferLimits(LBA, MIB), "data length"),
        (0, 0, [], TransferLimits(LBA, MIB), "number of blocks"),
        (-1, 1, [piece(0, 512)], TransferLimits(LBA, MIB), "SLBA"),
        (2**64 - 1, 2, [piece(0, 1024)], TransferLimits(LBA, MIB), "number of blocks"),
        (0, 1, [], TransferLimits(0, MIB), "lba_bytes"),
        (0, 1, [piece(0, 1 << 24)], TransferLimits(1 << 24, None), "lba_bytes"),
        (0, 1, [piece(0, 512)], TransferLimits(LBA, MIB, max_descriptors=0), "max_descriptors"),
        (0, 1, [piece(0, 512)], TransferLimits(LBA, MIB, max_descriptors=17), "max_descriptors"),
    ],
)
def test_refusals_name_the_field(
    lba: int, count: int, memory: list[RemoteMemory], limits: TransferLimits, field: str
) -> None:
    with pytest.raises(NvmeFieldError) as caught:
        split_transfer(lba, count, memory, limits)
    assert caught.value.field == field


def test_the_last_block_there_can_be() -> None:
    assert split_transfer(2**64 - 1, 1, [piece(0, 512)], TransferLimits(LBA, MIB))[0].lba == 2**64 - 1


@st.composite
def transfers(draw: st.DrawFn) -> tuple[int, int, list[RemoteMemory], TransferLimits]:
    """Small numbers against small limits, so that every limit is met; addresses may touch and overlap."""
    lba_bytes = draw(st.sampled_from([4, 8, 12]))
    lba_count = draw(st.integers(1, 30))
    total = lba_count * lba_bytes
    cuts = draw(st.lists(st.integers(1, total - 1), unique=True, max_size=8).map(sorted))
    ends = [*cuts, total]
    memory: list[RemoteMemory] = []
    for start, end in zip([0, *cuts], ends, strict=True):
        follows = draw(st.booleans()) and memory
        address = memory[-1].address + memory[-1].length_bytes if follows else draw(st.integers(0, 1000))
        memory.append(RemoteMemory(address, end - start, draw(st.integers(1, 2))))
    limits = TransferLimits(lba_bytes, draw(st.none() | st.integers(lba_bytes, 6 * lba_bytes)), draw(st.integers(1, 4)))
    return draw(st.integers(0, 100)), lba_count, memory, limits


def bytes_of(memory: tuple[RemoteMemory, ...] | list[RemoteMemory]) -> list[tuple[int, int]]:
    """Each byte as key and address."""
    return [(m.rkey, m.address + i) for m in memory for i in range(m.length_bytes)]


@settings(max_examples=200)
@given(transfer=transfers())
def test_every_byte_once_and_in_its_place(transfer: tuple[int, int, list[RemoteMemory], TransferLimits]) -> None:
    lba, lba_count, memory, limits = transfer
    expected = bytes_of(memory)
    try:
        parts = split_transfer(lba, lba_count, memory, limits)
    except UnsupportedError:
        assert too_scattered(expected, limits)
        return
    seen: list[tuple[int, int]] = []
    for part in parts:
        assert part.lba == lba + len(seen) // limits.lba_bytes
        moved = bytes_of(part.memory)
        assert len(moved) == part.lba_count * limits.lba_bytes > 0
        assert len(moved) <= (limits.max_transfer_bytes or len(moved))
        assert 1 <= len(part.memory) <= limits.max_descriptors
        seen += moved
    assert seen == expected


@given(transfer=transfers())
def test_no_command_could_take_the_next_block_too(
    transfer: tuple[int, int, list[RemoteMemory], TransferLimits],
) -> None:
    lba, lba_count, memory, limits = transfer
    try:
        parts = split_transfer(lba, lba_count, memory, limits)
    except UnsupportedError:
        return
    for part, following in itertools.pairwise(parts):
        grown = [*bytes_of(part.memory), *bytes_of(following.memory)[: limits.lba_bytes]]
        too_long = limits.max_transfer_bytes is not None and len(grown) > limits.max_transfer_bytes
        assert too_long or runs(grown) > limits.max_descriptors


def runs(data: list[tuple[int, int]]) -> int:
    """Pieces of memory that these bytes lie in."""
    return 1 + sum(b != (a[0], a[1] + 1) for a, b in itertools.pairwise(data))


def too_scattered(data: list[tuple[int, int]], limits: TransferLimits) -> bool:
    """Is there a block that lies in more pieces than a command takes?"""
    size = limits.lba_bytes
    return any(runs(data[i : i + size]) > limits.max_descriptors for i in range(0, len(data), size))


@given(
    lba_count=st.integers(1, 9000),
    lba_bytes=st.sampled_from([512, 4096]),
    mdts=st.sampled_from([None, 4096, 131072, MIB, 64 * MIB]),
    descriptors=st.integers(1, 16),
)
def test_large_transfers_become_valid_commands(
    lba_count: int, lba_bytes: int, mdts: int | None, descriptors: int
) -> None:
    """Every part can be encoded, so that all fields hold it, and the parts follow each other in memory and on disk."""
    address, lba = 0x1000, 5
    limits = TransferLimits(lba_bytes, mdts, descriptors)
    for part in split_transfer(lba, lba_count, [piece(address, lba_count * lba_bytes)], limits):
        command = write(1, part.lba, part.lba_count, remote_data_list(part.memory))
        assert command.sqe[0] == 1
        assert part.lba == lba
        for memory in part.memory:
            assert memory.address == address
            address += memory.length_bytes
        lba += part.lba_count
    assert lba == 5 + lba_count
    assert address == 0x1000 + lba_count * lba_bytes
