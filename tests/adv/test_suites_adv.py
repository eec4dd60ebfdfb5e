"""tools/suites.py when its reader, its terminal or its user goes away."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshfusion.tools.suites import Suite, run_suites


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def long_suite(pid_file: Path, more: str = "") -> Suite:
    code = f"import os, pathlib, time\n{more}\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
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
import tests.adv.test_suites_adv as t
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
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=Path(__file__).resolve().parents[2],
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

