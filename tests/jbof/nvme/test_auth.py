"""DH-HMAC-CHAP between Connect and the first other command, against a simulated target that computes by itself."""

from __future__ import annotations

import hmac
import logging
from dataclasses import replace
from typing import Any

import pytest

from meshfusion.jbof.errors import ConfigError, MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.auth import Authentication, NvmeAuthenticationError, Transcript
from meshfusion.jbof.nvme.auth_keys import AuthHash, Secret
from meshfusion.jbof.nvme.controller_effects import Connected, ConnectionLost, ControllerState, RetryScheduled
from meshfusion.jbof.nvme.fields import NvmeProtocolError
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.jbof.nvme.queue_effects import CommandDeadlineError
from tests.jbof.nvme.auth_target import ATR, HANG_UP, HOST_NQN, SUBSYSTEM_NQN, AuthTarget, failure1
from tests.jbof.nvme.controller_bench import SETTINGS, Bench
from tests.jbof.nvme.sim.live import LiveTransport
from tests.jbof.nvme.sim.subsystem import SimNamespace, Subsystem

_S = ControllerState
HOST_KEY, CONTROLLER_KEY = Secret(bytes(range(32))), Secret(bytes(range(100, 148)), AuthHash.SHA384)
OTHER_KEY = Secret(bytes(range(1, 33)))
BOTH = {"host_key": HOST_KEY, "controller_key": CONTROLLER_KEY}
CONTROLLER_HMAC_KEY = hmac.digest(CONTROLLER_KEY.key, SUBSYSTEM_NQN + b"NVMe-over-Fabrics", "sha384")


class AuthBench(Bench):
    target: AuthTarget

    def __init__(self, **settings: Any) -> None:
        super().__init__(target=AuthTarget, **settings)
        self.target.controller_key = CONTROLLER_HMAC_KEY

    @property
    def failures2(self) -> list[int]:
        """Explanations that the host gave."""
        return [message[7] for _, message in self.target.received if message[:2] == b"\0\xf0"]

    def change(self, name: str, *changed: bytes | None, queue_id: int = 0) -> None:
        """What the target sends in place of the message of this name."""
        rest = list(changed)

        def change(this: str, queue: int, message: bytes) -> bytes | None:
            return rest.pop(0) if rest and (this, queue) == (name, queue_id) else message

        self.target.changes = change

    def patch(self, name: str, offset: int, data: bytes) -> None:
        def patch(this: str, _: int, message: bytes) -> bytes:
            return message[:offset] + data + message[offset + len(data) :] if this == name else message

        self.target.changes = patch


def error_of(bench: Bench) -> MeshFusionError:
    error = bench.connect().error()
    assert isinstance(error, MeshFusionError)
    assert bench.fabric.links == {}
    assert bench.admin.memory.in_use_count == 0
    return error


@pytest.mark.parametrize("hash_", AuthHash)
@pytest.mark.parametrize("transform", [None, *AuthHash])
def test_every_queue_is_authenticated(hash_: AuthHash, transform: AuthHash | None) -> None:
    key = bytes(range(64))
    bench = AuthBench(host_key=Secret(key, transform))
    bench.target.hash_id = hash_
    bench.target.host_key = (
        hmac.digest(key, HOST_NQN + b"NVMe-over-Fabrics", transform.name.lower()) if transform else key
    )
    bench.connect()
    [connected] = bench.seen(Connected)
    assert connected.info.authentication is Authentication.HOST
    assert [queue for queue, _ in bench.target.received] == [0, 0, 1, 1, 2, 2]  # Negotiate and Reply
    assert all(exchange.is_proven for exchange in bench.target.exchanges.values())


@pytest.mark.parametrize("hash_", AuthHash)
def test_the_controller_is_authenticated_too(hash_: AuthHash) -> None:
    bench = AuthBench(**BOTH)
    bench.target.hash_id = hash_
    bench.connect()
    [connected] = bench.seen(Connected)
    assert connected.info.authentication is Authentication.MUTUAL
    assert [queue for queue, _ in bench.target.received] == [0] * 3 + [1] * 3 + [2] * 3  # and Success2
    numbers = [exchange.s2 for exchange in bench.target.exchanges.values()]
    challenges = [exchange.c2 for exchange in bench.target.exchanges.values()]
    assert len(set(numbers)) == len(set(challenges)) == 3
    assert bench.failures2 == []


