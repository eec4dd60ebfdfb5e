"""DH-HMAC-CHAP with the NULL group on one queue pair, between Connect and its first other command (Base 8.13). ::

    host    Negotiate    what it can
    target  Challenge    hash, C1, S1
    host    Reply        HMAC(host key, C1 S1 ...), and C2, S2 if the controller shall authenticate too
    target  Success1     HMAC(controller key, C2 S2 ...) if it was asked
    host    Success2     if it was asked, and was right

In place of Challenge and Success1 a target may send Failure1; a host that is not content sends Failure2. Transaction
number, C2 and S2 are new each time, so that nothing recorded fits in again.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import struct
from dataclasses import dataclass
from typing import Final, TypeVar

from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.auth_keys import AuthHash, RandomBytes, Secret, transformed_key
from meshfusion.jbof.nvme.auth_messages import (
    NULL_GROUP,
    RECEIVE_BYTES,
    Challenge,
    Explanation,
    Failure1,
    Success1,
    decode_received,
    encode_failure2,
    encode_negotiate,
    encode_reply,
    encode_success2,
)
from meshfusion.jbof.nvme.fabrics import ConnectResult, authentication_receive, authentication_send
from meshfusion.jbof.nvme.fields import NvmeProtocolError, protocol_error
from meshfusion.jbof.nvme.procedures import Abandoned, Ask, Procedure
from meshfusion.jbof.nvme.queue_effects import CommandDeadlineError
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.status import NvmeCommandError

_NUMBERS: Final = struct.Struct("<IHB")  # sequence number, transaction, secure channel concatenation
_EXPLANATIONS: Final = {
    Explanation.FAILED: "the response is wrong, or it has no key for it",
    Explanation.PROTOCOL_UNUSABLE: "it does not use DH-HMAC-CHAP, or cannot use its key",
    Explanation.CONCATENATION_MISMATCH: "it wants a secure channel",
    Explanation.HASH_UNUSABLE: "it wants another hash",
    Explanation.GROUP_UNUSABLE: "it wants a Diffie-Hellman group",
    Explanation.INCORRECT_PAYLOAD: "it does not understand a message",
    Explanation.INCORRECT_MESSAGE: "it expected another message",
}
_NULL_GROUP_STEP: Final = (
    "Allow the group null for this host at the target (Linux: dhchap_dhgroup, SPDK: dhchap_dhgroups)."
)
_KEYS_STEP: Final = (
    "Compare the keys of this host and of the controller with those at the target; they hold for one host NQN each."
)


class NvmeAuthenticationError(MediaError):
    """Target and host did not believe each other."""


class Authentication(enum.Enum):
    """Who proved to have a key when the admin queue was connected."""

    NONE = "none"
    HOST = "host"
    MUTUAL = "mutual"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What one exchange agreed on. ``host_nqn`` and ``subsystem_nqn``: as in Connect."""

    hash: AuthHash
    transaction: int
    host_nqn: str
    subsystem_nqn: str

    def host_response(self, secret: Secret, challenge: bytes, sequence: int) -> bytes:
        """As in ``nvme_auth_dhchap_setup_host_response`` of Linux."""
        return self._response(secret, challenge, sequence, b"HostHost", self.host_nqn, self.subsystem_nqn)

    def controller_response(self, secret: Secret, challenge: bytes, sequence: int) -> bytes:
        """As in ``nvmet_auth_ctrl_hash`` of Linux."""
        return self._response(secret, challenge, sequence, b"Controller", self.subsystem_nqn, self.host_nqn)

    def _response(
        self, secret: Secret, challenge: bytes, sequence: int, role: bytes, own_nqn: str, other_nqn: str
    ) -> bytes:
        numbers = _NUMBERS.pack(sequence, self.transaction, 0)
        names = role + own_nqn.encode() + b"\0" + other_nqn.encode()
        return self.hash.hmac(transformed_key(secret, own_nqn), challenge + numbers + names)


Message = TypeVar("Message", Challenge, Success1)


class _Refusal(Exception):
    """The target is to be told ``explanation``, and the owner ``error``."""

    def __init__(self, error: MeshFusionError, explanation: Explanation) -> None:
        super().__init__(str(error))
        self.error = error
        self.explanation = explanation


def authenticate(
    settings: ControllerSettings, queue_id: int, connected: ConnectResult, random_bytes: RandomBytes
) -> Procedure[Authentication]:
    """What the target wants after Connect of this queue, and what the keys in ``settings`` demand of it.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` for what we cannot or have no key for, and
    :class:`NvmeAuthenticationError` when either side is refused.
    """
    if connected.needs_secure_channel:
        raise UnsupportedError(
            f"{settings.where}: the target wants a secure channel (TLS), which NVMe/RDMA does not have",
            next_step="Ask for DH-HMAC-CHAP without secure channel concatenation at the target.",
        )
    if not connected.needs_authentication:
        # An I/O queue hangs on the admin queue's controller; a target may be content with that one's proof.
        if queue_id == 0 and settings.controller_key is not None:
            raise NvmeAuthenticationError(
                f"{settings.where}: the target does not authenticate, but a controller key is set, so it must",
                next_step="Set this host's DH-HMAC-CHAP keys at the target, or remove the controller key here.",
            )
        return Authentication.NONE
    if settings.host_key is None:
        raise UnsupportedError(
            f"{settings.where}: the target wants the host to authenticate, and no key is set here",
            next_step="Set host_key to this host's DH-HMAC-CHAP key, or remove the key at the target.",
        )
    return (yield from _exchange(settings, settings.host_key, queue_id, random_bytes))


