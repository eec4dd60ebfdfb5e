"""A target that wants DH-HMAC-CHAP, which computes by the formulas of Linux' target (drivers/nvme/target/auth.c)."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.jbof.nvme.controller_bench import SETTINGS, Target
from tests.jbof.nvme.sim.fabric import Link
from tests.jbof.nvme.sim.rules import must
from tests.jbof.nvme.sim.target import INVALID_FIELD, Capsule, SimController

HOST_NQN, SUBSYSTEM_NQN = SETTINGS.host_nqn.encode(), SETTINGS.subsystem_nqn.encode()
HASHES = {1: ("sha256", 32), 2: ("sha384", 48), 3: ("sha512", 64)}
AUTHENTICATION_REQUIRED = 0x4191
ATR = 1 << 17
FAILED = 0x01
HANG_UP = b"hang up"


def failure1(transaction: int, explanation: int = FAILED) -> bytes:
    return struct.pack("<BBHHBB", 0, 0xF1, 0, transaction, 1, explanation)


@dataclass
class Exchange:
    """One queue's. ``due``: what the host gets next. ``is_proven``: other commands are taken."""

    due: str = ""
    transaction: int = 0
    c1: bytes = b""
    s1: int = 0
    c2: bytes = b""
    s2: int = 0
    is_proven: bool = False