def test_responses_of_a_fixed_exchange() -> None:
    """Both written out as Linux hashes them."""
    transcript = Transcript(AuthHash.SHA256, 0x0102, "nqn.2014-08.com.example:h", "nqn.2014-08.com.example:s")
    challenge = bytes(range(32))
    host = challenge + bytes.fromhex("0d0c0b0a 0201 00") + b"HostHost"
    host += b"nqn.2014-08.com.example:h\0nqn.2014-08.com.example:s"
    controller = challenge + bytes.fromhex("0d0c0b0a 0201 00") + b"Controller"
    controller += b"nqn.2014-08.com.example:s\0nqn.2014-08.com.example:h"
    assert transcript.host_response(HOST_KEY, challenge, 0x0A0B0C0D) == hmac.digest(HOST_KEY.key, host, "sha256")
    assert transcript.controller_response(HOST_KEY, challenge, 0x0A0B0C0D) == hmac.digest(
        HOST_KEY.key, controller, "sha256"
    )


# ---- what is missing -----------------------------------------------------------------------------------------------


def test_a_target_that_wants_a_key_where_there_is_none() -> None:
    error = error_of(AuthBench())
    assert isinstance(error, UnsupportedError)
    assert "no key is set here" in error.message
    assert "host_key" in error.next_step


@pytest.mark.parametrize("settings", [{}, {"host_key": HOST_KEY}, BOTH])
def test_a_secure_channel_is_not_supported(settings: dict[str, Any]) -> None:
    bench = AuthBench(**settings)
    bench.target.connect_result = 1 << 18
    error = error_of(bench)
    assert isinstance(error, UnsupportedError)
    assert "secure channel" in error.message


def test_a_key_that_is_not_asked_for() -> None:
    bench = AuthBench(host_key=HOST_KEY)
    bench.target.connect_result = 0
    bench.connect()
    [connected] = bench.seen(Connected)
    assert connected.info.authentication is Authentication.NONE
    assert bench.target.received == []


def test_a_target_that_must_prove_itself_and_does_not_care() -> None:
    """Else whoever answers at its address gets around its key by not asking."""
    bench = AuthBench(**BOTH)
    bench.target.connect_result = 0
    error = error_of(bench)
    assert isinstance(error, NvmeAuthenticationError)
    assert "does not authenticate" in error.message


def test_an_io_queue_need_not_be_asked() -> None:
    """Newer Linux is content with the admin queue."""
    bench = AuthBench(**BOTH)
    respond = bench.target.respond

    def respond_without(capsule: Any, status: int = 0, result: int = 0) -> None:
        is_io_connect = capsule.opcode == 0x7F and capsule.data[4] == 1 and capsule.number(42, 2) > 0
        bench.target.connect_result = 0 if is_io_connect else ATR
        respond(capsule, status, result)

    bench.target.respond = respond_without  # type: ignore[method-assign]
    bench.connect()
    assert bench.state is _S.LIVE
    assert {queue for queue, _ in bench.target.received} == {0}


def test_a_controller_key_needs_a_host_key() -> None:
    with pytest.raises(ConfigError, match="controller_key"):
        AuthBench(controller_key=CONTROLLER_KEY)


def test_settings_do_not_show_keys() -> None:
    shown = repr(AuthBench(**BOTH).session.controller.settings)
    assert "host_key" not in shown
    assert "Secret" not in shown


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_id", [0, 2])
def test_a_wrong_key(queue_id: int) -> None:
    bench = AuthBench(host_key=HOST_KEY)
    if queue_id:
        bench.change("success1", failure1(0), queue_id=queue_id)
    else:
        bench.target.host_key = OTHER_KEY.key
    error = error_of(bench)
    assert isinstance(error, NvmeAuthenticationError)
    assert f"queue {queue_id}: the target refused authentication: the response is wrong" in error.message
    assert "keys" in error.next_step
    assert bench.failures2 == []  # the target has ended it


def test_a_target_that_hangs_up_on_a_wrong_key() -> None:
    """As Linux' often does."""
    bench = AuthBench(host_key=HOST_KEY)
    bench.change("success1", HANG_UP)
    error = error_of(bench)
    assert isinstance(error, NvmeAuthenticationError)
    assert "probably because that is wrong: hung up" in error.message


@pytest.mark.parametrize("name", ["challenge", "success1"])
@pytest.mark.parametrize("explanation", range(9))
def test_failures_of_the_target_are_told_in_words(name: str, explanation: int) -> None:
    bench = AuthBench(**BOTH)
    bench.change(name, failure1(0x7777, explanation))
    error = error_of(bench)
    assert isinstance(error, UnsupportedError if explanation == 5 else NvmeAuthenticationError)
    assert "refused authentication" in error.message
    assert f"{explanation:02X}h" in error.message
    assert ("no known reason" in error.message) is (explanation not in range(1, 8))
    assert bench.failures2 == []


