"""Files that are read again: when they change, and when they were bad by the clock alone."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from meshfusion.dpu.api.security.files import identity_of
from meshfusion.dpu.api.security.rotated import Rotated
from meshfusion.jbof.errors import ConfigError
from tests.dpu.security.authority import replace
from tests.host.support.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_it_is_read_when_it_changes_and_only_then(tmp_path: Path) -> None:
    path, reads = tmp_path / "f", list[str]()
    replace(path, b"1")

    def load() -> str:
        reads.append(path.read_text())
        return reads[-1]

    rotated = Rotated((path,), load, "f")
    assert [rotated.current(), rotated.current()] == [("1", 1), ("1", 1)]
    replace(path, b"2")
    assert [rotated.current(), rotated.current()] == [("2", 2), ("2", 2)]
    path.write_text("3")  # in place, as editors do
    assert rotated.current() == ("3", 3)
    assert reads == ["1", "2", "3"]


def test_bad_files_are_told_once_a_change_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock, bad, told = tmp_path / "f", Clock(), [""], list[str]()
    replace(path, b"1")

    def load() -> bytes:
        if bad[0]:
            raise ConfigError(bad[0], next_step="Wait.")
        return path.read_bytes()

    rotated = Rotated((path,), load, "f", tell=told.append, now_s=clock)
    bad[0] = "is not valid yet"
    replace(path, b"2")
    with caplog.at_level(logging.ERROR, logger="meshfusion.security"):
        for clock.now_s in (0.0, 10.0, 59.0, 61.0, 130.0):
            assert rotated.current() == (b"1", 1)
        assert len(caplog.records) == 1
        assert told == ["f: is not valid yet; what was read before is used on"]
        path.unlink()
        assert rotated.current() == (b"1", 1)
        assert len(caplog.records) == len(told) == 2, "another change"
    replace(path, b"2")
    assert rotated.current() == (b"1", 1)
    bad[0] = ""  # by the clock: nothing of the file changes
    assert rotated.current() == (b"1", 1)
    clock.now_s += 60.0
    assert rotated.current() == (b"2", 2)


def test_the_first_time_it_must_be_right(tmp_path: Path) -> None:
    def load() -> None:
        raise ConfigError("bad", next_step="Better.")

    with pytest.raises(ConfigError, match="bad"):
        Rotated((tmp_path / "f",), load, "f")


def test_a_disk_that_hangs_is_waited_for_in_bounds_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many ask: what was read before is used on, by one thread less in all."""
    path, told, may_go = tmp_path / "f", list[str](), threading.Event()
    replace(path, b"1")
    rotated = Rotated((path,), path.read_bytes, "f", tell=told.append)
    looks: list[Path] = []

    def hang(path: Path) -> tuple[int, ...]:
        looks.append(path)
        assert may_go.wait(60)
        return identity_of(path)

    monkeypatch.setattr("meshfusion.dpu.api.security.rotated.identity_of", hang)
    monkeypatch.setattr("meshfusion.dpu.api.security.rotated.LOOK_DEADLINE_S", 0.2)
    replace(path, b"2")
    values: list[tuple[bytes, int]] = []
    askers = [threading.Thread(target=lambda: values.append(rotated.current())) for _ in range(20)]
    try:
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(10.0)
        assert values == [(b"1", 1)] * 20
        began_s = time.monotonic()
        assert rotated.current() == (b"1", 1)
        assert time.monotonic() - began_s < 0.2, "nobody waits for it any more"
        assert len(looks) == 1
        assert told == ["f: its disk does not answer; what was read before is used on"]
        assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1
    finally:
        may_go.set()
    until(lambda: rotated.current() == (b"2", 2), limit_s=10.0)
    assert "f: its disk answers again" in caplog.text
    assert len(told) == 1


def test_files_that_every_call_asks_for_are_looked_at_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = tmp_path / "f", list[Path]()
    replace(path, b"1")
    rotated = Rotated((path,), path.read_bytes, "f", fresh_s=0.3)

    def noted(path: Path) -> tuple[int, ...]:
        looks.append(path)
        return identity_of(path)

    monkeypatch.setattr("meshfusion.dpu.api.security.rotated.identity_of", noted)
    for _ in range(50):
        rotated.current()
    assert len(looks) <= 1
    replace(path, b"2")
    time.sleep(0.3)
    assert rotated.current() == (b"2", 2)


def test_a_defect_of_reading_is_the_askers(tmp_path: Path) -> None:
    path = tmp_path / "f"
    replace(path, b"1")
    rotated = Rotated((path,), lambda: 1 // len(path.read_bytes()), "f")
    replace(path, b"")
    with pytest.raises(ZeroDivisionError):
        rotated.current()
