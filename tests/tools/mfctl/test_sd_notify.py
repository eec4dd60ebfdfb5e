"""What systemd is told, over a real datagram socket as its manager has it (sd_notify(3))."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool
from meshfusion.dpu.progress import Progress
from meshfusion.tools.mfctl.sd_notify import Notifier
from meshfusion.tools.mfctl.watchdog import Watchdog
from tests.dpu.pool_cases import Holder, make_pool
from tests.tools.mfctl.service_process import ServiceProcess, small_config


class Manager:
    """As systemd: a datagram socket; each message is of lines ``NAME=value``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)

    def heard(self, timeout_s: float = 30.0) -> list[str]:
        """The lines of the next message; none when there is none in that time."""
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(4096).decode().splitlines()
        except TimeoutError:
            return []

    def wait_for(self, line: str) -> None:
        end_s = time.monotonic() + 60.0
        while line not in self.heard():
            assert time.monotonic() < end_s, f"{line} was not heard"

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.close()


def environment(manager: Manager, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.name, **more}


def test_lines_of_one_message_arrive_together(manager: Manager) -> None:
    Notifier.from_environment(environment(manager), 1).tell("READY=1", "STATUS=Serving.")
    assert manager.heard() == ["READY=1", "STATUS=Serving."]


def test_an_abstract_socket() -> None:
    manager = Manager(f"@meshfusion-test-{os.getpid()}")
    Notifier.from_environment(environment(manager), 1).tell("WATCHDOG=1")
    assert manager.heard() == ["WATCHDOG=1"]
    manager.close()


def test_without_a_manager_nothing_is_told() -> None:
    notifier = Notifier.from_environment({"WATCHDOG_USEC": "1000000"}, 1)
    assert notifier == Notifier("", None)
    notifier.tell("READY=1")


@pytest.mark.parametrize(
    ("more", "expected_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "77"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "78"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
    ],
)
def test_whose_watchdog_and_how_often(manager: Manager, more: dict[str, str], expected_s: float | None) -> None:
    assert Notifier.from_environment(environment(manager, **more), 77).watchdog_s == expected_s


def test_a_manager_that_is_gone_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier(str(tmp_path / "nobody")).tell("READY=1")
    assert "systemd cannot be told READY=1" in caplog.text


def test_an_address_of_another_kind_is_told_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert Notifier.from_environment({"NOTIFY_SOCKET": "vsock:2:1234"}, 1) == Notifier()
    assert "NOTIFY_SOCKET=vsock:2:1234 is no unix socket" in caplog.text


# ---- the watchdog ----------------------------------------------------------------------------------------------------


def test_a_pool_that_gets_on_is_told_four_times_in_its_interval(manager: Manager) -> None:
    watchdog = Watchdog(Notifier(manager.name, 8.0), lambda: Progress(1, 1))
    told_s = []
    for tenth in range(200):
        now_s = 100.0 + tenth / 10
        if watchdog.due_in_s(now_s) == 0.0:
            told_s.append(now_s)
        watchdog.tend(now_s)
        if told_s[-1:] == [now_s]:
            assert manager.heard(1.0) == ["WATCHDOG=1"]
    assert told_s == [100.0 + 2.0 * i for i in range(10)]


def test_one_stuck_pool_of_several_is_enough(manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    """It settles nothing while the other one's count goes on, so that no sum of theirs would stand still."""
    now_s = 0.0
    watchdog = Watchdog(
        Notifier(manager.name, 4.0),
        lambda: Progress(round(now_s) + 1, round(now_s)),
        lambda: Progress(2, 1),
    )
    heard = []
    with caplog.at_level(logging.ERROR):
        for now_s in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
            watchdog.tend(now_s)
            heard.append(manager.heard(1.0 if now_s <= 4.0 else 0.05) == ["WATCHDOG=1"])
    assert heard == [True] * 5 + [False] * 2, "patient for the manager's 4 s"
    assert "the index settles nothing" in caplog.text


def test_nothing_is_due_without_a_watchdog(manager: Manager) -> None:
    watchdog = Watchdog(Notifier(manager.name), lambda: Progress(1, 1))
    assert watchdog.due_in_s(5.0) is None
    watchdog.tend(5.0)
    assert manager.heard(0.05) == []


def test_a_stuck_pool_is_not_vouched_for(manager: Manager, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real pool, whose lock somebody keeps."""
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool:
        watchdog = Watchdog(Notifier(manager.name, 4.0), lambda: pool.progress(patience_s=0.05))
        Holder(pool).put(1)
        watchdog.tend(1.0)
        assert manager.heard(1.0) == ["WATCHDOG=1"]
        with pool._mutex, caplog.at_level(logging.ERROR):
            watchdog.tend(2.0)
            watchdog.tend(3.0)
            assert manager.heard(0.05) == []
        assert caplog.text.count("the pool's lock cannot be had") == 1, "told once"
        watchdog.tend(4.0)
        assert manager.heard(1.0) == ["WATCHDOG=1"]


def test_the_service_tells_its_life(manager: Manager, tmp_path: Path) -> None:
    settings = environment(manager, WATCHDOG_USEC="800000")
    with ServiceProcess(small_config(tmp_path), settings) as service:
        assert manager.heard() == ["READY=1", "STATUS=Serving."]
        assert [manager.heard(), manager.heard()] == [["WATCHDOG=1"]] * 2
        service.process.send_signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert service.end() == 0


def test_a_service_that_does_not_start_is_never_ready(manager: Manager, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.write_text(config.read_text().replace("8MiB", "8KiB"))
    with ServiceProcess(config, environment(manager), waits=False) as service:
        assert service.end() == 1
    assert manager.heard(0.05) == []
