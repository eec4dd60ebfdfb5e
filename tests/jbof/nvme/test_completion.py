"""Completion queue entries and the status field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.completion import Completion, decode_completion
from meshfusion.jbof.nvme.fields import NvmeFieldError, NvmeProtocolError
from meshfusion.jbof.nvme.status import Status, decode_status


def test_media_error() -> None:
    """Base Figures 96 to 98 and 100; the phase tag is set, and dropped."""
    data = bytes.fromhex("44332211 88776655 0201 0403 0605 03e5")
    completion = decode_completion(data)
    assert completion == Completion(
        result=0x5566778811223344,
        sq_head=0x0102,
        sq_id=0x0304,
        command_id=0x0506,
        status=Status(sct=2, sc=0x81, crd=2, more=True, dnr=True),
    )
    assert (completion.dword0, completion.dword1) == (0x11223344, 0x55667788)
    assert not completion.status.is_success


def test_path_error() -> None:
    data = bytes.fromhex("44332211 88776655 0201 0403 0605 0606")
    assert decode_completion(data).status == Status(sct=3, sc=3)


def test_success() -> None:
    for phase in (b"\0\0", b"\1\0"):
        assert decode_completion(bytes(14) + phase).status.is_success


@given(
    result=st.integers(0, 2**64 - 1),
    numbers=st.tuples(*[st.integers(0, 2**16 - 1)] * 3),
    sct=st.integers(0, 7),
    sc=st.integers(0, 255),
    crd=st.integers(0, 3),
    more=st.booleans(),
    dnr=st.booleans(),
    phase=st.booleans(),
    rest=st.binary(max_size=8),
)
def test_completions_read_back(
    result: int,
    numbers: tuple[int, int, int],
    sct: int,
    sc: int,
    crd: int,
    more: bool,
    dnr: bool,
    phase: bool,
    rest: bytes,
) -> None:
    """Base Figure 98: phase in bit 16 of dword 3, then SC, SCT, CRD, M, DNR upwards (Base Figure 100)."""
    dword3_high = phase | sc << 1 | sct << 9 | crd << 12 | more << 14 | dnr << 15
    words = b"".join(number.to_bytes(2, "little") for number in (*numbers, dword3_high))
    completion = decode_completion(result.to_bytes(8, "little") + words + rest)
    assert completion == Completion(result, *numbers, Status(sct, sc, crd, more, dnr))
    assert completion.status.is_success == (sct == 0 and sc == 0)


@given(length_bytes=st.integers(0, 15))
def test_truncated(length_bytes: int) -> None:
    with pytest.raises(NvmeProtocolError, match=f"{length_bytes} bytes"):
        decode_completion(bytes(length_bytes))


@pytest.mark.parametrize("field", [-1, 0x10000])
def test_status_has_16_bits(field: int) -> None:
    with pytest.raises(NvmeFieldError, match="status field"):
        decode_status(field)
