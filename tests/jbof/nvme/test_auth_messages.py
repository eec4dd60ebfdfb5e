"""Messages of DH-HMAC-CHAP. Vectors follow the structures of Linux (include/linux/nvme.h, nvmf_auth_dhchap_*)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.auth_messages import (
    Challenge,
    Explanation,
    Failure1,
    Received,
    Success1,
    decode_received,
    encode_failure2,
    encode_negotiate,
    encode_reply,
    encode_success2,
)
from meshfusion.jbof.nvme.fields import NvmeFieldError, NvmeProtocolError

C1 = bytes(range(32))
u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)


def test_negotiate() -> None:
    """One protocol, DH-HMAC-CHAP: three hashes, the group null and one that nobody has; lists at 4 and 34."""
    message = encode_negotiate(0x1234)
    assert message[:8].hex(" ") == "00 00 00 00 34 12 00 01"
    assert message[8:12].hex(" ") == "01 00 03 02"
    assert message[12:42] == bytes((3, 2, 1)).ljust(30, b"\0")
    assert message[42:72] == bytes((0, 0xE0)).ljust(30, b"\0")
    assert len(message) == 8 + 64


def test_reply_one_way() -> None:
    """cvalid 0, seqnum 0, and room for a challenge: Linux and SPDK want it."""
    message = encode_reply(0x0201, C1)
    assert message[:16].hex(" ") == "01 02 00 00 01 02 20 00 00 00 00 00 00 00 00 00"
    assert message[16:] == C1 + bytes(32)


def test_reply_both_ways() -> None:
    message = encode_reply(0xFFFF, C1 + C1[:16], challenge=bytes(48), sequence=0x01020304)
    assert message[:16].hex(" ") == "01 02 00 00 ff ff 30 00 01 00 00 00 04 03 02 01"
    assert message[16:] == C1 + C1[:16] + bytes(48)


def test_endings() -> None:
    assert encode_success2(0x0304).hex(" ") == "01 04 00 00 04 03" + " 00" * 10
    assert encode_failure2(0x0304, Explanation.FAILED).hex(" ") == "00 f0 00 00 04 03 01 01"
    assert encode_failure2(0, Explanation.GROUP_UNUSABLE).hex(" ") == "00 f0 00 00 00 00 01 05"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("01 01 00 00 34 12 20 00 01 00 00 00 78 56 34 12" + C1.hex(), Challenge(0x1234, 1, 0, 0x12345678, C1)),
        (
            "01 01 00 00 01 00 04 00 03 02 03 00 01 00 00 00 aabbccdd 010203",
            Challenge(1, 3, 2, 1, bytes.fromhex("aabbccdd"), b"\1\2\3"),
        ),
        ("01 03 00 00 02 00 20 00 00" + "00" * 7, Success1(2, None)),
        ("01 03 00 00 02 00 20 00 01" + "00" * 7 + C1.hex(), Success1(2, C1)),
        ("00 f1 00 00 02 00 01 05", Failure1(2, 1, 5)),
    ],
)
@pytest.mark.parametrize("padding_bytes", [0, 1, 4000])
def test_received(text: str, expected: Received, padding_bytes: int) -> None:
    """Behind the message there is whatever is left of the memory for it."""
    assert decode_received(bytes.fromhex(text) + b"\xa5" * padding_bytes) == expected


@pytest.mark.parametrize(
    "whole",
    [
        bytes.fromhex("01 01 00 00 34 12 20 00 01 01 04 00 78 56 34 12") + C1 + bytes(4),
        bytes.fromhex("01 03 00 00 02 00 20 00 01 00 00 00 00 00 00 00") + C1,
        bytes.fromhex("00 f1 00 00 02 00 01 05"),
    ],
)
def test_a_message_that_is_cut_short(whole: bytes) -> None:
    decode_received(whole)
    for length in range(len(whole)):
        with pytest.raises(NvmeProtocolError):
            decode_received(whole[:length])


@pytest.mark.parametrize("start", ["0000", "0001", "00f0", "0100", "0102", "0104", "01f1", "0201", "ffff"])
def test_messages_that_a_host_does_not_get(start: str) -> None:
    with pytest.raises(NvmeProtocolError, match=start[:2].upper()):
        decode_received(bytes.fromhex(start).ljust(4096, b"\0"))


@given(data=st.binary(max_size=200))
def test_any_bytes_are_judged(data: bytes) -> None:
    for candidate in (data, b"\1\1" + data, b"\1\3" + data, b"\0\xf1" + data):
        try:
            message = decode_received(candidate)
        except NvmeProtocolError:
            continue
        assert message.transaction == int.from_bytes(candidate[4:6], "little")


@given(
    transaction=u16, hash_id=st.integers(0, 255), group_id=st.integers(0, 255), sequence=u32,
    challenge=st.binary(max_size=255), dh_value=st.binary(max_size=1024), rest=st.binary(max_size=9),
)  # fmt: skip
def test_challenges_read_back(
    transaction: int, hash_id: int, group_id: int, sequence: int, challenge: bytes, dh_value: bytes, rest: bytes
) -> None:
    head = struct.pack(
        "<BBHHBBBBHI", 1, 1, 0, transaction, len(challenge), 0, hash_id, group_id, len(dh_value), sequence
    )
    expected = Challenge(transaction, hash_id, group_id, sequence, challenge, dh_value)
    assert decode_received(head + challenge + dh_value + rest) == expected


@given(transaction=u16, sequence=st.integers(1, 2**32 - 1), length=st.sampled_from((32, 48, 64)), data=st.data())
def test_replies_read_back(transaction: int, sequence: int, length: int, data: st.DataObject) -> None:
    response, challenge = (data.draw(st.binary(min_size=length, max_size=length)) for _ in range(2))
    message = encode_reply(transaction, response, challenge=challenge, sequence=sequence)
    kind, name, _, t_id, hl, _, cvalid, _, dhvlen, seqnum = struct.unpack_from("<BBHHBBBBHI", message)
    assert (kind, name, t_id, hl, cvalid, dhvlen, seqnum) == (1, 2, transaction, length, 1, 0, sequence)
    assert (message[16 : 16 + length], message[16 + length :]) == (response, challenge)


@pytest.mark.parametrize("transaction", [-1, 2**16])
def test_transactions_have_16_bits(transaction: int) -> None:
    for encode in (encode_negotiate, encode_success2):
        with pytest.raises(NvmeFieldError, match="T_ID"):
            encode(transaction)


@pytest.mark.parametrize("sequence", [0, 2**32])
def test_a_challenge_has_a_sequence_number(sequence: int) -> None:
    with pytest.raises(NvmeFieldError, match="SEQNUM"):
        encode_reply(1, C1, challenge=C1, sequence=sequence)


def test_no_sequence_number_without_a_challenge() -> None:
    with pytest.raises(NvmeFieldError, match="SEQNUM"):
        encode_reply(1, C1, sequence=1)