def test_a_controller_that_has_another_key() -> None:
    bench = AuthBench(**BOTH)
    bench.target.controller_key = bytes(48)
    error = error_of(bench)
    assert isinstance(error, NvmeAuthenticationError)
    assert "its response is wrong" in error.message
    assert bench.failures2 == [1]


def test_a_controller_that_has_no_key() -> None:
    bench = AuthBench(**BOTH)
    bench.target.controller_key = None
    assert "refused authentication" in error_of(bench).message


def test_a_controller_that_does_not_answer_the_challenge() -> None:
    """Success1 without a response is no success where one was asked for."""
    bench = AuthBench(**BOTH)
    bench.patch("success1", 8, b"\0")
    error = error_of(bench)
    assert isinstance(error, NvmeAuthenticationError)
    assert "gave no proof" in error.message
    assert bench.failures2 == [1]


def test_a_response_is_not_looked_at_where_none_was_asked_for() -> None:
    bench = AuthBench(host_key=HOST_KEY)
    bench.patch("success1", 8, b"\1")
    assert bench.connect().state is _S.LIVE


def test_the_hosts_reason_survives_a_target_that_hangs_up_or_is_silent() -> None:
    for action in ("hang up", "be silent"):
        bench = AuthBench(**BOTH)
        bench.target.controller_key = bytes(48)
        take = bench.target._take

        def take_or_not(exchange: Any, data: bytes, action: str = action, bench: Any = bench, take: Any = take) -> None:
            if data[:2] == b"\0\xf0":
                bench.target.silent_until_s = 1e9
                if action == "hang up":
                    [link] = bench.target.exchanges
                    link.break_off("hung up")
            take(exchange, data)

        bench.target._take = take_or_not  # type: ignore[method-assign]
        assert "its response is wrong" in error_of(bench).message


@pytest.mark.parametrize("group_id", [1, 5, 0xE0])
def test_groups_are_not_supported(group_id: int) -> None:
    bench = AuthBench(host_key=HOST_KEY)
    bench.target.group_id = group_id
    error = error_of(bench)
    assert isinstance(error, UnsupportedError)
    assert "only the group null" in error.message
    assert bench.failures2 == [5]


def test_unknown_hashes_are_not_supported() -> None:
    bench = AuthBench(host_key=HOST_KEY)
    bench.patch("challenge", 8, b"\4")
    error = error_of(bench)
    assert isinstance(error, UnsupportedError)
    assert "hash 04h" in error.message
    assert bench.failures2 == [4]


# ---- messages that cannot be right ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "offset", "data", "explanation"),
    [
        ("challenge", 4, b"\xab\xcd", 6),  # transaction
        ("success1", 4, b"\xab\xcd", 6),
        ("challenge", 6, b"\x1f", 6),  # 31 bytes of challenge
        ("challenge", 6, b"\x00", 6),
        ("challenge", 8, b"\x03", 6),  # a hash with a longer challenge
        ("challenge", 10, b"\x04\x00", 6),  # a DH value without a group
        ("challenge", 10, b"\xff\xff", 6),  # more than the memory has
        ("success1", 6, b"\x1f", 6),
        ("success1", 6, b"\x00", 6),
        ("challenge", 0, b"\x01\x03", 7),  # out of turn
        ("success1", 0, b"\x01\x01", 7),
        ("challenge", 0, b"\x00\x00", 6),  # none that a host gets
        ("success1", 0, b"\x02\x03", 6),
    ],
)
def test_wrong_messages_end_it(name: str, offset: int, data: bytes, explanation: int) -> None:
    bench = AuthBench(**BOTH)
    bench.patch(name, offset, data)
    assert isinstance(error_of(bench), NvmeProtocolError)
    assert bench.failures2 == [explanation]


@pytest.mark.parametrize("name", ["challenge", "success1"])
@pytest.mark.parametrize("length_bytes", [0, 1, 4, 5])
def test_messages_of_which_the_most_is_missing(name: str, length_bytes: int) -> None:
    bench = AuthBench(**BOTH)
    bench.target.changes = lambda this, _, message: message[:length_bytes] if this == name else message
    assert isinstance(error_of(bench), NvmeProtocolError)
    assert bench.failures2 == [6]


