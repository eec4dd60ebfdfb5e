"""Status codes: names against the figures, what may be retried, and the error that people see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.command import AdminOpcode, FabricsType, IoOpcode, Opcode, opcode_words
from meshfusion.jbof.nvme.status import (
    NvmeCommandError,
    Status,
    is_path_error,
    is_retryable,
    known_code,
    status_words,
)
from meshfusion.jbof.nvme.status_codes import STATUS_CODES, Figure, Retry

READ, WRITE = IoOpcode.READ, IoOpcode.WRITE
opcodes = st.sampled_from([*AdminOpcode, *IoOpcode, *FabricsType])
statuses = st.builds(Status, sct=st.integers(0, 7), sc=st.integers(0, 255), dnr=st.booleans())

# Read off the figures of Base revision 2.2, not off our table.
NAMES = {
    Figure.GENERIC: {
        0x00: "Successful Completion",
        0x01: "Invalid Command Opcode",
        0x02: "Invalid Field in Command",
        0x03: "Command ID Conflict",
        0x04: "Data Transfer Error",
        0x05: "Commands Aborted due to Power Loss Notification",
        0x06: "Internal Error",
        0x07: "Command Abort Requested",
        0x08: "Command Aborted due to SQ Deletion",
        0x0B: "Invalid Namespace or Format",
        0x0C: "Command Sequence Error",
        0x0D: "Invalid SGL Segment Descriptor",
        0x0E: "Invalid Number of SGL Descriptors",
        0x0F: "Data SGL Length Invalid",
        0x10: "Metadata SGL Length Invalid",
        0x11: "SGL Descriptor Type Invalid",
        0x14: "Atomic Write Unit Exceeded",
        0x15: "Operation Denied",
        0x16: "SGL Offset Invalid",
        0x18: "Host Identifier Inconsistent Format",
        0x19: "Keep Alive Timer Expired",
        0x1A: "Keep Alive Timeout Invalid",
        0x1B: "Command Aborted due to Preempt and Abort",
        0x1C: "Sanitize Failed",
        0x1D: "Sanitize In Progress",
        0x1E: "SGL Data Block Granularity Invalid",
        0x20: "Namespace is Write Protected",
        0x21: "Command Interrupted",
        0x22: "Transient Transport Error",
        0x23: "Command Prohibited by Command and Feature Lockdown",
        0x24: "Admin Command Media Not Ready",
        0x27: "Host Identifier Not Initialized",
        0x80: "LBA Out of Range",
        0x81: "Capacity Exceeded",
        0x82: "Namespace Not Ready",
        0x83: "Reservation Conflict",
        0x84: "Format In Progress",
    },
    Figure.COMMAND: {
        0x01: "Invalid Queue Identifier",
        0x02: "Invalid Queue Size",
        0x03: "Abort Command Limit Exceeded",
        0x05: "Asynchronous Event Request Limit Exceeded",
        0x09: "Invalid Log Page",
        0x0A: "Invalid Format",
        0x0D: "Feature Identifier Not Saveable",
        0x0E: "Feature Not Changeable",
        0x0F: "Feature Not Namespace Specific",
        0x2C: "Invalid I/O Command Set",
    },
    Figure.IO_COMMAND: {
        0x80: "Conflicting Attributes",
        0x81: "Invalid Protection Information",
        0x82: "Attempted Write to Read Only Range",
        0x83: "Command Size Limit Exceeded",
    },
    Figure.FABRICS: {
        0x80: "Incompatible Format",
        0x81: "Controller Busy",
        0x82: "Connect Invalid Parameters",
        0x83: "Connect Restart Discovery",
        0x84: "Connect Invalid Host",
        0x85: "Invalid Queue Type",
        0x90: "Discover Restart",
        0x91: "Authentication Required",
    },
    Figure.MEDIA: {
        0x80: "Write Fault",
        0x81: "Unrecovered Read Error",
        0x82: "End-to-end Guard Check Error",
        0x83: "End-to-end Application Tag Check Error",
        0x84: "End-to-end Reference Tag Check Error",
        0x85: "Compare Failure",
        0x86: "Access Denied",
        0x87: "Deallocated or Unwritten Logical Block",
        0x88: "End-to-End Storage Tag Check Error",
    },
    Figure.PATH: {
        0x00: "Internal Path Error",
        0x01: "Asymmetric Access Persistent Loss",
        0x02: "Asymmetric Access Inaccessible",
        0x03: "Asymmetric Access Transition",
        0x60: "Controller Pathing Error",
        0x70: "Host Pathing Error",
        0x71: "Command Aborted By Host",
    },
}


@pytest.mark.parametrize("figure", list(Figure))
def test_names_are_those_of_the_figures(figure: Figure) -> None:
    assert {code.sc: code.name for code in STATUS_CODES if code.figure is figure} == NAMES[figure]
    assert len([code for code in STATUS_CODES if code.figure is figure]) == len(NAMES[figure])


def test_every_code_says_what_it_means_and_what_to_do() -> None:
    for code in STATUS_CODES:
        assert code.meaning, code
        assert code.next_step.endswith("."), code


@pytest.mark.parametrize(
    ("sct", "sc", "opcode", "name"),
    [
        (0, 0x80, READ, "LBA Out of Range"),
        (0, 0x80, AdminOpcode.IDENTIFY, "LBA Out of Range"),
        (1, 0x80, IoOpcode.DATASET_MANAGEMENT, "Conflicting Attributes"),
        (1, 0x80, FabricsType.CONNECT, "Incompatible Format"),
        (1, 0x82, WRITE, "Attempted Write to Read Only Range"),
        (1, 0x82, FabricsType.CONNECT, "Connect Invalid Parameters"),
        (1, 0x81, FabricsType.DISCONNECT, "Controller Busy"),
        (1, 0x01, FabricsType.CONNECT, "Invalid Queue Identifier"),
        (1, 0x09, AdminOpcode.GET_LOG_PAGE, "Invalid Log Page"),
        (1, 0x90, AdminOpcode.GET_LOG_PAGE, "Discover Restart"),
        (1, 0x91, READ, "Authentication Required"),
        (1, 0x91, AdminOpcode.IDENTIFY, "Authentication Required"),
        (2, 0x81, READ, "Unrecovered Read Error"),
        (3, 0x02, READ, "Asymmetric Access Inaccessible"),
        (0, 0x7F, READ, None),
        (1, 0xC0, READ, None),
        (4, 0x00, READ, None),
        (7, 0x01, READ, None),
    ],
)
def test_the_same_number_means_different_things(sct: int, sc: int, opcode: Opcode, name: str | None) -> None:
    code = known_code(Status(sct, sc), opcode)
    assert (code.name if code else None) == name


@pytest.mark.parametrize(
    ("sct", "sc", "opcode", "retryable"),
    [
        (0, 0x00, READ, False),  # it succeeded
        (0, 0x02, READ, False),
        (0, 0x04, READ, True),
        (0, 0x08, READ, True),  # on the next connection
        (0, 0x1B, WRITE, False),  # fenced
        (0, 0x21, READ, True),
        (0, 0x22, READ, True),
        (0, 0x80, READ, False),
        (0, 0x82, READ, True),
        (0, 0x83, WRITE, False),  # fenced
        (1, 0x81, FabricsType.CONNECT, True),
        (1, 0x84, FabricsType.CONNECT, False),  # fenced
        (1, 0x81, WRITE, False),
        (2, 0x80, WRITE, True),
        (2, 0x82, READ, False),
        (3, 0x02, READ, True),
        (3, 0x70, READ, True),
        (7, 0x33, READ, True),  # unknown, and the target does not object
    ],
)
def test_what_may_be_sent_again(sct: int, sc: int, opcode: Opcode, retryable: bool) -> None:
    assert is_retryable(Status(sct, sc), opcode) is retryable
    assert not is_retryable(Status(sct, sc, dnr=True), opcode)


@given(status=statuses, opcode=opcodes)
def test_judgements_agree(status: Status, opcode: Opcode) -> None:
    code = known_code(status, opcode)
    if code is not None and not status.dnr:
        assert is_retryable(status, opcode) == (code.retry is not Retry.NO)
    assert is_path_error(status) == (status.sct == 3)
    words = status_words(status, opcode)
    assert f"sct {status.sct:X}h, sc {status.sc:02X}h" in words
    assert ("do not retry" in words) == status.dnr


def test_all_path_codes_are_for_another_path() -> None:
    for code in STATUS_CODES:
        if code.figure is Figure.PATH:
            assert code.retry is Retry.OTHER_PATH


def test_the_error_names_command_status_and_next_step() -> None:
    status = Status(sct=0, sc=0x80, dnr=True)
    error = NvmeCommandError(status, WRITE, where="namespace 3 of nqn.a", detail="blocks 10 to 20")
    assert error.message == (
        "namespace 3 of nqn.a: NVMe command Write (I/O opcode 01h) failed at blocks 10 to 20: LBA Out of Range: "
        "the namespace ends before these blocks (sct 0h, sc 80h, do not retry)"
    )
    assert "next step: Check subsystem NQN" in str(error)
    assert isinstance(error, MediaError)
    assert (error.status, error.opcode) == (status, WRITE)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status(0, 0x7F), "unknown generic status (sct 0h, sc 7Fh)"),
        (Status(1, 0xC0), "unknown command specific status (sct 1h, sc C0h)"),
        (Status(2, 0xC0), "unknown media and data integrity status (sct 2h, sc C0h)"),
        (Status(3, 0x04), "unknown path related status (sct 3h, sc 04h)"),
        (Status(7, 0x01), "vendor specific status (sct 7h, sc 01h)"),
    ],
)
def test_unknown_codes_are_told_in_numbers(status: Status, words: str) -> None:
    error = NvmeCommandError(status, READ, where="a")
    assert error.message == f"a: NVMe command Read (I/O opcode 02h) failed: {words}"
    assert error.next_step


def test_success_is_no_error() -> None:
    with pytest.raises(AssertionError):
        NvmeCommandError(Status(0, 0), READ, where="a")


@pytest.mark.parametrize(
    ("opcode", "words"),
    [
        (IoOpcode.WRITE_ZEROES, "Write Zeroes (I/O opcode 08h)"),
        (AdminOpcode.GET_LOG_PAGE, "Get Log Page (admin opcode 02h)"),
        (AdminOpcode.ASYNCHRONOUS_EVENT_REQUEST, "Asynchronous Event Request (admin opcode 0Ch)"),
        (FabricsType.PROPERTY_GET, "Property Get (Fabrics command type 04h)"),
    ],
)
def test_command_words(opcode: Opcode, words: str) -> None:
    assert opcode_words(opcode) == words
