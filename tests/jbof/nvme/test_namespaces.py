"""Identify Namespace data, namespace lists and namespace descriptors."""

from __future__ import annotations

import contextlib
import random
import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.fields import NvmeProtocolError
from meshfusion.jbof.nvme.namespaces import (
    DeallocatedRead,
    LbaFormat,
    NamespaceIds,
    NamespaceInfo,
    WriteHints,
    parse_namespace,
    parse_namespace_descriptors,
    parse_namespace_list,
)
from tests.jbof.nvme.layout import filled

NGUID = "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
EUI64 = "b0b1b2b3b4b5b6b7"
UUID = "c0c1c2c3c4c5c6c7c8c9cacbcccdcecf"

# NVM Figure 114
PARTS = {
    0: "b0bec0d101000000 afbec0d101000000 3412000000000000",  # NSZE, NCAP, NUSE
    24: "11 01 01 02 01 00 01 7f 00 09",  # NSFEAT, NLBAF, FLBAS, MC, DPC, DPS, NMIC, RESCAP, FPI, DLFEAT
    46: "0001",  # NOIOB
    64: "1f00 0f00 3f00 0700 7f00",  # NPWG, NPWA, NPDG, NPDA, NOWS: 0's based
    92: "04000000 000000 01 0200 0300",  # ANAGRPID, reserved, NSATTR, NVMSETID, ENDGID
    104: NGUID + EUI64,
    128: "0000 09 01 0800 0c 00",  # LBAF0, LBAF1: metadata, data as a power of two, relative performance
}


def namespace(changes: dict[int, str] | None = None) -> NamespaceInfo:
    info = parse_namespace(filled(4096, PARTS | (changes or {})))
    assert info is not None
    return info


def test_namespace() -> None:
    info = namespace()
    assert info == NamespaceInfo(
        nsze=0x1D1C0BEB0,
        ncap=0x1D1C0BEAF,
        nuse=0x1234,
        nsfeat=0x11,
        flbas=1,
        dps=0,
        nmic=1,
        rescap=0x7F,
        dlfeat=9,
        noiob=256,
        hints=WriteHints(npwg=32, npwa=16, npdg=64, npda=8, nows=128),
        anagrpid=4,
        nsattr=1,
        nguid=bytes.fromhex(NGUID),
        eui64=bytes.fromhex(EUI64),
        lba_formats=(LbaFormat(512, 0, 1), LbaFormat(4096, 8, 0)),
        lba_format=LbaFormat(4096, 8, 0),
    )
    assert info.lba_bytes == 4096
    assert info.capacity_bytes == 0x1D1C0BEB0 * 4096
    assert info.is_shared
    assert info.is_write_protected
    assert info.write_zeroes_deallocates
    assert info.deallocated_read is DeallocatedRead.ZEROS
    assert not info.metadata_is_interleaved
    assert not info.has_protection_information


def test_an_inactive_namespace_is_all_zero() -> None:
    assert parse_namespace(bytes(4096)) is None


@pytest.mark.parametrize(
    ("nsfeat", "hints"),
    [
        ("00", None),
        ("0f", None),
        ("10", WriteHints(32, 16, 64, 8, 128)),
        ("20", WriteHints(32, 16, None, 8, 128)),
        ("30", WriteHints(32, 16, 64, 8, 128)),
    ],
)
def test_hints_hold_only_where_they_are_reported(nsfeat: str, hints: WriteHints | None) -> None:
    """NVM Figure 115: OPTPERF, bits 5:4 of NSFEAT."""
    assert namespace({24: nsfeat}).hints == hints


@pytest.mark.parametrize(
    ("dlfeat", "expected"),
    [
        ("00", DeallocatedRead.UNKNOWN),
        ("02", DeallocatedRead.ONES),
        ("03", DeallocatedRead.UNKNOWN),
        ("19", DeallocatedRead.ZEROS),
    ],
)
def test_deallocated_blocks(dlfeat: str, expected: DeallocatedRead) -> None:
    assert namespace({33: dlfeat}).deallocated_read is expected


def test_flags_that_are_off() -> None:
    info = namespace({30: "00", 33: "01", 99: "00"})
    assert not info.is_shared
    assert not info.is_write_protected
    assert not info.write_zeroes_deallocates


def test_more_than_16_formats() -> None:
    """NVM Figure 114: bits 6:5 of FLBAS are the upper bits of the index, bit 4 interleaves metadata."""
    data = filled(4096, {0: "01", 25: "11 31 00 00 02", 134: "09", 196: "4000 0c"})
    info = parse_namespace(data)
    assert info is not None
    assert info.lba_format == info.lba_formats[17] == LbaFormat(4096, 64, 0)
    assert len(info.lba_formats) == 18
    assert info.metadata_is_interleaved
    assert info.has_protection_information


def test_the_upper_index_bits_are_ignored_with_16_formats_or_fewer() -> None:
    assert namespace({26: "61"}).lba_format == LbaFormat(4096, 8, 0)


