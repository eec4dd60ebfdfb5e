"""The suites of ``tools/test``: which there are, and running some of them at the same time.

Most suites keep one processor busy, or wait. What a suite prints is kept and printed as a whole when it ends, so that
the lines of two do not mix; meanwhile a line now and then says how far they are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, TextIO

AT_ONCE: Final = 2
OLDER_VLLM_VERSIONS: Final = ("0.30", "0.31")
TESTS_ON_OLDER_VLLM: Final = tuple(
    f"tests/e2e/test_{name}.py" for name in ("reuse", "corruption", "rollback", "hybrid_reuse")
)
SERVING: Final = ("host", "dpu")
MEDIUM: Final = ("jbof", "sim")
_POLL_S: Final = 0.1
_PROGRESS_S: Final = 30.0
_END_WAIT_S: Final = 30.0
_TAIL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Suite:
    """A command, and what it finds in its environment besides."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a suite ended. ``exit_status``: negative for a signal, 127 when the command could not be started."""

    name: str
    exit_status: int
    took_s: float

    def line(self) -> str:
        verdict = "passed" if self.exit_status == 0 else f"FAILED (exit status {self.exit_status})"
        return f"{self.took_s / 60:6.1f} min  {self.name:<20} {verdict}"


def run_suites(
    suites: Sequence[Suite], out: TextIO, *, at_once: int = AT_ONCE, progress_s: float = _PROGRESS_S
) -> list[Outcome]:
    """Run them in their order, ``at_once`` at the same time; returns how they ended, the first to end first.

    When it is interrupted, what runs is ended, what it had printed is printed, and the interruption raised again.
    """
    assert at_once > 0
    waiting, running, outcomes = deque(suites), list[_Running](), list[Outcome]()
    began_s = told_s = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                suite = waiting.popleft()
                _say(out, began_s, f"{suite.name} begins")
                running.append(_Running(suite))
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                outcomes.append(one.report(out))
                _say(out, began_s, " ".join(outcomes[-1].line().split()))
            if time.monotonic() - told_s >= progress_s:
                told_s = time.monotonic()
                _say(out, began_s, "; ".join(f"{one.suite.name}: {one.last_line()}" for one in running))
            time.sleep(_POLL_S)
    except BaseException:
        _end(running)
        for one in running:
            with suppress(OSError):  # of a reader that has gone
                one.report(out)
        raise
    return outcomes


def _end(running: Sequence[_Running]) -> None:
    """As if interrupted at the terminal, so that they clear up behind themselves; killed if that takes too long, or
    when somebody does not want to wait for it."""
    end_s = time.monotonic() + _END_WAIT_S
    try:
        for one in running:
            one.interrupt()
        for one in running:
            one.wait(max(0.0, end_s - time.monotonic()))
    finally:
        for one in running:
            one.kill()


class _Running:
    """A suite under way. Its output goes to a file: whatever it leaves running cannot hold us up."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self._began_s = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by report
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                suite.argv,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **suite.environment},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                process_group=0,  # an interruption reaches it once, from us
            )
        except OSError as error:
            self._output.write(f"{suite.argv[0]} cannot be started: {error}\n".encode())

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def last_line(self) -> str:
        """What it printed last; of a line of dots the end."""
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        lines = tail.split("\n")
        whole = [line.strip() for line in lines[:-1] if line.strip()]
        return whole[-1][-60:] if whole else "..."

    def interrupt(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, seconds: float) -> None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=seconds)

    def kill(self) -> None:
        """It, and what it has left running."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def report(self, out: TextIO) -> Outcome:
        """Print what it printed."""
        with self._output as output:
            output.seek(0)
            out.write(f"\n== {self.suite.name}: {' '.join(self.suite.argv)}\n")
            for line in output:
                out.write(line.decode(errors="replace"))
        status = 127 if self._process is None else self._process.returncode
        return Outcome(self.suite.name, status, time.monotonic() - self._began_s)


def _say(out: TextIO, began_s: float, text: str) -> None:
    out.write(f"[{time.monotonic() - began_s:4.0f} s] {text}\n")
    out.flush()


def suites_of_a_run(root: Path, *, bin: Path, nightly: bool) -> list[Suite]:
    """All of ``tools/test``, the longest first. Nightly, the engine tests on other versions of vLLM besides."""
    markers = "" if nightly else "not nightly"
    pytest = (str(bin / "python"), "-m", "pytest", "-m", markers)
    apart = (*SERVING, *MEDIUM, "e2e", "lab")
    hybrid = sorted(str(path.relative_to(root)) for path in (root / "tests/e2e").glob("test_hybrid_*.py"))
    others = [
        Suite(
            f"e2e, vLLM {version}",
            (str(root / "tools/test"), *TESTS_ON_OLDER_VLLM),
            {"MESHFUSION_VENV": str(root / f".venv-{version}"), "MESHFUSION_VLLM_VERSION": version},
        )
        for version in (OLDER_VLLM_VERSIONS if nightly else ())
    ]
    return [
        Suite("lab", (*pytest, "tests/lab")),
        Suite("e2e", (*pytest, "tests/e2e", *(f"--ignore={path}" for path in hybrid))),
        Suite("unit, host and dpu", (*pytest, *(f"tests/{name}" for name in SERVING))),
        Suite("unit, the rest", (*pytest, "tests", *(f"--ignore=tests/{name}" for name in apart))),
        Suite("unit, medium and sim", (*pytest, *(f"tests/{name}" for name in MEDIUM))),
        Suite("e2e, hybrid models", (*pytest, *hybrid)),
        Suite("mypy", (str(bin / "mypy"),)),
        Suite("ruff check", (str(bin / "ruff"), "check")),
        Suite("ruff format", (str(bin / "ruff"), "format", "--check")),
        *others,
    ]


def heed_interruptions() -> None:
    """Also where they are ignored, as in the background of a shell: what is started then would ignore them, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the latter: the terminal was closed
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def main(arguments: Sequence[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    os.chdir(root)
    heed_interruptions()
    suites = suites_of_a_run(root, bin=Path(sys.executable).parent, nightly="--nightly" in arguments)
    outcomes = run_suites(suites, sys.stdout)
    print("", *(outcome.line() for outcome in outcomes), sep="\n")
    return int(any(outcome.exit_status for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
