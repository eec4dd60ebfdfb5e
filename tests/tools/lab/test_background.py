"""A guest in the background and the commands of ``mfctl lab``, over a kernel that is a script."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.tools.lab.background import bring_down, connected
from meshfusion.tools.lab.cli import lab, parse_drive
from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.guest_agent.frames import Frame, Kind, Request
from meshfusion.tools.lab.keeper import KeptGuest, keeper_lives, kept_guest
from meshfusion.tools.lab.kernel import KERNEL_VARIABLE
from meshfusion.tools.lab.line import LineTimeout
from meshfusion.tools.lab.qemu import EmulatedDrive
from tests.tools.lab.fakes import LEAVES_PROCESSES, fake_kernel

pytestmark = pytest.mark.usefixtures("fake_machine")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(lab, list(arguments))


def mfctl_lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from meshfusion.tools.lab.cli import lab; lab()", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def state(cache: Path) -> Iterator[Path]:
    folder = cache / "guest"
    yield folder
    bring_down(folder)


@pytest.fixture
def kept(state: Path) -> KeptGuest:
    result = run("up", "--format", "json")
    assert result.exit_code == 0, result.output
    guest = kept_guest(state)
    assert guest is not None
    return guest


def test_run_in_a_guest_of_its_own(temporary: Path) -> None:
    done = mfctl_lab("run", "-e", "WORD=hi", "--", "sh", "-c", "echo $WORD; echo err >&2; exit 4")
    assert (done.returncode, done.stdout) == (4, "hi\n")
    assert done.stderr.endswith("err\n")
    assert not list(temporary.iterdir())


def test_run_as_json() -> None:
    result = run("run", "--format", "json", "--", "sh", "-c", "echo out; echo err >&2; exit 4")
    assert result.exit_code == 4
    report = json.loads(result.stdout)
    assert report["command"] == "sh -c 'echo out; echo err >&2; exit 4'"
    assert (report["exit_code"], report["stdout"], report["stderr"]) == (4, "out\n", "err\n")
    assert report["boot_s"] > 0


def test_arguments_of_the_command_are_its_own() -> None:
    result = run("run", "--format", "json", "echo", "--format", "--deadline")
    assert json.loads(result.stdout)["stdout"] == "--format --deadline\n"


def test_up_run_down(kept: KeptGuest, state: Path, temporary: Path) -> None:
    assert kept.release == os.uname().release
    assert Path(kept.out) == state / "out"
    first = json.loads(run("run", "--format", "json", "--", "sh", "-c", "echo $PPID").stdout)
    second = json.loads(run("run", "--format", "json", "--", "sh", "-c", "echo $PPID; exit 5").stdout)
    assert first["stdout"] == second["stdout"], "the same agent ran both"
    assert (second["exit_code"], second["boot_s"]) == (5, 0)
    assert run("down").stdout == "ended  a guest\n"
    assert not keeper_lives(state)
    assert not list(temporary.iterdir())
    assert run("down").stdout == "ended  nothing: none was up\n"


def test_two_commands_at_once(kept: KeptGuest) -> None:
    slow = threading.Thread(target=mfctl_lab, args=("run", "--", "sleep", "2"))
    slow.start()
    began = time.monotonic()
    assert json.loads(run("run", "--format", "json", "echo", "hi").stdout)["stdout"] == "hi\n"
    assert time.monotonic() - began < 2
    slow.join()


def test_fresh_is_another_guest(kept: KeptGuest) -> None:
    same = json.loads(run("run", "--format", "json", "--", "sh", "-c", "echo $PPID").stdout)
    fresh = json.loads(run("run", "--fresh", "--format", "json", "--", "sh", "-c", "echo $PPID").stdout)
    assert fresh["stdout"] != same["stdout"]
    assert fresh["boot_s"] > 0


def test_a_client_that_goes_takes_its_command_along(kept: KeptGuest, tmp_path: Path) -> None:
    request = Request(("sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 8"), environment=dict(os.environ))
    with connected(kept) as line:
        line.send(Frame(Kind.RUN, 1, request.encode()), time.monotonic() + 10)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_does_not_read_stops_only_until_it_goes(kept: KeptGuest) -> None:
    """Its output waits in the guest, not in the keeper's memory."""
    before = resident_kib(kept.pid)
    request = Request(("head", "-c", str(64 << 20), "/dev/zero"), environment=dict(os.environ))
    with connected(kept) as line:
        line.send(Frame(Kind.RUN, 1, request.encode()), time.monotonic() + 10)
        time.sleep(1.0)
        assert resident_kib(kept.pid) - before < 32 << 10
    assert json.loads(run("run", "--format", "json", "echo", "hi").stdout)["stdout"] == "hi\n"