def test_formats_with_attributes_of_their_own_follow() -> None:
    """NVM 5.5: NULBAF at byte 82 counts formats behind the NLBAF + 1 others."""
    info = namespace({25: "00 01", 82: "01"})
    assert info.lba_format == LbaFormat(4096, 8, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {26: "02"},  # an index that there is not
        {26: "0f"},
        {134: "00"},  # not available
        {134: "08"},  # 256 bytes
        {134: "20"},
    ],
)
def test_an_invalid_format_in_use(changes: dict[int, str]) -> None:
    with pytest.raises(NvmeProtocolError, match="LBA format"):
        namespace(changes)


@given(
    sizes=st.tuples(*[st.integers(1, 2**64 - 1)] * 3),
    noiob=st.integers(0, 2**16 - 1),
    hints=st.tuples(*[st.integers(0, 2**16 - 1)] * 5),
    lbads=st.integers(9, 31),
    group=st.integers(0, 2**32 - 1),
)
def test_fields_read_back(
    sizes: tuple[int, int, int], noiob: int, hints: tuple[int, int, int, int, int], lbads: int, group: int
) -> None:
    info = namespace(
        {
            0: struct.pack("<QQQ", *sizes).hex(),
            46: struct.pack("<H", noiob).hex(),
            64: struct.pack("<HHHHH", *hints).hex(),
            92: struct.pack("<I", group).hex(),
            134: f"{lbads:02x}",
        }
    )
    assert (info.nsze, info.ncap, info.nuse) == sizes
    assert info.noiob == noiob
    assert info.hints == WriteHints(*(value + 1 for value in hints))
    assert info.lba_bytes == 2**lbads
    assert info.anagrpid == group


@given(
    nsids=st.lists(st.integers(1, 2**32 - 2), unique=True, max_size=40).map(sorted),
)
def test_namespace_lists(nsids: list[int]) -> None:
    """Base Figure 139: ascending, then zeros."""
    data = struct.pack(f"<{len(nsids)}I", *nsids).ljust(4096, b"\0")
    assert parse_namespace_list(data) == tuple(nsids)


def test_a_full_list() -> None:
    assert parse_namespace_list(struct.pack("<1024I", *range(5, 1029))) == tuple(range(5, 1029))


@pytest.mark.parametrize("head", ["02000000 01000000", "01000000 01000000", "ffffffff"])
def test_lists_out_of_order(head: str) -> None:
    with pytest.raises(NvmeProtocolError, match="order"):
        parse_namespace_list(filled(4096, {0: head}))


DESCRIPTORS = f"01080000{EUI64} 02100000{NGUID} 03100000{UUID} 04010000 00"


def test_descriptors() -> None:
    """Base Figure 316: type, length, reserved, identifier."""
    assert parse_namespace_descriptors(filled(4096, {0: DESCRIPTORS})) == NamespaceIds(
        eui64=bytes.fromhex(EUI64),
        nguid=bytes.fromhex(NGUID),
        uuid=uuid.UUID("c0c1c2c3-c4c5-c6c7-c8c9-cacbcccdcecf"),
        csi=0,
    )


def test_unknown_descriptors_are_passed_over() -> None:
    data = filled(4096, {0: f"55030000 010203 03100000{UUID}"})
    assert parse_namespace_descriptors(data) == NamespaceIds(uuid=uuid.UUID(hex=UUID))


def test_no_descriptors() -> None:
    assert parse_namespace_descriptors(bytes(4096)) == NamespaceIds()


@pytest.mark.parametrize("parts", [{0: "01070000"}, {0: "0210", 20: "0311"}, {0: "0401", 5: "01090000"}])
def test_descriptors_of_a_wrong_length(parts: dict[int, str]) -> None:
    with pytest.raises(NvmeProtocolError, match="descriptor of type"):
        parse_namespace_descriptors(filled(4096, parts))


def test_a_descriptor_beyond_the_end() -> None:
    # 16 times 255 bytes of an unknown type, then one of 200 bytes at 4080
    parts = {offset: "77fb0000" for offset in range(0, 4080, 255)} | {4080: "77c80000"}
    with pytest.raises(NvmeProtocolError, match="4080"):
        parse_namespace_descriptors(filled(4096, parts))


@given(seed=st.integers(0), noise_bytes=st.sampled_from([16, 140, 4096]))
def test_any_bytes_are_judged(seed: int, noise_bytes: int) -> None:
    """Read or refused: no other error."""
    data = random.Random(seed).randbytes(noise_bytes).ljust(4096, b"\0")
    for parse in (parse_namespace, parse_namespace_list, parse_namespace_descriptors):
        with contextlib.suppress(NvmeProtocolError):
            assert parse(data) is not None


@pytest.mark.parametrize("length_bytes", [0, 128, 4095])
def test_truncated(length_bytes: int) -> None:
    for parse in (parse_namespace, parse_namespace_list, parse_namespace_descriptors):
        with pytest.raises(NvmeProtocolError, match=f"{length_bytes} bytes"):
            parse(bytes(length_bytes))