@pytest.mark.parametrize("name", ["challenge", "success1"])
@pytest.mark.parametrize("is_renumbered", [False, True])
def test_what_was_recorded_does_not_fit_in_again(name: str, is_renumbered: bool) -> None:
    """A target without the keys plays what it heard from one that has them; the second time with the new number."""
    recorded = AuthBench(**BOTH).connect()
    [message] = [
        sent for queue, sent in recorded.target.sent if queue == 0 and sent[1] == {"challenge": 1, "success1": 3}[name]
    ]
    bench = AuthBench(**BOTH)
    bench.target.rng.seed(4)  # else it would be the same exchange

    def replay(this: str, _: int, original: bytes) -> bytes:
        if this != name:
            return original
        return message[:4] + original[4:6] + message[6:] if is_renumbered else message

    bench.target.changes = replay
    error = error_of(bench)
    if not is_renumbered:
        assert isinstance(error, NvmeProtocolError)
        assert "transaction" in error.message
    elif name == "success1":
        assert "its response is wrong" in error.message
    else:  # answered with a response for the new number, which is none to the challenge of this target
        assert "the target refused authentication" in error.message
        replies = [next(m for _, m in b.target.received if m[:2] == b"\1\2") for b in (recorded, bench)]
        assert replies[0][16:48] != replies[1][16:48]


# ---- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["challenge", "success1"])
def test_a_target_that_does_not_answer(name: str) -> None:
    bench = AuthBench(host_key=HOST_KEY)
    bench.change(name, None)
    assert isinstance(error_of(bench), CommandDeadlineError)
    assert bench.clock.now_s < SETTINGS.admin_timeout_s + 0.2


def test_reconnection_authenticates_again() -> None:
    bench = AuthBench(**BOTH).connect()
    before = len(bench.target.received)
    bench.target.restart(0.2)
    bench.run_until(lambda: bench.seen(ConnectionLost))
    bench.run_until_state(_S.LIVE)
    after = bench.target.received[before:]
    assert [queue for queue, _ in after] == [0] * 3 + [1] * 3 + [2] * 3
    negotiations = [message[4:6] for _, message in bench.target.received if message[:2] == b"\0\0"]
    assert len(set(negotiations)) == 6, "a transaction number came again"


def test_refusals_are_retried_slower_and_slower_until_the_time_is_over() -> None:
    bench = AuthBench(host_key=HOST_KEY, loss_timeout_s=5.0).connect()
    bench.target.host_key = OTHER_KEY.key
    bench.target.restart(0.05)
    bench.run_until_state(_S.LOST)
    retries = [event.error for event in bench.seen(RetryScheduled)]
    assert sum(isinstance(error, NvmeAuthenticationError) for error in retries) >= 3
    assert len(retries) <= 9  # 0.1, 0.2, 0.4, 0.8, then 1 s
    assert isinstance(bench.error(), MeshFusionError)


def test_a_new_key_is_used_from_the_next_association_on_and_at_once_when_the_former_was_refused() -> None:
    bench = AuthBench(host_key=HOST_KEY, loss_timeout_s=1e6).connect()
    before = len(bench.target.received)
    bench.act(bench.session.use_key(bench.clock.now_s, OTHER_KEY))
    assert (bench.state, len(bench.target.received)) == (_S.LIVE, before), "nothing is said of what is connected"
    bench.target.host_key = OTHER_KEY.key
    bench.target.restart(0.05)
    bench.run_until(lambda: bench.seen(ConnectionLost))
    bench.run_until_state(_S.LIVE)
    assert refusals(bench) == []

    bench.target.host_key = HOST_KEY.key
    bench.target.restart(0.05)
    bench.run_until(lambda: len(refusals(bench)) == 4)
    bench.run_until_state(_S.WAITING)
    assert bench.session.next_deadline_s > bench.clock.now_s
    bench.act(bench.session.use_key(bench.clock.now_s, HOST_KEY))
    assert bench.session.next_deadline_s <= bench.clock.now_s
    bench.run_until_state(_S.LIVE)
    assert len(refusals(bench)) == 4


def refusals(bench: AuthBench) -> list[MeshFusionError]:
    return [retry.error for retry in bench.seen(RetryScheduled) if isinstance(retry.error, NvmeAuthenticationError)]


def test_a_key_that_is_not_asked_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="meshfusion.jbof.nvme.initiator")
    namespaces = {1: SimNamespace(1, 100)}
    transport = LiveTransport(Subsystem(namespaces, mdts=1, descriptors=1, max_commands=0, has_limits=False))
    initiator = Initiator(transport, replace(SETTINGS, host_key=HOST_KEY), 5.0)
    assert initiator.info is not None
    initiator._note_idle_key(initiator.info)  # as after a reconnection
    initiator.close()
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "test: a key is set, but the target does not ask for authentication"
