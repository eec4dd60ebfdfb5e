"""The target of a pool refuses, hangs, forgets, or takes its time: who is admitted then, and who is cut off."""

from __future__ import annotations

import threading
import time

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.export.nvmet.configfs import refused
from meshfusion.jbof.errors import PoolBusyError, ServiceUnavailableError
from tests.dpu.export.fake_nvmet import FakeSubsystem, os_error
from tests.dpu.export.keeper_cases import DEADLINE_S, SILENCE_S, Rig, until


def test_a_target_that_lost_everything_is_told_anew(rig: Rig) -> None:
    attachment = rig.attach("one")
    rig.kernel.reboot()
    until(lambda: any(port.subsystems for port in rig.kernel.ports.values()))  # listeners come last
    rig.connect(attachment)
    assert rig.hosts_that_reach_it() == {"one"}


def test_a_target_that_refuses_admits_nobody(rig: Rig) -> None:
    def refuse(change: str) -> None:
        raise os_error(13)

    rig.kernel.fault = refuse
    with pytest.raises(ServiceUnavailableError, match=r"not exported to this host: .*refused"):
        rig.attach("one")
    assert rig.status().exports_problem
    rig.kernel.fault = lambda change: None
    until(lambda: rig.states() == {})
    until(lambda: rig.status().exports_problem == "")
    rig.connect(rig.attach("two"))


def test_a_keeper_survives_what_nobody_expected(rig: Rig) -> None:
    def crash(change: str) -> None:
        raise RuntimeError("a bug")

    rig.kernel.fault = crash
    with pytest.raises(ServiceUnavailableError):
        rig.attach("one")
    rig.kernel.fault = lambda change: None
    rig.connect(rig.attach("two"))


def test_a_target_that_hangs_holds_up_nobody_else_and_not_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang = threading.Event()

    def wait(path: str) -> None:
        hang.wait(20)

    rig.kernel.look = wait
    begun_s = time.monotonic()
    with pytest.raises(ServiceUnavailableError, match="not exported to this host"):
        rig.attach("one", deadline_s=0.3)
    monkeypatch.setattr(ExportKeeper.close, "__kwdefaults__", {"deadline_s": 0.3})
    rig.pool.close()
    assert time.monotonic() - begun_s < 5
    assert "the target has not answered" in caplog.text
    with pytest.raises(PoolBusyError):  # what it was asked may still be done
        rig.open()
    hang.set()


def test_a_target_that_cannot_be_read_is_not_asked_for_each_host_that_must_go(rig: Rig) -> None:
    """Each question may take as long as the target takes not to answer."""
    for name in ("one", "two"):
        rig.attach(name)
    reads: list[str] = []

    def fail(path: str) -> None:
        if path == "ports":
            reads.append(path)
            raise refused("list", path, os_error(5))

    rig.kernel.look = fail
    rig.now_s += SILENCE_S
    until(lambda: len(reads) >= 20)
    keeper = rig.pool._parts.taken.exports
    assert keeper is not None
    before, rounds = len(reads), keeper._rounds_done
    until(lambda: keeper._rounds_done >= rounds + 10)
    assert len(reads) - before <= 12, "once a round"
    assert set(rig.states().values()) == {"condemned"}
    rig.kernel.look = lambda path: None
    until(lambda: rig.states() == {})


def test_who_cannot_be_admitted_is_not_listed_again_and_again(rig: Rig) -> None:
    """Engines ask every few seconds, each time as another incarnation, and a target may be stuck for hours."""
    attachment = rig.attach("one")
    rig.connect(attachment)
    assert attachment.export is not None
    writing = rig.kernel.hold[attachment.export.subsystem_nqn, "1"] = threading.Event()
    rig.pool.detach(api.DetachRequest("one"), deadline_s=DEADLINE_S)
    until(lambda: rig.status().exports_problem != "")
    for i in range(3):
        with pytest.raises(ServiceUnavailableError, match="the kernel has been at it"):
            rig.attach(f"again-{i}")
    assert rig.states() == {"one": "condemned"}
    writing.set()
    rig.connect(rig.attach("two"))


def test_the_time_that_admission_takes_is_not_silence(rig: Rig) -> None:
    """A target may take most of ``holder_silence_s``, and a host's first heartbeat comes only after it was answered."""
    rig.attach("one")
    slow = threading.Event()

    def wait(change: str) -> None:
        rig.now_s += SILENCE_S - 1 if not slow.is_set() else 0
        slow.set()

    rig.kernel.fault = wait
    rig.attach("two")
    assert slow.is_set()
    rig.now_s += 2
    time.sleep(1.5)  # a tick
    assert rig.states().get("two") == "live"


def test_what_keeps_the_target_is_told_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    attachment = rig.attach("one")
    rig.connect(attachment)
    assert attachment.export is not None
    writing = rig.kernel.hold[attachment.export.subsystem_nqn, "1"] = threading.Event()
    rig.pool.detach(api.DetachRequest("one"), deadline_s=DEADLINE_S)
    time.sleep(2.5)
    told = [record.getMessage() for record in caplog.records if "not as they should be" in record.getMessage()]
    writing.set()
    until(lambda: rig.states() == {})
    assert 1 <= len(told) <= 2, told


def test_what_others_remove_while_it_is_read_costs_nobody_an_admission(rig: Rig) -> None:
    """Services share the kernel's target, and its tree has no moment in which it stands still."""
    comes = iter(range(6))

    def go_while_read(path: str) -> None:
        if path == "subsystems":
            nqn = f"nqn.2026-11.io.others:{next(comes, 'gone')}"
            rig.kernel.subsystems[nqn] = FakeSubsystem()
        if path.startswith("subsystems/nqn.2026-11.io.others:") and not path.split(":")[1].startswith("gone"):
            rig.kernel.subsystems.pop(path.split("/")[1], None)

    rig.kernel.look = go_while_read
    rig.attach("one")
    assert rig.status().exports_problem == ""