class AuthTarget(Target):
    """``host_key`` and ``controller_key`` as used, transformed already. ``hash_id`` and ``group_id``: its choice.

    ``changes`` sees every message to a host, with its name and queue, and returns what is sent; None: silence,
    ``HANG_UP``: the connection ends. ``received``: (queue, message) from hosts; ``sent``: (queue, message) to them.
    """

    connect_result = ATR
    host_key = bytes(range(32))
    controller_key: bytes | None = None
    hash_id = 1
    group_id = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.exchanges: dict[Link, Exchange] = {}
        self.received: list[tuple[int, bytes]] = []
        self.sent: list[tuple[int, bytes]] = []
        self.changes: Callable[[str, int, bytes], bytes | None] = lambda _name, _queue, message: message

    def admin(self, capsule: Capsule, controller: SimController) -> None:
        if not self._authentication(capsule, controller, 0):
            super().admin(capsule, controller)

    def io(self, capsule: Capsule, controller: SimController) -> None:
        [queue_id] = [number for number, link in controller.links.items() if link is capsule.link]
        if not self._authentication(capsule, controller, queue_id):
            super().io(capsule, controller)

    def _authentication(self, capsule: Capsule, controller: SimController, queue_id: int) -> bool:
        """Was the command dealt with?"""
        exchange = self.exchanges.setdefault(capsule.link, Exchange())
        if capsule.opcode != 0x7F or capsule.data[4] not in (5, 6):
            if self.connect_result == ATR and not exchange.is_proven:
                self.respond(capsule, AUTHENTICATION_REQUIRED)
                return True
            return False
        must(capsule.data[40:44] == bytes((0, 1, 1, 0xE9)), "SPSP, SECP", capsule.data[40:44].hex())
        [(_, length, _)] = capsule.descriptors()
        must(capsule.number(44, 4) == length, "TL or AL", capsule.number(44, 4))
        if capsule.data[4] == 5:
            data = self.copy_in(capsule)
            if data is not None:
                self.received.append((queue_id, data))
                self._take(exchange, data)
                self.respond(capsule)
        else:
            self._give(capsule, controller, exchange, queue_id)
        return True

    # ---- from the host -------------------------------------------------------------------------------------------

    def _take(self, exchange: Exchange, data: bytes) -> None:
        exchange.due, due = "failure1", exchange.due
        match data[0], data[1]:
            case (0, 0x00):
                self._take_negotiate(exchange, data)
            case (0, 0xF0):
                must(len(data) == 8 and data[6] == 1, "Failure2", data.hex())
                must(data[4:6] == exchange.transaction.to_bytes(2, "little"), "transaction of Failure2")
            case (1, 0x02) if due == "reply":
                self._take_reply(exchange, data)
            case (1, 0x04) if due == "success2":
                must(len(data) == 16 and int.from_bytes(data[4:6], "little") == exchange.transaction, "Success2")
                exchange.due, exchange.is_proven = "", True
            case message:
                must(False, "an authentication message out of turn", message, due)

    def _take_negotiate(self, exchange: Exchange, data: bytes) -> None:
        must(len(data) == 72 and data[6:9] == b"\0\1\1", "Negotiate", data.hex())
        hashes, groups = data[12 : 12 + data[10]], data[42 : 42 + data[11]]
        must(set(hashes) == {1, 2, 3}, "hashes", hashes.hex())
        exchange.transaction = int.from_bytes(data[4:6], "little")
        # Linux' test for a group, as it is.
        if any(group != self.group_id for group in groups):
            exchange.due = "challenge"

    def _take_reply(self, exchange: Exchange, data: bytes) -> None:
        _, length = HASHES[self.hash_id]
        must(len(data) == 16 + 2 * length and data[6] == length, "length of Reply")
        must(data[10:12] == b"\0\0", "a DH value")
        transaction, is_challenge, sequence = struct.unpack_from("<4xH2xB3xI", data)
        must(transaction == exchange.transaction, "transaction of Reply")
        expected = self.response(
            exchange, self.host_key, exchange.c1, exchange.s1, b"HostHost", HOST_NQN, SUBSYSTEM_NQN
        )
        if data[16 : 16 + length] != expected:
            return
        exchange.due = "success1"
        if is_challenge:
            must(sequence != 0, "sequence number 0 with a challenge")
            exchange.c2, exchange.s2 = data[16 + length :], sequence
        else:
            must(sequence == 0 and not any(data[16 + length :]), "a sequence number or challenge that is not valid")
            exchange.is_proven = True

    def response(
        self, exchange: Exchange, key: bytes, challenge: bytes, sequence: int, role: bytes, own: bytes, other: bytes
    ) -> bytes:
        name, _ = HASHES[self.hash_id]
        made = hmac.new(key, digestmod=name)
        for part in (
            challenge,
            sequence.to_bytes(4, "little"),
            exchange.transaction.to_bytes(2, "little"),
            b"\0",  # no secure channel
            role,
            own,
            b"\0",
            other,
        ):
            made.update(part)
        return made.digest()

    # ---- to the host ---------------------------------------------------------------------------------------------

    def _give(self, capsule: Capsule, controller: SimController, exchange: Exchange, queue_id: int) -> None:
        name = exchange.due
        match name:
            case "challenge":
                message: bytes | None = self._challenge(exchange)
                exchange.due = "reply"
            case "success1" if exchange.c2 and self.controller_key is None:
                message = failure1(exchange.transaction)
            case "success1":
                message = self._success1(exchange)
                exchange.due = "success2" if exchange.c2 else ""
            case "failure1":
                message = failure1(exchange.transaction)
            case _:
                self.respond(capsule, INVALID_FIELD)
                return
        assert message is not None
        message = self.changes(name, queue_id, message)
        if message is None:
            return
        if message == HANG_UP:
            capsule.link.break_off("hung up")
            return
        self.sent.append((queue_id, message))
        [(address, length, key)] = capsule.descriptors()
        memory = capsule.link.memory(address, length, key, is_written=True)
        if memory is not None:
            must(not any(memory), "what the host had in the memory for an answer")
            memory[: len(message)] = message
            self.respond(capsule)

    def _challenge(self, exchange: Exchange) -> bytes:
        _, length = HASHES.get(self.hash_id, ("", 32))
        exchange.c1, exchange.s1 = self.rng.randbytes(length), self.rng.getrandbits(32)
        dh_value = self.rng.randbytes(256 if self.group_id else 0)
        head = struct.pack(
            "<BBHHBBBBHI",
            1,
            1,
            0,
            exchange.transaction,
            length,
            0,
            self.hash_id,
            self.group_id,
            len(dh_value),
            exchange.s1,
        )
        return head + exchange.c1 + dh_value

    def _success1(self, exchange: Exchange) -> bytes:
        _, length = HASHES[self.hash_id]
        head = struct.pack("<BBHHBBB7x", 1, 3, 0, exchange.transaction, length, 0, bool(exchange.c2))
        if not exchange.c2:
            return head
        assert self.controller_key is not None
        return head + self.response(
            exchange, self.controller_key, exchange.c2, exchange.s2, b"Controller", SUBSYSTEM_NQN, HOST_NQN
        )
