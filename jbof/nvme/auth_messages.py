"""Messages of DH-HMAC-CHAP, which travel as data of Authentication Send and Receive (Base 8.13). ::

    offset  size  all            Negotiate       Challenge       Reply           Success1        Failure1, Failure2
         0     1  type
         1     1  identifier
         2     2  zero
         4     2  transaction
         6     1                 SC_C            digest length   digest length   digest length   reason
         7     1                 protocols: 1                                                    explanation
         8     1                 descriptor      hash            challenge: 1    response: 1
         9     1                                 DH group
        10     2                                 DH value length DH value length
        12     4                                 sequence number sequence number
        16                                       challenge       response        response
                                                 DH value        challenge
                                                                 DH value

Success2 is 16 bytes, all zero behind the transaction. The descriptor of Negotiate has 64 bytes: identifier 01h, zero,
counts of hashes and of DH groups, and from its bytes 4 and 34 on their identifiers.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from meshfusion.jbof.nvme.auth_keys import AuthHash
from meshfusion.jbof.nvme.fields import MAX_U16, MAX_U32, check_int, check_received, protocol_error

RECEIVE_BYTES: Final = 4096
"""Room for any answer, as Linux' host gives it: a challenge with the DH value of the largest group has 1104 bytes."""

NULL_GROUP: Final = 0x00

_COMMON_TYPE: Final = 0x00
_DHCHAP_TYPE: Final = 0x01
_DHCHAP_PROTOCOL: Final = 0x01
# A group of vendors (E0h to FEh), which no target has. Linux' target, from 6.0 on, takes an offer only if a
# group in it differs from its own: so the NULL group alone would be refused by targets that want just that. No real
# group stands here, because SPDK's target chooses the strongest that it is offered.
_NO_GROUP: Final = 0xE0
_OFFERED_HASHES: Final = (AuthHash.SHA512, AuthHash.SHA384, AuthHash.SHA256)

_HEAD: Final = struct.Struct("<BBxxH")
_NEGOTIATE: Final = struct.Struct("<BBxxHBBBxBB30s30s")
_CHALLENGE: Final = struct.Struct("<BBxxHBxBBHI")
_REPLY: Final = struct.Struct("<BBxxHBxBxHI")
_SUCCESS1: Final = struct.Struct("<BBxxHBxB7x")
_SUCCESS2: Final = struct.Struct("<BBxxH10x")
_FAILURE: Final = struct.Struct("<BBxxHBB")
assert _NEGOTIATE.size == 8 + 64
assert _CHALLENGE.size == _REPLY.size == _SUCCESS1.size == _SUCCESS2.size == 16


class MessageId(enum.IntEnum):
    """Negotiation and failures are of the common type, the others of that of DH-HMAC-CHAP."""

    NEGOTIATE = 0x00
    CHALLENGE = 0x01
    REPLY = 0x02
    SUCCESS1 = 0x03
    SUCCESS2 = 0x04
    FAILURE2 = 0xF0
    FAILURE1 = 0xF1


class Explanation(enum.IntEnum):
    """Why it failed (Base 8.13). The reason code beside it is always 01h: authentication failed."""

    FAILED = 0x01
    PROTOCOL_UNUSABLE = 0x02
    CONCATENATION_MISMATCH = 0x03
    HASH_UNUSABLE = 0x04
    GROUP_UNUSABLE = 0x05
    INCORRECT_PAYLOAD = 0x06
    INCORRECT_MESSAGE = 0x07


class Challenge(NamedTuple):
    """``hash_id`` and ``group_id`` as received: the target may choose what we do not know."""

    transaction: int
    hash_id: int
    group_id: int
    sequence: int
    challenge: bytes
    dh_value: bytes = b""


class Success1(NamedTuple):
    """The target is content with the host. ``response``: the controller's, None if it gave none."""

    transaction: int
    response: bytes | None


class Failure1(NamedTuple):
    transaction: int
    reason: int
    explanation: int


Received = Challenge | Success1 | Failure1


def encode_negotiate(transaction: int) -> bytes:
    """What we can: all three hashes, no secure channel, and of the DH groups only NULL."""
    _check_transaction(transaction)
    groups = bytes((NULL_GROUP, _NO_GROUP))
    return _NEGOTIATE.pack(
        _COMMON_TYPE,
        MessageId.NEGOTIATE,
        transaction,
        0,
        1,
        _DHCHAP_PROTOCOL,
        len(_OFFERED_HASHES),
        len(groups),
        bytes(_OFFERED_HASHES),
        groups,
    )


def encode_reply(transaction: int, response: bytes, *, challenge: bytes | None = None, sequence: int = 0) -> bytes:
    """The host's ``response``, and its own ``challenge`` if the controller shall authenticate too.

    ``sequence`` belongs to the challenge and is not 0 then, which would mean that no response is wanted. Without a
    challenge there are zeros in its place: targets check the length.
    """
    _check_transaction(transaction)
    assert len(response) in {hash_.digest_bytes for hash_ in AuthHash}
    assert challenge is None or len(challenge) == len(response)
    check_int("SEQNUM", sequence, 0 if challenge is None else 1, 0 if challenge is None else MAX_U32)
    head = _REPLY.pack(_DHCHAP_TYPE, MessageId.REPLY, transaction, len(response), challenge is not None, 0, sequence)
    return head + response + (bytes(len(response)) if challenge is None else challenge)


def encode_success2(transaction: int) -> bytes:
    """The controller's response is right."""
    return _SUCCESS2.pack(_DHCHAP_TYPE, MessageId.SUCCESS2, _check_transaction(transaction))


def encode_failure2(transaction: int, explanation: Explanation) -> bytes:
    """The host ends the exchange."""
    return _FAILURE.pack(_COMMON_TYPE, MessageId.FAILURE2, _check_transaction(transaction), 0x01, explanation)


def decode_received(data: bytes) -> Received:
    """From what Authentication Receive brought, which may be longer than the message.

    Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError` for a message that a host does not get, and for one
    that is cut short.
    """
    check_received("the authentication message", data, _FAILURE.size)
    match data[0], data[1]:
        case (0x00, 0xF1):
            _, _, transaction, reason, explanation = _FAILURE.unpack_from(data)
            return Failure1(transaction, reason, explanation)
        case (0x01, 0x01):
            return _decode_challenge(data)
        case (0x01, 0x03):
            return _decode_success1(data)
    raise protocol_error(f"an authentication message of type {data[0]:02X}h, identifier {data[1]:02X}h for a host")


def _decode_challenge(data: bytes) -> Challenge:
    check_received("the challenge", data, _CHALLENGE.size)
    _, _, transaction, digest_bytes, hash_id, group_id, dh_bytes, sequence = _CHALLENGE.unpack_from(data)
    middle = _CHALLENGE.size + digest_bytes
    check_received("the challenge", data, middle + dh_bytes)
    challenge, dh_value = data[_CHALLENGE.size : middle], data[middle : middle + dh_bytes]
    return Challenge(transaction, hash_id, group_id, sequence, challenge, dh_value)


def _decode_success1(data: bytes) -> Success1:
    check_received("the success message", data, _SUCCESS1.size)
    _, _, transaction, digest_bytes, has_response = _SUCCESS1.unpack_from(data)
    if not has_response:
        return Success1(transaction, None)
    end = _SUCCESS1.size + digest_bytes
    check_received("the success message", data, end)
    return Success1(transaction, data[_SUCCESS1.size : end])


def _check_transaction(transaction: int) -> int:
    return check_int("T_ID", transaction, 0, MAX_U16)