def _exchange(
    settings: ControllerSettings, host_key: Secret, queue_id: int, random_bytes: RandomBytes
) -> Procedure[Authentication]:
    where = f"{settings.where}, queue {queue_id}"
    transaction = int.from_bytes(random_bytes(2), "little")
    try:
        yield _send(encode_negotiate(transaction), queue_id)
        challenge = _expect_challenge((yield _receive(queue_id)).data, transaction, where)
        transcript = Transcript(AuthHash(challenge.hash_id), transaction, settings.host_nqn, settings.subsystem_nqn)
        response = transcript.host_response(host_key, challenge.challenge, challenge.sequence)
        if settings.controller_key is None:
            yield _send(encode_reply(transaction, response), queue_id)
            yield from _receive_success(transcript, where, queue_id)
            return Authentication.HOST
        own_challenge = random_bytes(transcript.hash.digest_bytes)
        sequence = int.from_bytes(random_bytes(4), "little") or 1
        expected = transcript.controller_response(settings.controller_key, own_challenge, sequence)
        yield _send(encode_reply(transaction, response, challenge=own_challenge, sequence=sequence), queue_id)
        success = yield from _receive_success(transcript, where, queue_id)
        _check_response(success, expected, where)
        yield _send(encode_success2(transaction), queue_id)
        return Authentication.MUTUAL
    except _Refusal as refusal:
        # It is over either way, also for targets that hang up instead of answering.
        with contextlib.suppress(NvmeCommandError, Abandoned):
            yield _send(encode_failure2(transaction, refusal.explanation), queue_id)
        raise refusal.error from None


def _expect_challenge(data: bytes, transaction: int, where: str) -> Challenge:
    message = _expect(data, Challenge, transaction, where)
    if message.group_id != NULL_GROUP:
        error = UnsupportedError(
            f"{where}: the target wants Diffie-Hellman group {message.group_id:02X}h for authentication; "
            "MeshFusion has only the group null",
            next_step=_NULL_GROUP_STEP,
        )
        raise _Refusal(error, Explanation.GROUP_UNUSABLE)
    if message.hash_id not in list(AuthHash):
        error = UnsupportedError(
            f"{where}: the target wants hash {message.hash_id:02X}h for authentication, which is unknown",
            next_step="Set SHA-256, SHA-384 or SHA-512 for this host at the target.",
        )
        raise _Refusal(error, Explanation.HASH_UNUSABLE)
    if len(message.challenge) != AuthHash(message.hash_id).digest_bytes or message.dh_value:
        raise _bad_payload(f"{where}: a challenge of {len(message.challenge)} bytes for hash {message.hash_id:02X}h")
    return message


def _receive_success(transcript: Transcript, where: str, queue_id: int) -> Procedure[Success1]:
    try:
        answer = yield _receive(queue_id)
    except Abandoned as lost:
        if isinstance(lost.error, CommandDeadlineError):
            raise
        # Linux' target ends a controller whose host was refused, often before its Failure1 is on the way.
        raise NvmeAuthenticationError(
            f"{where}: the connection ended while the target checked the response, probably because that is wrong: "
            f"{lost.error.message}",
            next_step=_KEYS_STEP,
        ) from lost.error
    message = _expect(answer.data, Success1, transcript.transaction, where)
    if message.response is not None and len(message.response) != transcript.hash.digest_bytes:
        raise _bad_payload(f"{where}: a response of {len(message.response)} bytes to hash {transcript.hash.name}")
    return message


def _check_response(success: Success1, expected: bytes, where: str) -> None:
    if success.response is not None and hmac.compare_digest(success.response, expected):
        return
    problem = "gave no proof" if success.response is None else "proved nothing: its response is wrong"
    error = NvmeAuthenticationError(f"{where}: the target was asked for its key and {problem}", next_step=_KEYS_STEP)
    raise _Refusal(error, Explanation.FAILED)


def _expect(data: bytes, kind: type[Message], transaction: int, where: str) -> Message:
    """The message of ``kind`` that is due now; a Failure1 is raised, anything else refused."""
    try:
        message = decode_received(data)
    except NvmeProtocolError as error:
        raise _Refusal(error, Explanation.INCORRECT_PAYLOAD) from None
    if isinstance(message, Failure1):
        raise _refused(message, where)
    if message.transaction != transaction:
        raise _bad_payload(
            f"{where}: an authentication message of transaction {message.transaction}, not {transaction}"
        )
    if not isinstance(message, kind):
        unexpected = protocol_error(f"{where}: authentication brings {type(message).__name__}, not {kind.__name__}")
        raise _Refusal(unexpected, Explanation.INCORRECT_MESSAGE)
    return message


def _refused(failure: Failure1, where: str) -> MeshFusionError:
    """The target ended the exchange. Its transaction does not matter: there is nothing left to protect."""
    words = next((words for code, words in _EXPLANATIONS.items() if code == failure.explanation), "for no known reason")
    message = f"{where}: the target refused authentication: {words} (explanation {failure.explanation:02X}h)"
    if failure.explanation == Explanation.GROUP_UNUSABLE:
        return UnsupportedError(f"{message}; MeshFusion has only the group null", next_step=_NULL_GROUP_STEP)
    return NvmeAuthenticationError(message, next_step=_KEYS_STEP)


def _bad_payload(message: str) -> _Refusal:
    return _Refusal(protocol_error(message), Explanation.INCORRECT_PAYLOAD)


def _send(message: bytes, queue_id: int) -> Ask:
    return Ask(authentication_send, len(message), message, queue_id)


def _receive(queue_id: int) -> Ask:
    return Ask(authentication_receive, RECEIVE_BYTES, queue_id=queue_id)
