"""Reservation commands. Opcodes, dwords and structures were computed by a C program from SPDK's nvme_spec.h (26.09)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme import reservations as r
from meshfusion.jbof.nvme.command import FILLS_MEMORY, Command, IoOpcode
from meshfusion.jbof.nvme.fields import NvmeFieldError, NvmeProtocolError
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.reservations import KeyChange, Registrant, ReservationType
from meshfusion.jbof.nvme.sgl import DataPointer, RemoteMemory, remote_data
from meshfusion.jbof.nvme.transfer_requests import Reserve
from tests.jbof.nvme.layout import descriptor, dword, le

KEYS = remote_data(RemoteMemory(0x1000, 16, 5))
KEY = remote_data(RemoteMemory(0x1000, 8, 5))
PAGE = remote_data(RemoteMemory(0x1000, 4096, 5))
WE = ReservationType.WRITE_EXCLUSIVE


@pytest.mark.parametrize(
    ("command", "opcode", "cdw10", "cdw11"),
    [
        (r.register(7, KeyChange.REGISTER, KEYS, persist=True), 0x0D, 0xC0000000, 0),
        (r.register(7, KeyChange.REGISTER, KEYS, persist=False), 0x0D, 0, 0),
        (r.register(7, KeyChange.REPLACE, KEYS, persist=False), 0x0D, 0x0A, 0),
        (r.register(7, KeyChange.UNREGISTER, KEYS, persist=True), 0x0D, 0x01, 0),
        (r.acquire(7, ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS, KEYS), 0x11, 0x500, 0),
        (r.preempt_and_abort(7, WE, KEYS), 0x11, 0x102, 0),
        (r.release(7, ReservationType.EXCLUSIVE_ACCESS, KEY), 0x15, 0x200, 0),
        (r.report(7, PAGE), 0x0E, 0x3FF, 1),
    ],
)
def test_commands(command: Command, opcode: int, cdw10: int, cdw11: int) -> None:
    assert (command.sqe[0], command.sqe[1]) == (opcode, 0x40)
    assert le(command.sqe, 4, 4) == 7
    assert (dword(command, 10), dword(command, 11)) == (cdw10, cdw11)
    assert not any(command.sqe[48:])


def test_keys() -> None:
    assert r.encode_keys(0x0102030405060708, 0x1112131415161718).hex() == "08070605040302011817161514131211"


EXTENDED = (
    bytes.fromhex("04030201010200000001").ljust(64, b"\0")
    + bytes.fromhex("0500000000000000a8a7a6a5a4a3a2a1" + "11" * 16).ljust(64, b"\0")
    + bytes.fromhex("ffff010000000000b8b7b6b5b4b3b2b1" + "22" * 16).ljust(64, b"\0")
)
SHORT = bytes.fromhex("04030201010100000001").ljust(24, b"\0") + bytes.fromhex(
    "05000100000000003333333333333333c8c7c6c5c4c3c2c1"
)


def test_the_extended_report() -> None:
    report = r.parse_report(EXTENDED.ljust(4096, b"\0"))
    assert (report.generation, report.kind, report.persists) == (0x01020304, WE, True)
    holder = Registrant(0xB1B2B3B4B5B6B7B8, b"\x22" * 16, is_holder=True)
    assert report.registrants == (Registrant(0xA1A2A3A4A5A6A7A8, b"\x11" * 16, is_holder=False), holder)
    assert report.holder == holder


def test_the_short_report() -> None:
    report = r.parse_report(SHORT, extended=False)
    assert report.registrants == (Registrant(0xC1C2C3C4C5C6C7C8, b"\x33" * 8, is_holder=True),)


def test_nobody() -> None:
    report = r.parse_report(bytes(4096))
    assert (report.kind, report.registrants, report.holder) == (None, (), None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes(63), "63 bytes"),
        (EXTENDED[:-1], "191 bytes"),
        (EXTENDED[:4] + b"\x07" + EXTENDED[5:], "type 7"),
    ],
)
def test_reports_that_cannot_be(data: bytes, said: str) -> None:
    with pytest.raises(NvmeProtocolError, match=said):
        r.parse_report(data)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, extended: bool) -> None:
    with contextlib.suppress(NvmeProtocolError):
        r.parse_report(data, extended=extended)


def request(build: Callable[[DataPointer], Command], scope: KeyScope, *, oncs: bool, rescap: int) -> list[Command]:
    info, namespace = Mock(), Mock()
    info.controller.has_reservations = oncs
    namespace.info.rescap = rescap
    memory = RemoteMemory(0x1000, 16, 5)
    return list(Reserve(7, [memory], build).commands(info, namespace, scope))


def test_a_request_with_a_key_of_its_command() -> None:
    def build(data: DataPointer) -> Command:
        return r.acquire(7, WE, data)

    (by_region,) = request(build, KeyScope.REGION, oncs=True, rescap=2)
    assert (descriptor(by_region.sqe).key, by_region.window) == (5, None)
    (by_window,) = request(build, KeyScope.COMMAND, oncs=True, rescap=2)
    assert by_window.window == RemoteMemory(0x1000, 16, 5)
    assert descriptor(by_window.sqe).key == 0  # the window's is put in when it is bound


def test_a_window_is_written_for_a_report_and_read_for_keys() -> None:
    assert IoOpcode.RESERVATION_REPORT in FILLS_MEMORY
    for opcode in (IoOpcode.RESERVATION_REGISTER, IoOpcode.RESERVATION_ACQUIRE, IoOpcode.RESERVATION_RELEASE):
        assert opcode not in FILLS_MEMORY


@pytest.mark.parametrize(("oncs", "rescap"), [(False, 2), (True, 0)])
def test_a_namespace_without_reservations(oncs: bool, rescap: int) -> None:
    with pytest.raises(UnsupportedError, match="namespace 7 has no reservations"):
        request(lambda data: r.acquire(7, WE, data), KeyScope.REGION, oncs=oncs, rescap=rescap)


@pytest.mark.parametrize(
    "build",
    [
        lambda: r.register(0, KeyChange.REGISTER, KEYS, persist=False),
        lambda: r.register(1, KeyChange.REGISTER, KEY, persist=False),
        lambda: r.acquire(1, WE, KEY),
        lambda: r.release(1, WE, KEYS),
        lambda: r.report(1, KEY),
        lambda: r.encode_keys(1 << 64, 0),
        lambda: r.encode_keys(1, -1),
    ],
)
def test_values_out_of_range(build: Callable[[], object]) -> None:
    with pytest.raises(NvmeFieldError):
        build()
