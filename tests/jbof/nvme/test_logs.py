"""Log pages and asynchronous events."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.async_events import AsyncEvent, EventKind, EventType, async_event
from meshfusion.jbof.nvme.fields import NvmeFieldError, NvmeProtocolError
from meshfusion.jbof.nvme.logs import (
    AnaGroup,
    AnaLog,
    AnaState,
    ChangedNamespaces,
    ErrorLogEntry,
    max_ana_log_bytes,
    parse_ana_log,
    parse_changed_namespaces,
    parse_error_log,
)
from meshfusion.jbof.nvme.status import Status
from tests.jbof.nvme.layout import filled

# Base Figure 206
ERROR = bytes.fromhex(
    "0807060504030201 0200 1111 0580 2803"  # error count, SQID, CID, status, parameter error location
    "ffeeddccbbaa9988 05000000 00 01 00 00"  # LBA, NSID, vendor, transport type, command set, opcode
    "0900000000000000 0000" + "00" * 22
)
# Base Figures 224 and 225
ANA = bytes.fromhex(
    "2100000000000000 0200 000000000000"
    "01000000 02000000 2000000000000000 01" + "00" * 15 + "01000000 03000000"
    "02000000 01000000 2100000000000000 03" + "00" * 15 + "02000000"
)
ANA_LOG = AnaLog(
    0x21,
    (AnaGroup(1, AnaState.OPTIMIZED, 0x20, (1, 3)), AnaGroup(2, AnaState.INACCESSIBLE, 0x21, (2,))),
)

groups = st.builds(
    AnaGroup,
    group=st.integers(1, 2**32 - 1),
    state=st.sampled_from(AnaState),
    change_count=st.integers(0, 2**64 - 1),
    nsids=st.lists(st.integers(1, 2**32 - 2), max_size=5).map(tuple),
)


def test_error_entry() -> None:
    assert parse_error_log(ERROR) == (
        ErrorLogEntry(
            error_count=0x0102030405060708,
            queue_id=2,
            command_id=0x1111,
            status=Status(sct=0, sc=2, dnr=True),
            error_byte=40,
            error_bit=3,
            lba=0x8899AABBCCDDEEFF,
            nsid=5,
        ),
    )


def test_entries_that_are_none_are_left_out() -> None:
    assert parse_error_log(bytes(64) + ERROR + bytes(128)) == parse_error_log(ERROR)
    assert parse_error_log(b"") == ()


def test_values_that_do_not_apply() -> None:
    """Base Figure 206: FFFFh."""
    (entry,) = parse_error_log(ERROR[:8] + b"\xff" * 4 + ERROR[12:14] + b"\xff" * 2 + ERROR[16:])
    assert (entry.queue_id, entry.command_id, entry.error_byte, entry.error_bit) == (None, None, None, None)


def test_an_error_log_of_broken_length() -> None:
    with pytest.raises(NvmeProtocolError, match="63 bytes"):
        parse_error_log(ERROR[:63])


def test_changed_namespaces() -> None:
    """Base 5.1.12.1.5: FFFFFFFFh and zeros when there are more than fit."""
    assert parse_changed_namespaces(filled(4096, {0: "03000000 09000000"})) == ChangedNamespaces((3, 9))
    assert parse_changed_namespaces(bytes(4096)) == ChangedNamespaces(())
    assert parse_changed_namespaces(filled(4096, {0: "ffffffff"})) == ChangedNamespaces((), too_many=True)
    with pytest.raises(NvmeProtocolError, match="order"):
        parse_changed_namespaces(filled(4096, {0: "09000000 03000000"}))
    with pytest.raises(NvmeProtocolError, match="100 bytes"):
        parse_changed_namespaces(bytes(100))


def test_ana_log() -> None:
    log = parse_ana_log(ANA)
    assert log == ANA_LOG
    assert [log.state_of(nsid) for nsid in (1, 2, 3, 4)] == [
        AnaState.OPTIMIZED,
        AnaState.INACCESSIBLE,
        AnaState.OPTIMIZED,
        None,
    ]
    assert parse_ana_log(ANA + bytes(100)) == log
    assert max_ana_log_bytes(2, 3) == len(ANA)


def test_usable_states() -> None:
    assert [state.value for state in AnaState if state.is_usable] == [1, 2]
    assert sorted(AnaState) == [1, 2, 3, 4, 15]


@given(change_count=st.integers(0, 2**64 - 1), listed=st.lists(groups, max_size=4), rest=st.binary(max_size=8))
def test_ana_logs_read_back(change_count: int, listed: list[AnaGroup], rest: bytes) -> None:
    data = change_count.to_bytes(8, "little") + len(listed).to_bytes(8, "little")
    for item in listed:
        data += struct.pack("<IIQ", item.group, len(item.nsids), item.change_count)
        data += bytes([item.state]).ljust(16, b"\0") + b"".join(nsid.to_bytes(4, "little") for nsid in item.nsids)
    assert parse_ana_log(data + rest) == AnaLog(change_count, tuple(listed))
    with pytest.raises(NvmeProtocolError, match="ANA log"):
        parse_ana_log(data[:-1])


@pytest.mark.parametrize("length_bytes", [0, 15, 16, 47, 48, 55, 56, 87, 91])
def test_a_truncated_ana_log(length_bytes: int) -> None:
    with pytest.raises(NvmeProtocolError, match=f"{length_bytes} bytes"):
        parse_ana_log(ANA[:length_bytes])


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (32, "00"),  # reserved states
        (32, "05"),
        (32, "0e"),
        (48, "00000000"),  # impossible namespaces
        (48, "ffffffff"),
        (20, "ffffffff"),  # far more namespaces than there are bytes
    ],
)
def test_an_impossible_ana_log(offset: int, value: str) -> None:
    data = bytearray(ANA)
    data[offset : offset + len(value) // 2] = bytes.fromhex(value)
    with pytest.raises(NvmeProtocolError):
        parse_ana_log(bytes(data))


@given(data=st.binary(max_size=300))
def test_any_ana_log_is_judged(data: bytes) -> None:
    try:
        log = parse_ana_log(data)
    except NvmeProtocolError:
        return
    assert sum(32 + 4 * len(group.nsids) for group in log.groups) + 16 <= len(data)


@pytest.mark.parametrize(
    ("result", "event", "kind"),
    [
        # Base Figures 148 and 150 to 153
        (0x000C0302, AsyncEvent(EventType.NOTICE, 0x03, 0x0C), EventKind.ANA_CHANGED),
        (0x00040002, AsyncEvent(EventType.NOTICE, 0x00, 0x04), EventKind.NAMESPACE_ATTRIBUTE_CHANGED),
        (0x00030102, AsyncEvent(EventType.NOTICE, 0x01, 0x03), EventKind.FIRMWARE_ACTIVATION_STARTING),
        (0x00800006, AsyncEvent(EventType.COMMAND_SET, 0x00, 0x80), EventKind.RESERVATION_LOG_AVAILABLE),
        (0x00810106, AsyncEvent(EventType.COMMAND_SET, 0x01, 0x81), EventKind.SANITIZE_COMPLETED),
        (0x00010300, AsyncEvent(EventType.ERROR, 0x03, 0x01), EventKind.PERSISTENT_INTERNAL_ERROR),
        (0x00010400, AsyncEvent(EventType.ERROR, 0x04, 0x01), EventKind.TRANSIENT_INTERNAL_ERROR),
        (0x00020001, AsyncEvent(EventType.HEALTH, 0x00, 0x02), EventKind.SUBSYSTEM_RELIABILITY),
        (0x00020101, AsyncEvent(EventType.HEALTH, 0x01, 0x02), EventKind.TEMPERATURE_THRESHOLD),
        (0x00020201, AsyncEvent(EventType.HEALTH, 0x02, 0x02), EventKind.SPARE_BELOW_THRESHOLD),
        (0x0070F002, AsyncEvent(EventType.NOTICE, 0xF0, 0x70), None),  # a discovery log, which we do not keep
        (0x00000005, AsyncEvent(EventType.RESERVED, 0x00, 0x00), None),
    ],
)
def test_events(result: int, event: AsyncEvent, kind: EventKind | None) -> None:
    assert async_event(result) == event
    assert event.kind is kind


def test_every_kind_of_event_is_tested() -> None:
    assert len(EventKind) == 10


@given(result=st.integers(0, 2**32 - 1))
def test_event_fields(result: int) -> None:
    event = async_event(result)
    assert (event.type, event.info, event.log_page) == (result % 8, result // 256 % 256, result // 65536 % 256)


def test_events_have_32_bits() -> None:
    with pytest.raises(NvmeFieldError):
        async_event(2**32)
