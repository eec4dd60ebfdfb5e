"""The private data of RDMA connections."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.fields import NvmeFieldError, NvmeProtocolError
from meshfusion.jbof.nvme.rdma_cm import RejectReason, decode_accept, encode_request, rejected
from tests.jbof.nvme.layout import le


def test_request() -> None:
    """RDMA Figure 5: RECFMT, QID, HRQSIZE, HSQSIZE (0's based), CNTLID, reserved."""
    assert encode_request(3, 128, 0x0102) == bytes.fromhex("0000 0300 8000 7f00 0201" + "00" * 22)
    assert encode_request(0, 32, 0) == bytes.fromhex("0000 0000 2000 1f00 0000" + "00" * 22)


@given(queue_id=st.integers(1, 65534), depth=st.integers(2, 65535), controller_id=st.integers(0, 65535))
def test_requests_read_back(queue_id: int, depth: int, controller_id: int) -> None:
    data = encode_request(queue_id, depth, controller_id)
    assert len(data) == 32
    assert [le(data, offset, 2) for offset in range(0, 10, 2)] == [0, queue_id, depth, depth - 1, controller_id]
    assert not any(data[10:])


@pytest.mark.parametrize(
    ("queue_id", "depth", "controller_id", "field"),
    [
        (-1, 32, 0, "QID"),
        (65535, 32, 0, "QID"),
        (1, 1, 0, "HRQSIZE"),
        (1, 65536, 0, "HRQSIZE"),
        (1, 32, 65536, "CNTLID"),
        (0, 32, 1, "CNTLID"),  # must be 0 on the admin queue
    ],
)
def test_refused_requests(queue_id: int, depth: int, controller_id: int, field: str) -> None:
    with pytest.raises(NvmeFieldError) as caught:
        encode_request(queue_id, depth, controller_id)
    assert caught.value.field == field


@pytest.mark.parametrize("length_bytes", [4, 32, 196])
def test_accept(length_bytes: int) -> None:
    """RDMA Figure 6: RECFMT, CRQSIZE; what the connection manager hands over is longer than what was sent."""
    assert decode_accept(bytes.fromhex("0000 8000").ljust(length_bytes, b"\0")) == 128


@pytest.mark.parametrize(
    ("data", "problem"),
    [("", "0 bytes"), ("000080", "3 bytes"), ("01008000", "record format 1"), ("00000000", "0 queue entries")],
)
def test_bad_accepts(data: str, problem: str) -> None:
    with pytest.raises(NvmeProtocolError, match=problem):
        decode_accept(bytes.fromhex(data))


# RDMA Figure 11
REASONS = {
    1: "PRIVATE_DATA_LENGTH",
    2: "RECORD_FORMAT",
    3: "QUEUE_ID",
    4: "HOST_SEND_QUEUE_SIZE",
    5: "HOST_RECEIVE_QUEUE_SIZE",
    6: "NO_RESOURCES",
    7: "INBOUND_READ_DEPTH",
    8: "OUTBOUND_READ_DEPTH",
    9: "CONTROLLER_ID",
}


@pytest.mark.parametrize(("status", "name"), list(REASONS.items()))
def test_reject(status: int, name: str) -> None:
    """RDMA Figure 7: RECFMT, STS."""
    error = rejected(bytes.fromhex("0000") + status.to_bytes(2, "little") + bytes(60), where="queue 3 of target a")
    assert error.reason is RejectReason[name]
    assert error.message.startswith("queue 3 of target a: the target rejected the connection: ")
    assert f"status {status:#x}" in error.message
    assert error.next_step


def test_every_reason_is_tested() -> None:
    assert {reason.value: reason.name for reason in RejectReason} == REASONS


@pytest.mark.parametrize("data", ["", "0000", "00000000", "00000a00", "01000600"])
def test_rejections_without_a_known_reason(data: str) -> None:
    error = rejected(bytes.fromhex(data), where="target a")
    assert error.reason is None
    assert (data or "no private data") in error.message
