"""A pool that tells what a test sets, the rest of telemetry around it, and an event sink that remembers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshfusion.dpu.api import drive_types as d
from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.event_types import Severity
from meshfusion.dpu.telemetry.event_kinds import EVENT_KINDS
from tests.dpu.api.fake_service import FakeChunkService, make_status


def make_drive(number: int = 0, **changes: Any) -> d.DriveStatus:
    drive = d.DriveStatus(
        *(number, "online", (), f"/dev/nvme{number}n1", f"SN{number}", 64, 4 << 30, 7),
        months_left=40.0,
        written_bytes=5 << 40,
        media_errors=2,
        spare_percent=98,
        write_budget_left_bytes=1 << 29,
        failed_command_count=3,
        read_latency_s=0.0001,
    )
    return replace(drive, **changes)


class FakePool(FakeChunkService):
    """``hold``: a look waits while it is clear."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.current_status = make_status(**{"counters": (), **changes})
        self.current_drives: tuple[d.DriveStatus, ...] = (make_drive(),)
        self.hold = threading.Event()
        self.hold.set()

    def status(self, *, deadline_s: float) -> t.PoolStatus:
        self.hold.wait(20.0)
        return super().status(deadline_s=deadline_s)

    @property
    def drive_admin(self) -> FakePool:
        return self

    def drives(self, *, deadline_s: float) -> tuple[d.DriveStatus, ...]:
        return self.current_drives

    def add_drive(self, request: d.AddDriveRequest, *, deadline_s: float) -> d.DriveStatus:
        raise NotImplementedError

    def drain_drive(self, request: d.DrainDriveRequest, *, deadline_s: float) -> d.DriveStatus:
        raise NotImplementedError

    def remove_drive(self, request: d.RemoveDriveRequest, *, deadline_s: float) -> int:
        raise NotImplementedError


class Told:
    """Keeps the contract of EventSink: ``(kind, severity, text)`` of what was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Severity, str]] = []

    def tell(self, kind: str, text: str, *, severity: Severity | None = None, **fields: object) -> None:
        own = EVENT_KINDS[kind].severity
        assert (own is None) != (severity is None)
        told = own or severity
        assert told is not None
        self.events.append((kind, told, text))

    def take(self) -> list[str]:
        kinds = [kind for kind, _, _ in self.events]
        self.events.clear()
        return kinds


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    waiter = threading.Event()
    for _ in range(int(deadline_s / 0.01)):
        if condition():
            return
        waiter.wait(0.01)
    raise AssertionError(f"not within {deadline_s} s: {what}")
