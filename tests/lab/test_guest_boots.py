"""A real guest: its kernel built if need be, booted; soft-RoCE, the kernel's target and initiator, data compared."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshfusion.tools.bench.processes import session_processes
from meshfusion.tools.lab.cli import lab
from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.errors import GuestDeadlineError
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, run_guest
from meshfusion.tools.lab.guest_agent.frames import Kind as FrameKind
from meshfusion.tools.lab.machine import Kind, Machine
from meshfusion.tools.lab.qemu import EmulatedDrive
from tests.lab.conftest import machine_or_skip

SCRIPT = Path(__file__).parent / "guest_round_trips.py"
Show = Callable[[str], None]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Prints past the capture: how long things took is what one wants to see of these tests."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    return show


def run_case(case: str, kind: Kind, out: Path, machine: Machine, show: Show) -> dict[str, Any]:
    """Run it in a guest of its own; its report."""
    tail = OutputTail(1 << 20)
    run = GuestRun((sys.executable, str(SCRIPT), case), kind=kind, output_directory=out)
    began = time.monotonic()
    result = run_guest(run, machine=machine, sink=tail)
    whole_s = time.monotonic() - began
    said = f"{tail.stdout}{tail.stderr}\n{(out / CONSOLE_LOG).read_text(errors='replace')}"
    assert result.exit_code == 0, said
    assert "BUG:" not in said
    assert "WARNING:" not in said
    show(f"{kind} {case}: boot {result.boot_s:.2f} s, run {result.run_s:.2f} s, whole {whole_s:.2f} s: {tail.stdout}")
    report: dict[str, Any] = json.loads(tail.stdout)
    return report


def assert_round_trip(report: dict[str, Any]) -> None:
    memory, file = report["namespaces"]
    for namespace in (memory, file):
        assert namespace["read_back"], namespace
        assert namespace["on_the_medium"], namespace
    assert (memory["backing"], file["backing"]) == ("/dev/mf0", "/dev/loop0")
    assert report["active_mtu_bytes"] == 4096
    assert report["gone_after_disconnect"]
    assert report["left"] == []
    keys = report["memory_keys"]
    assert keys["length"] == 1 << 20
    assert keys["lkey"] > 0
    assert keys["rkey"] > 0
    assert keys["python"] == sys.executable


def test_round_trip_over_soft_roce(uml: Machine, tmp_path: Path, show: Show) -> None:
    assert_round_trip(run_case("round_trip", "uml", tmp_path, uml, show))


def test_paths_have_their_own_rate(uml: Machine, tmp_path: Path, show: Show) -> None:
    report = run_case("two_paths", "uml", tmp_path, uml, show)
    assert report["left"] == []
    assert len(report["paths"]) == 2
    for path in report["paths"]:
        assert path["read_back"]
        for direction in ("read", "write"):
            # 8 MiB at 200 Mbit/s; HTB lets a burst through, headers and answers take their share.
            assert 40 < path[f"{direction}_mbit_per_s"] < 230
        # All went over the pair, not around it: a read's data comes from the target, a write's from the host.
        assert path["sent_by_host_bytes"] > 8 << 20
        assert path["sent_by_target_bytes"] > 8 << 20


def test_output_directory_and_nothing_else_stays(uml: Machine, tmp_path: Path) -> None:
    out = tmp_path / "with a blank"
    script = f"echo kept > /out/kept && echo lost > {tmp_path}/lost && cat {tmp_path}/lost && uname -r && id -u"
    tail = OutputTail(1000)
    run = GuestRun(("sh", "-c", script), output_directory=out)
    assert run_guest(run, machine=uml, sink=tail).exit_code == 0
    lost, release, user = tail.stdout.split()
    assert (lost, user) == ("lost", "0")
    assert release != Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert (out / "kept").read_text() == "kept\n"
    assert not (tmp_path / "lost").exists()


def test_random_numbers_come_at_once_and_differ(uml: Machine) -> None:
    seen = []
    for _ in range(2):
        tail = OutputTail(1000)
        command = (sys.executable, "-c", "import os; print(os.getrandom(16).hex())")
        assert run_guest(GuestRun(command, deadline_s=60), machine=uml, sink=tail).exit_code == 0
        seen.append(tail.stdout)
    assert seen[0] != seen[1]


def test_nothing_is_left_of_a_guest_that_took_too_long(
    uml: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are the host's: the kernel and one for each of the guest's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids: list[int] = []

    def sink(kind: FrameKind, data: bytes) -> None:
        (folder,) = tmp_path.glob("meshfusion-lab-*")
        pids.append(int(next((folder / "uml").glob("*/pid")).read_text()))
        assert len(session_processes(pids[0])) > 1

    with pytest.raises(GuestDeadlineError):
        run_guest(GuestRun(("sh", "-c", "echo up; sleep 100"), deadline_s=3.0), machine=uml, sink=sink)
    assert not list(tmp_path.iterdir())
    end = time.monotonic() + 10
    while any(command for command in session_processes(pids[0]).values()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_up_run_down(uml: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Show) -> None:
    """A guest in the background keeps its state between commands."""
    monkeypatch.setattr("meshfusion.tools.lab.cli._state", lambda: tmp_path / "guest")
    runner = CliRunner()
    up = runner.invoke(lab, ["up", "--format", "json"])
    try:
        assert up.exit_code == 0, up.output
        show(f"up: {up.stdout}")
        setup = [sys.executable, "-m", "meshfusion.tools.lab.guest_setup"]
        made = runner.invoke(lab, ["run", "--format", "json", "--", *setup, "up", "--memory-device", "64"])
        report = json.loads(made.stdout)
        assert report["exit_code"] == 0, report
        assert json.loads(report["stdout"])["devices"] == ["/dev/mf0"]
        show(f"setup in the guest that is up: {report['run_s']} s")
        discovery = ["nvme", "discover", "--transport=rdma", "--traddr=10.99.0.1", "--trsvcid=4420"]
        found = json.loads(runner.invoke(lab, ["run", "--format", "json", "--", *discovery]).stdout)
        assert "subnqn:  nqn.2026-01.io.meshfusion:lab" in found["stdout"], found
        took_down = runner.invoke(lab, ["run", "--format", "json", "--", *setup, "down"])
        assert took_down.exit_code == 0, took_down.stdout
    finally:
        down = runner.invoke(lab, ["down", "--format", "json"])
    assert json.loads(down.stdout) == {"ended": "a guest"}


def test_the_emulated_machine(tmp_path: Path, show: Show) -> None:
    """The distribution's own kernel, with two drives, one of them zoned."""
    drives = (EmulatedDrive(128), EmulatedDrive(256, zone_mib=16))
    report = run_case("drives", "tcg", tmp_path / "drives", machine_or_skip("tcg", drives), show)
    assert report["drives"] == {
        "nvme0n1": {"size_mib": 128, "zoned": "none"},
        "nvme1n1": {"size_mib": 256, "zoned": "host-managed"},
    }
    assert_round_trip(run_case("round_trip", "tcg", tmp_path / "round_trip", machine_or_skip("tcg"), show))
