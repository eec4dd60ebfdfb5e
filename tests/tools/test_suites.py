"""Suites beside each other: what is printed, what is counted, and how an interruption ends them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshfusion.tools.suites import Outcome, Suite, run_suites, suites_of_a_run

ROOT = Path(__file__).resolve().parents[2]


def python(name: str, code: str, **environment: str) -> Suite:
    return Suite(name, (sys.executable, "-c", code), environment)


def test_output_comes_whole_and_statuses_are_told() -> None:
    out = io.StringIO()
    slow = "import time; print('slow 1'); time.sleep(0.5); print('slow 2')"
    outcomes = run_suites([python("slow", slow), python("quick", "print('quick'); raise SystemExit(3)")], out)
    assert [(one.name, one.exit_status) for one in outcomes] == [("quick", 3), ("slow", 0)]
    assert "slow 1\nslow 2\n" in out.getvalue()
    assert out.getvalue().index("quick\n") < out.getvalue().index("slow 1")


def test_no_more_at_once_than_told(tmp_path: Path) -> None:
    count = (
        "import os, pathlib, time; d = pathlib.Path(os.environ['D']); mine = d / str(os.getpid()); mine.touch();"
        "time.sleep(0.3); print('beside', len(list(d.iterdir()))); time.sleep(0.1); mine.unlink()"
    )
    out = io.StringIO()
    outcomes = run_suites([python(str(i), count, D=str(tmp_path)) for i in range(5)], out, at_once=2)
    assert [one.exit_status for one in outcomes] == [0] * 5
    beside = [int(line.split()[1]) for line in out.getvalue().splitlines() if line.startswith("beside")]
    assert len(beside) == 5
    assert max(beside) == 2


def test_a_command_that_is_not_there_fails_its_suite_only() -> None:
    out = io.StringIO()
    outcomes = run_suites([Suite("gone", ("/no/such/command",)), python("there", "pass")], out, at_once=1)
    assert [(one.name, one.exit_status) for one in outcomes] == [("gone", 127), ("there", 0)]
    assert "/no/such/command cannot be started" in out.getvalue()


def test_progress_is_the_last_whole_line() -> None:
    out = io.StringIO()
    run_suites([python("one", "import time; print('12 %'); print('ha', end=''); time.sleep(0.6)")], out, progress_s=0.2)
    assert "one: 12 %\n" in out.getvalue()


def test_what_is_left_running_does_not_hold_us_up() -> None:
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])"
    began_s = time.monotonic()
    assert run_suites([python("leaves one", orphan)], io.StringIO())[0].exit_status == 0
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_what_runs_and_prints_it(number: signal.Signals) -> None:
    child = (
        "import os, time\nprint('pid', os.getpid(), flush=True)\ntry:\n time.sleep(60)\nfinally: print('cleared up')"
    )
    main = (
        "import sys; from meshfusion.tools.suites import Suite, heed_interruptions, run_suites\n"
        "heed_interruptions()\n"
        f"run_suites([Suite('long', (sys.executable, '-c', {child!r}))], sys.stdout, progress_s=0.1)"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", main], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert runner.stdout is not None
    while "long: pid" not in (line := runner.stdout.readline()):
        assert line
    runner.send_signal(number)
    rest = runner.stdout.read()  # `communicate` would lose what came together with that line
    assert runner.wait(30) != 0
    assert "cleared up" in rest
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[-1]), 0)


def test_a_failure_is_told_with_its_status() -> None:
    assert Outcome("e2e", -9, 90.0).line() == "   1.5 min  e2e                  FAILED (exit status -9)"
    assert Outcome("unit", 0, 61.0).line() == "   1.0 min  unit                 passed"


def runs(suite: Suite, file: Path) -> bool:
    """Does this suite run the tests of ``file``, as pytest reads its arguments?"""
    selected = [Path(argument) for argument in suite.argv if argument.startswith("tests")]
    ignored = [Path(argument.partition("=")[2]) for argument in suite.argv if argument.startswith("--ignore=")]
    return any(map(file.is_relative_to, selected)) and not any(map(file.is_relative_to, ignored))


def test_every_test_file_is_in_exactly_one_suite() -> None:
    suites = [one for one in suites_of_a_run(ROOT, bin=Path("/bin"), nightly=True) if "vLLM" not in one.name]
    files = [path.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py")]
    assert len(files) > 200
    assert {file: sum(runs(suite, file) for suite in suites) for file in files} == dict.fromkeys(files, 1)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def long_suite(pid_file: Path, more: str = "") -> Suite:
    write = f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    code = f"import os, pathlib, time\n{more}\n{write}\ntime.sleep(60)"
    return Suite(pid_file.name, (sys.executable, "-c", code))


def pids(*files: Path) -> list[int]:
    end_s = time.monotonic() + 10
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


class ClosedPipe(io.StringIO):
    """As of ``tools/test | head``: it fails once it has been read enough of."""

    def __init__(self, *files: Path) -> None:
        super().__init__()
        self._files = files

    def write(self, text: str) -> int:
        if all(file.exists() and file.read_text() for file in self._files):
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_no_suite_outlives_a_reader_that_has_gone(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(BrokenPipeError):
        run_suites([long_suite(file) for file in files], ClosedPipe(*files), progress_s=0.3)
    left = [pid for pid in pids(*files) if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


RUNNER = """
import sys
from meshfusion.tools import suites
from meshfusion.tools.suites import Suite
from pathlib import Path
import tests.tools.test_suites as t
suites.suites_of_a_run = lambda root, *, bin, nightly: [t.long_suite(Path(p), {more!r}) for p in sys.argv[1:]]
sys.exit(suites.main([]))
"""


@pytest.mark.parametrize(
    "numbers", [(signal.SIGHUP,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)]
)
def test_no_suite_outlives_a_runner_that_is_told_to_end(tmp_path: Path, numbers: tuple[signal.Signals, ...]) -> None:
    """A closed terminal; and somebody who does not want to wait for what clears up slowly."""
    slow = "import signal; signal.signal(signal.SIGINT, lambda n, f: time.sleep(3))" if len(numbers) > 1 else ""
    files = [tmp_path / "one", tmp_path / "two"]
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER.format(more=slow), *map(str, files)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        children = pids(*files)
        for number in numbers:
            runner.send_signal(number)
            time.sleep(0.7)
        runner.wait(timeout=40)
        time.sleep(0.3)
        left = [pid for pid in children if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
    finally:
        runner.kill()
