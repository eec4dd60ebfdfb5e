"""Guests whose kernel is a shell script: results, deadlines, and that nothing is left of them on any path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshfusion.tools.lab.commands import OutputTail, guest_environment
from meshfusion.tools.lab.errors import GuestDeadlineError, LabError
from meshfusion.tools.lab.guest import GuestRun, run_guest
from meshfusion.tools.lab.machine import remove_stale_folders
from meshfusion.tools.lab.uml import UmlMachine
from tests.tools.lab.fakes import LEAVES_PROCESSES, SERVE, fake_kernel, processes_of

NOTE_PID = 'echo $$ > "${0%/*}/pid"\n'


pytestmark = pytest.mark.usefixtures("temporary")


def machine(tmp_path: Path, *parts: str) -> UmlMachine:
    return UmlMachine(fake_kernel(tmp_path, NOTE_PID, *(parts or (LEAVES_PROCESSES, SERVE))))


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_nothing_left(tmp_path: Path, temporary: Path) -> None:
    """Those that were killed may take a moment to die."""
    eventually(lambda: not processes_of(int((tmp_path / "pid").read_text())))
    assert not list(temporary.iterdir())


def test_result_and_output(tmp_path: Path, temporary: Path) -> None:
    tail = OutputTail(1000)
    run = GuestRun(
        ("sh", "-c", 'echo "$GREETING from $PWD"; echo err >&2; exit 3'),
        directory=tmp_path,
        environment={"GREETING": "hello"},
    )
    result = run_guest(run, machine=machine(tmp_path), sink=tail)
    assert result.exit_code == 3
    assert (tail.stdout, tail.stderr) == (f"hello from {tmp_path}\n", "err\n")
    assert 0 < result.boot_s < 20
    assert 0 < result.run_s < 20
    assert_nothing_left(tmp_path, temporary)


def test_output_directory_is_made_and_gets_the_console(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kernel = machine(tmp_path, 'echo "Linux version"\n', 'echo "$LAB_HOST_OUT" > "$LAB_HOST_OUT/settings"\n', SERVE)
    run_guest(GuestRun(("true",), output_directory=out), machine=kernel)
    assert (out / "settings").read_text() == f"{out}\n"
    assert (out / "console.log").read_text() == "Linux version\n"


def test_deadline(tmp_path: Path, temporary: Path) -> None:
    began = time.monotonic()
    with pytest.raises(GuestDeadlineError, match="sleep was not done 1 s after"):
        run_guest(GuestRun(("sleep", "8"), deadline_s=1.0), machine=machine(tmp_path))
    assert time.monotonic() - began < 10
    assert_nothing_left(tmp_path, temporary)


def test_a_guest_that_does_not_come_up_in_time(tmp_path: Path, temporary: Path) -> None:
    kernel = machine(tmp_path, "echo 'waiting for root'\n", LEAVES_PROCESSES, "sleep 1000\n")
    with pytest.raises(GuestDeadlineError, match=r"(?s)did not come up in time.*waiting for root"):
        run_guest(GuestRun(("true",), deadline_s=1.0), machine=kernel)
    assert_nothing_left(tmp_path, temporary)


def test_a_panic_shows_the_console(tmp_path: Path, temporary: Path) -> None:
    kernel = machine(tmp_path, LEAVES_PROCESSES, "echo 'Kernel panic - not syncing: no init'\n", "exit 1\n")
    with pytest.raises(LabError, match=r"(?s)did not come up.*Kernel panic"):
        run_guest(GuestRun(("true",), deadline_s=20.0), machine=kernel)
    assert_nothing_left(tmp_path, temporary)


def test_a_guest_that_dies_under_its_command(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(LabError, match="ended before its command did"):
        run_guest(GuestRun(("sh", "-c", "kill -9 $PPID; sleep 5"), deadline_s=20.0), machine=machine(tmp_path))
    assert_nothing_left(tmp_path, temporary)


def test_a_guest_that_does_not_power_off_is_ended(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfusion.tools.lab.guest_process.POWER_OFF_DEADLINE_S", 0.2)
    result = run_guest(GuestRun(("true",)), machine=machine(tmp_path, SERVE, "sleep 1000\n"))
    assert result.exit_code == 0
    assert_nothing_left(tmp_path, temporary)


def test_a_kernel_that_is_not_there(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(LabError):
        run_guest(GuestRun(("true",), deadline_s=20.0), machine=UmlMachine(tmp_path / "none"))
    assert not list(temporary.iterdir())


def test_a_failing_sink_ends_the_guest(tmp_path: Path, temporary: Path) -> None:
    def fail(kind: object, data: bytes) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_guest(GuestRun(("echo", "hi")), machine=machine(tmp_path), sink=fail)
    assert_nothing_left(tmp_path, temporary)


RUN_IN_CHILD = """
import signal
import sys
from pathlib import Path
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whoever runs the tests may ignore some of them
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
from meshfusion.tools.lab.guest import GuestRun, run_guest
from meshfusion.tools.lab.uml import UmlMachine
run_guest(GuestRun(("sh", "-c", "echo running; sleep 8")), machine=UmlMachine(Path(sys.argv[1])))
"""


def interrupted(tmp_path: Path, number: signal.Signals) -> int:
    kernel = machine(tmp_path).kernel
    child = subprocess.Popen([sys.executable, "-c", RUN_IN_CHILD, str(kernel)], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"running\n"
        child.send_signal(number)
        return child.wait(20)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_leave_nothing(tmp_path: Path, temporary: Path, number: signal.Signals, code: int) -> None:
    assert interrupted(tmp_path, number) == code
    assert_nothing_left(tmp_path, temporary)


def test_kill_ends_the_guest_and_the_next_one_removes_its_folder(tmp_path: Path, temporary: Path) -> None:
    """The script's children survive it; what matters is that the process that was started is gone."""
    assert interrupted(tmp_path, signal.SIGKILL) == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: pid not in processes_of(pid))
    for left in processes_of(pid):
        os.kill(left, signal.SIGKILL)
    (folder,) = temporary.iterdir()
    remove_stale_folders()
    assert folder.exists(), "too young: its maker may not have locked it yet"
    os.utime(folder, (0, 0))
    remove_stale_folders()
    assert not folder.exists()


def test_folders_in_use_stay(tmp_path: Path, temporary: Path) -> None:
    def look(kind: object, data: bytes) -> None:
        (folder,) = temporary.iterdir()
        os.utime(folder, (0, 0))
        remove_stale_folders()
        assert folder.exists()

    assert run_guest(GuestRun(("echo", "hi")), machine=machine(tmp_path), sink=look).exit_code == 0


def test_environment() -> None:
    host = {"PATH": "/venv/bin:/bin", "PYTHONPATH": "/src", "MESHFUSION_X": "1", "SECRET": "s", "HOME": "/home/u"}
    got = guest_environment(host, Path("/boot-folder"), "tcg", {"EXTRA": "2"})
    assert got["PATH"].startswith(f"{Path(sys.executable).parent}:/venv/bin:/bin:")
    assert got["PYTHONPATH"] == "/src:/boot-folder/modules"
    assert (got["HOME"], got["MESHFUSION_X"], got["EXTRA"]) == ("/home/u", "1", "2")
    assert (got["LAB_KIND"], got["LAB_OUT"]) == ("tcg", "/out")
    assert "SECRET" not in got
