"""Reservations through SPDK: the conversations of two SPDK processes with one drive, the namespace of a third.

Recorded with these very calls; a call that differs from its recording fails.
"""

from __future__ import annotations

import base64
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.spdk.reservations import SpdkReservations
from meshfusion.jbof.drives.ownership import (
    KIND,
    DriveOwnedError,
    OwnerRecord,
    Ownership,
    carry_out,
    is_held,
    release,
    take,
)
from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.reservations import ReservationReport
from meshfusion.jbof.nvme.status import NvmeCommandError
from tests.jbof.drives.shared_drive import SharedDrive

RECORDING = Path(__file__).parent / "drive_recordings/reservations-26.09-3230130e6a.json"
A, B = uuid.UUID(int=0xA), uuid.UUID(int=0xB)
REPORT_TEXT = 5462  # characters of 4096 bytes in base64, without the padding; the recording leaves the last zeros out


class Conversation:
    """The recorded calls of one process, in their order."""

    def __init__(self, name: str) -> None:
        self.left: list[dict[str, Any]] = json.loads(RECORDING.read_text())[name]

    def connect(self, timeout_s: float, /) -> int:
        return 1

    def call(self, method: str, timeout_s: float, /, **params: object) -> Any:
        recorded = self.left.pop(0)
        assert (method, params) == (recorded["method"], recorded["parameters"])
        if "code" in recorded:
            raise StepRefusedError(f"SPDK refused {method}", code=recorded["code"], next_step="none")
        result = dict(recorded["result"])
        if "data" in result:
            result["data"] = f"{result['data'].ljust(REPORT_TEXT, 'A')}=="
        return result

    def close(self) -> None: ...


def holder_key(report: ReservationReport | None) -> int | None:
    assert report is not None
    return None if report.holder is None else report.holder.key


def test_two_processes_and_one_drive() -> None:
    first, second = Conversation("first"), Conversation("second")
    a, b = (SpdkReservations(rpc, "Nvme0", 1, persist=True) for rpc in (first, second))
    medium = SharedDrive()  # for its record only
    assert a.report() == ReservationReport(0, None, persists=False, registrants=())
    one = carry_out(take(A, 11, may_take_over=False), a, medium.host("a"))
    assert holder_key(a.report()) == 11
    with pytest.raises(DriveOwnedError, match="owned by another service"):
        carry_out(take(B, 22, may_take_over=False), b, medium.host("b"))
    two = carry_out(take(B, 22, may_take_over=True), b, medium.host("b"))
    assert two == Ownership(OwnerRecord(2, B, 22, is_clean=False), needs_rebuild=True, was_taken_over=True)
    assert holder_key(b.report()) == 22
    assert not carry_out(is_held(one), a, medium.host("a"))
    assert carry_out(is_held(two), b, medium.host("b"))
    b.register(33)  # in the place of 22
    report = b.report()
    assert report is not None
    assert (report.persists, [(r.key, r.is_holder) for r in report.registrants]) == (True, [(33, True)])
    for host in (a, b):
        with pytest.raises(ReservationConflictError):
            host.acquire(11, KIND)
    third = Ownership(OwnerRecord(2, B, 33, is_clean=False), needs_rebuild=False, was_taken_over=False)
    carry_out(release(third), b, medium.host("b"))
    assert holder_key(b.report()) is None
    assert (first.left, second.left) == ([], [])


class Answering:
    """Gives each call the next status; a report, zeros."""

    def __init__(self, *statuses: int | StepRefusedError) -> None:
        self.statuses = list(statuses)
        self.sent: list[dict[str, Any]] = []

    def connect(self, timeout_s: float, /) -> int:
        return 1

    def call(self, method: str, timeout_s: float, /, **params: Any) -> Any:
        self.sent.append(params)
        status = self.statuses.pop(0)
        if isinstance(status, StepRefusedError):
            raise status
        completion = bytes(14) + (status << 1).to_bytes(2, "little")
        data = base64.urlsafe_b64encode(bytes(params.get("data_len", 0))).decode()
        return {"cpl": base64.urlsafe_b64encode(completion).decode(), "data": data}

    def close(self) -> None: ...


def test_failures() -> None:
    def drive(*statuses: int | StepRefusedError) -> SpdkReservations:
        return SpdkReservations(Answering(*statuses), "Nvme0", 1, persist=False)

    with pytest.raises(UnsupportedError, match="Nvme0 has no reservations"):
        drive(0x01).acquire(1, KIND)
    with pytest.raises(NvmeCommandError, match="Internal Error"):
        drive(0x06).acquire(1, KIND)
    with pytest.raises(NvmeCommandError, match="Internal Error"):
        drive(0x06).report()
    with pytest.raises(MediaError, match="no such device"):
        drive(StepRefusedError("no such device", code=-19, next_step="none")).unregister(1)


def test_a_drive_whose_host_identifiers_have_8_bytes() -> None:
    rpc = Answering(0x18, 0)
    report = SpdkReservations(rpc, "Nvme0", 1, persist=False).report()
    assert report == ReservationReport(0, None, persists=False, registrants=())
    assert len(rpc.sent) == 2
    assert rpc.sent[0] != rpc.sent[1]


def test_a_registered_host_replaces_its_key() -> None:
    rpc = Answering(0x83, 0)
    SpdkReservations(rpc, "Nvme0", 1, persist=False).register(5)
    assert len(rpc.sent) == 2
