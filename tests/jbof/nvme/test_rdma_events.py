"""Finding the descriptor of an event channel, and taking events without waiting."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.rdma_events import EventChannel


class FakeError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.error_code = code


class FakeEvent:
    event_type, private_data = 7, b"data"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def event_str(self) -> str:
        return "RDMA_CM_EVENT_SOMETHING"

    def ack_cm_event(self) -> None:
        self._log.append("acknowledged")


class FakeVerbs:
    """Its channels open a file of the device's name; ``strangers``: how many others open one at the same time."""

    PyverbsError = FakeError

    def __init__(self, folder: Path, strangers: list[int]) -> None:
        self.device = folder / "rdma_cm"
        self.device.touch()
        self.strangers = strangers
        self.fds: list[int] = []
        self.log: list[str] = []
        self.events: list[FakeEvent | int] = []

    def CMEventChannel(self) -> Any:
        if not self.strangers:
            raise FakeError(errno.ENODEV)
        for _ in range(self.strangers.pop(0)):
            self.fds.append(os.open(self.device, os.O_RDONLY))
        return FakeChannel(self)

    def CMEvent(self, channel: Any) -> FakeEvent:
        event = self.events.pop(0) if self.events else errno.EAGAIN
        if isinstance(event, int):
            raise FakeError(event)
        return event


class FakeChannel:
    def __init__(self, verbs: FakeVerbs) -> None:
        self.fd = os.open(verbs.device, os.O_RDONLY)

    def close(self) -> None:
        os.close(self.fd)


def test_its_descriptor_is_found_and_does_not_block(tmp_path: Path) -> None:
    channel = EventChannel(FakeVerbs(tmp_path, [0]))  # type: ignore[arg-type]
    assert channel.fd == channel.channel.fd
    assert not os.get_blocking(channel.fd)
    channel.close()


def test_others_that_open_one_at_the_same_time_are_not_mistaken_for_it(tmp_path: Path) -> None:
    verbs = FakeVerbs(tmp_path, [1, 2, 0])
    channel = EventChannel(verbs)  # type: ignore[arg-type]
    assert channel.fd == channel.channel.fd
    assert channel.fd not in verbs.fds
    channel.close()
    for fd in verbs.fds:
        os.close(fd)


def test_without_the_kernels_part(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="rdma_ucm"):
        EventChannel(FakeVerbs(tmp_path, []))  # type: ignore[arg-type]


def test_events_are_taken_and_acknowledged(tmp_path: Path) -> None:
    verbs = FakeVerbs(tmp_path, [0])
    channel = EventChannel(verbs)  # type: ignore[arg-type]
    assert channel.next_event() is None
    verbs.events = [errno.EINTR, FakeEvent(verbs.log)]
    assert channel.next_event() is None
    assert channel.next_event() == (7, "RDMA_CM_EVENT_SOMETHING", b"data")
    assert verbs.log == ["acknowledged"]
    verbs.events = [errno.EIO]
    with pytest.raises(FakeError):
        channel.next_event()
    channel.close()


def test_waiting_has_a_deadline_and_wants_one_kind(tmp_path: Path) -> None:
    verbs = FakeVerbs(tmp_path, [0])
    channel = EventChannel(verbs)  # type: ignore[arg-type]
    with pytest.raises(MediaError, match="nothing"):
        channel.wait_for(7, time.monotonic() + 0.01)
    verbs.events = [errno.EAGAIN, FakeEvent(verbs.log)]
    channel.wait_for(7, time.monotonic() + 1)
    verbs.events = [FakeEvent(verbs.log)]
    with pytest.raises(MediaError, match="RDMA_CM_EVENT_SOMETHING"):
        channel.wait_for(2, time.monotonic() + 1)
    channel.close()
