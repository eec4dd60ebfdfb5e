"""Commands of I/O queues, byte by byte, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme import io_commands as io
from meshfusion.jbof.nvme.command import Command, IoOpcode, capsule
from meshfusion.jbof.nvme.fields import NvmeFieldError, NvmeProtocolError
from meshfusion.jbof.nvme.sgl import NO_DATA, DataPointer, RemoteMemory, capsule_data, remote_data, remote_data_list
from tests.jbof.nvme.layout import NULL_SGL, dword, le

MIB = RemoteMemory(0x7F1234567890, 0x100000, 0xCAFEBABE)
lba_ranges = st.integers(1, 2**32 - 1).flatmap(
    lambda count: st.builds(io.LbaRange, lba=st.integers(0, 2**64 - count), lba_count=st.just(count))
)


def test_read() -> None:
    """NVM Figures 52 and 53: SLBA in dwords 10 and 11, NLB (0's based) in dword 12; Base Figure 92."""
    command = io.read(5, 0x123456789ABCDEF0, 256, remote_data(MIB))
    assert capsule(command, 0xFFFE) == bytes.fromhex(
        "0240feff 05000000 0000000000000000 0000000000000000 9078563412 7f0000 000010 bebafeca 40"
        "f0debc9a 78563412 ff000000 00000000 00000000 00000000"
    )


def test_write_with_fua_and_invalidation() -> None:
    """NVM Figures 69 and 70: FUA is bit 30 of dword 12."""
    command = io.write(5, 0x123456789ABCDEF0, 256, remote_data(MIB, invalidate_key=True), force_unit_access=True)
    assert command.sqe == bytes.fromhex(
        "01400000 05000000 0000000000000000 0000000000000000 9078563412 7f0000 000010 bebafeca 4f"
        "f0debc9a 78563412 ff000040 00000000 00000000 00000000"
    )
    plain = io.write(5, 0x123456789ABCDEF0, 256, remote_data(MIB))
    assert dword(plain, 12) == 0xFF


def test_write_that_names_a_placement() -> None:
    """NVM Figures 69 and 70: DTYPE is bits 23:20 of dword 12, 02h for data placement; DSPEC is bits 31:16 of dword 13.
    Linux' block driver sets the same (NVME_RW_DTYPE_DPLCMT in the upper half of dword 12, the identifier << 16)."""
    command = io.write(5, 0, 256, remote_data(MIB), placement_id=0x1234)
    assert dword(command, 12) == 0x002000FF
    assert dword(command, 13) == 0x12340000
    named = io.write(5, 0, 256, remote_data(MIB), force_unit_access=True, placement_id=0)
    assert (dword(named, 12), dword(named, 13)) == (0x402000FF, 0)
    plain = io.write(5, 0, 256, remote_data(MIB))
    assert (dword(plain, 12), dword(plain, 13)) == (0xFF, 0)
    with pytest.raises(NvmeFieldError, match="DSPEC"):
        io.write(5, 0, 256, remote_data(MIB), placement_id=1 << 16)


def test_reclaim_unit_handles() -> None:
    """Base 7.3: MO 01h in dword 10, NUMD 0's based in dword 11."""
    command = io.reclaim_unit_handles(3, remote_data(RemoteMemory(0x1000, 4080, 7)))
    assert command.sqe[0] == 0x12
    assert (dword(command, 10), dword(command, 11)) == (1, 4080 // 4 - 1)
    with pytest.raises(NvmeFieldError, match="NUMD"):
        io.reclaim_unit_handles(3, remote_data(RemoteMemory(0x1000, 4082, 7)))


def test_placement_ids() -> None:
    """As ``struct nvme_fdp_ruh_status`` of Linux: 14 reserved bytes, the count, then 32 bytes each, the identifier
    first."""
    entries = [pid.to_bytes(2, "little") + (7).to_bytes(2, "little") + bytes(28) for pid in (0, 0x0102, 9)]
    data = bytes(14) + (3).to_bytes(2, "little") + b"".join(entries)
    assert io.parse_placement_ids(data) == (0, 0x0102, 9)
    assert io.parse_placement_ids(data + bytes(100)) == (0, 0x0102, 9)
    assert io.parse_placement_ids(data[:-1]) == (0, 0x0102), "more than was read of them"
    assert io.parse_placement_ids(bytes(16)) == ()
    with pytest.raises(NvmeProtocolError):
        io.parse_placement_ids(bytes(15))


def test_flush_of_all_namespaces() -> None:
    assert io.flush(0xFFFFFFFF).sqe == bytes.fromhex("00400000 ffffffff" + "00" * 16 + NULL_SGL + "00" * 24)
    assert le(io.flush(1).sqe, 4, 4) == 1


def test_write_zeroes() -> None:
    """NVM Figure 82: DEAC is bit 25, FUA bit 30 of dword 12."""
    command = io.write_zeroes(2, 0x10, 65536, deallocate=True, force_unit_access=True)
    assert command.sqe == bytes.fromhex(
        "08400000 02000000" + "00" * 16 + NULL_SGL + "10000000 00000000 ffff0042" + "00" * 12
    )
    assert dword(io.write_zeroes(2, 0x10, 1), 12) == 0


def test_deallocate_with_ranges_in_the_capsule() -> None:
    """NVM Figures 44 and 45: NR is 0's based, AD is bit 2 of dword 11."""
    ranges = io.encode_ranges([io.LbaRange(1, 2), io.LbaRange(3, 4), io.LbaRange(5, 6)])
    command = io.deallocate(2, 3, capsule_data(ranges))
    assert command.sqe == bytes.fromhex(
        "09400000 02000000" + "00" * 16 + "0000000000000000 30000000 000000 01" + "02000000 04000000" + "00" * 16
    )
    assert capsule(command, 0)[64:] == ranges


def test_ranges() -> None:
    """NVM Figure 46: context attributes, length, starting LBA."""
    ranges = io.encode_ranges([io.LbaRange(0x0102030405060708, 0x1000), io.LbaRange(1, 2**32 - 1)])
    assert ranges == bytes.fromhex("00000000 00100000 0807060504030201" + "00000000 ffffffff 0100000000000000")


@given(ranges=st.lists(lba_ranges, min_size=1, max_size=20), rest=st.binary(max_size=40))
def test_ranges_round_trip(ranges: list[io.LbaRange], rest: bytes) -> None:
    data = io.encode_ranges(ranges)
    assert len(data) == 16 * len(ranges)
    assert io.decode_ranges(data + rest, len(ranges)) == tuple(ranges)


def test_the_most_ranges() -> None:
    ranges = [io.LbaRange(i, i + 1) for i in range(256)]
    data = io.encode_ranges(ranges)
    assert io.decode_ranges(data, 256) == tuple(ranges)
    assert dword(io.deallocate(1, 256, capsule_data(data)), 10) == 255


def test_truncated_ranges() -> None:
    with pytest.raises(NvmeProtocolError, match="31 bytes"):
        io.decode_ranges(bytes(31), 2)


@given(
    opcode=st.sampled_from([IoOpcode.READ, IoOpcode.WRITE]),
    nsid=st.integers(1, 2**32 - 2),
    lba_count=st.integers(1, 65536),
    start=st.integers(0, 2**64 - 65536),
    lba_bytes=st.sampled_from([16, 100]),
)
def test_transfers_read_back(opcode: IoOpcode, nsid: int, lba_count: int, start: int, lba_bytes: int) -> None:
    data = remote_data(RemoteMemory(0, lba_count * lba_bytes, 1))
    command = (
        io.read(nsid, start, lba_count, data) if opcode is IoOpcode.READ else io.write(nsid, start, lba_count, data)
    )
    assert command.opcode is opcode
    assert command.sqe[:2] == bytes([opcode.value, 0x40])
    assert le(command.sqe, 4, 4) == nsid
    assert le(command.sqe, 40, 8) == start
    assert dword(command, 12) + 1 == lba_count
    assert command.sqe[24:40] == data.sgl1
    assert not any(command.sqe[8:24])
    assert not any(command.sqe[52:])


def test_a_list_of_pieces_follows_the_entry() -> None:
    pieces = [RemoteMemory(0x1000, 512, 1), RemoteMemory(0x5000, 512, 2)]
    command = io.write(1, 0, 2, remote_data_list(pieces))
    sent = capsule(command, 9)
    assert len(sent) == command.capsule_bytes == 96
    assert sent[24:40] == bytes.fromhex("0000000000000000 20000000 000000 31")
    assert [le(sent, offset, 8) for offset in (64, 80)] == [0x1000, 0x5000]


def blocks(count: int) -> DataPointer:
    return remote_data(RemoteMemory(0, 16 * count, 1))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: io.read(0, 0, 1, blocks(1)), "NSID"),
        (lambda: io.read(0xFFFFFFFF, 0, 1, blocks(1)), "NSID"),
        (lambda: io.write(1, -1, 1, blocks(1)), "SLBA"),
        (lambda: io.write(1, 2**64, 1, blocks(1)), "SLBA"),
        (lambda: io.write(1, 2**64 - 1, 2, blocks(2)), "SLBA"),
        (lambda: io.write(1, 0, 0, blocks(1)), "NLB + 1"),
        (lambda: io.write(1, 0, 65537, blocks(65537)), "NLB + 1"),
        (lambda: io.read(1, 0, 3, remote_data(RemoteMemory(0, 1024, 1))), "data length"),
        (lambda: io.read(1, 0, 1, NO_DATA), "data length"),
        (lambda: io.read(1, 0, 1, capsule_data(bytes(512))), "Read data"),
        (lambda: io.flush(0), "NSID"),
        (lambda: io.flush(2**32), "NSID"),
        (lambda: io.write_zeroes(1, 0, 65537), "NLB + 1"),
        (lambda: io.write_zeroes(0xFFFFFFFF, 0, 1), "NSID"),
        (lambda: io.write_zeroes(1, 2**64 - 1, 2), "SLBA"),
        (lambda: io.deallocate(1, 0, capsule_data(bytes(16))), "NR + 1"),
        (lambda: io.deallocate(1, 257, capsule_data(bytes(16 * 257))), "NR + 1"),
        (lambda: io.deallocate(1, 2, capsule_data(bytes(16))), "range list"),
        (lambda: io.deallocate(0, 1, capsule_data(bytes(16))), "NSID"),
    ],
)
def test_refusals_name_the_field(build: Callable[[], Command], field: str) -> None:
    with pytest.raises(NvmeFieldError) as caught:
        build()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("ranges", "field"),
    [
        ([], "number of ranges"),
        ([io.LbaRange(0, 1)] * 257, "number of ranges"),
        ([io.LbaRange(0, 0)], "LLB"),
        ([io.LbaRange(0, 2**32)], "LLB"),
        ([io.LbaRange(-1, 1)], "SLBA"),
        ([io.LbaRange(2**64 - 1, 2)], "SLBA"),
    ],
)
def test_refused_ranges(ranges: list[io.LbaRange], field: str) -> None:
    with pytest.raises(NvmeFieldError) as caught:
        io.encode_ranges(ranges)
    assert caught.value.field == field