def resident_kib(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


def test_deadline_of_a_command_leaves_the_guest_up(kept: KeptGuest, state: Path) -> None:
    result = run("run", "--deadline", "0.5", "--", "sleep", "8")
    assert isinstance(result.exception, LabError)
    assert "still up" in result.exception.next_step
    assert kept_guest(state) == kept


def test_up_twice(kept: KeptGuest) -> None:
    again = run("up")
    assert isinstance(again.exception, LabError)
    assert "mfctl lab down" in again.exception.next_step


def test_options_that_cannot_change_a_guest_that_is_up(kept: KeptGuest) -> None:
    refused = run("run", "--memory", "512", "--", "true")
    assert refused.exit_code == 2
    assert "--memory cannot change it: add --fresh" in refused.stderr
    assert run("run", "--kind", "uml", "--", "true").exit_code == 0, "it is of that kind"
    assert run("run", "--kind", "tcg", "--", "true").exit_code == 2


def test_a_killed_keeper_is_no_guest(kept: KeptGuest, state: Path) -> None:
    os.kill(kept.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while keeper_lives(state):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert kept_guest(state) is None
    assert run("down").stdout == "ended  nothing: none was up\n"
    assert run("up").exit_code == 0


def test_a_guest_that_does_not_boot(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_VARIABLE, str(fake_kernel(tmp_path, LEAVES_PROCESSES, "echo 'Kernel panic'\nexit 1\n")))
    failed = run("up")
    assert isinstance(failed.exception, LabError)
    assert "Kernel panic" in failed.exception.message
    assert not keeper_lives(state)


def test_lifetime(state: Path) -> None:
    assert run("up", "--lifetime", "2").exit_code == 0
    end = time.monotonic() + 10
    while keeper_lives(state):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "expired" in (state / "keeper.log").read_text()


def test_shell_needs_a_terminal() -> None:
    refused = run("shell")
    assert refused.exit_code == 2
    assert "mfctl lab run" in refused.stderr


def test_shell(kept: KeptGuest) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", "from meshfusion.tools.lab.cli import lab; lab()", "shell"])
    os.write(terminal, b"exit $((40 + 2))\n")
    said, end = b"", time.monotonic() + 20
    while select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
        try:
            said += os.read(terminal, 4096)
        except OSError:
            break  # the other side is closed
    assert time.monotonic() < end, said
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42, said
    os.close(terminal)


def test_a_keeper_that_does_not_answer(kept: KeptGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.tools.lab.background._ANSWER_DEADLINE_S", 0.2)
    os.kill(kept.pid, signal.SIGSTOP)
    try:
        with pytest.raises(LabError, match="does not answer"), connected(kept):
            pass
    finally:
        os.kill(kept.pid, signal.SIGCONT)


def test_variables() -> None:
    refused = run("run", "--env", "NOT_SET_HERE_AT_ALL", "--", "true")
    assert refused.exit_code == 2
    assert "NOT_SET_HERE_AT_ALL=VALUE" in refused.stderr


@pytest.mark.parametrize(
    ("text", "drive"), [("256", EmulatedDrive(256)), ("256,zone=16", EmulatedDrive(256, zone_mib=16))]
)
def test_drives(text: str, drive: EmulatedDrive) -> None:
    assert parse_drive(text) == drive


@pytest.mark.parametrize("text", ["", "x", "0", "256,zone=", "256,zone=x", "100,zone=16", "256,other=1", "-5"])
def test_what_is_no_drive(text: str) -> None:
    refused = run("run", "--kind", "tcg", "--drive", text, "--", "true")
    assert refused.exit_code == 2


def test_the_line_times_out(kept: KeptGuest) -> None:
    with connected(kept) as line, pytest.raises(LineTimeout):
        line.receive(time.monotonic() + 0.1)
