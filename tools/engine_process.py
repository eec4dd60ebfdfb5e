"""An engine process of ours, seen from outside: started fresh, asked once, ended whole."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.quickstart_engine import EngineTask

ENGINE_DEADLINE_S = 900.0
SAVE_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one engine process reported. ``again_*``: of the second time it was asked, if it was, else of the first."""

    start_s: float
    prompt_tokens: int
    ttft_s: float
    cached_tokens: int
    token_ids: tuple[int, ...]
    again_ttft_s: float
    again_token_ids: tuple[int, ...]
    again_logprobs: tuple[float, ...]
    counters: dict[str, float]


class EngineProcess:
    """``pid`` leads a session of its own: the engine's other processes are in it too."""

    def __init__(self, process: subprocess.Popen[str], report: IO[str], log: Path, note: Callable[[str], None]) -> None:
        self._process = process
        self._report = report
        self._log = log
        self._note = note

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self) -> Answer:
        """Wait for the answer. Raises ServiceError, with the cause from the engine's log."""
        self._note("starting vLLM")
        ready = self.event("ready")
        self._note(f"vLLM is up after {ready['start_s']:.0f} s; asking")
        answered = self.event("answered")
        return Answer(
            start_s=ready["start_s"],
            prompt_tokens=answered["prompt_tokens"],
            ttft_s=answered["ttft_s"],
            cached_tokens=answered["cached_tokens"],
            token_ids=tuple(answered["token_ids"]),
            again_ttft_s=answered["again_ttft_s"],
            again_token_ids=tuple(answered["again_token_ids"]),
            again_logprobs=tuple(answered["again_logprobs"]),
            counters=answered["counters"],
        )

    def event(self, name: str) -> dict[str, Any]:
        """The next report, which must be ``name``."""
        readable, _, _ = select.select([self._report], [], [], ENGINE_DEADLINE_S)
        line = self._report.readline() if readable else ""
        if not line:
            what = "ended" if readable else f"did not answer within {ENGINE_DEADLINE_S:.0f} s"
            cause, next_step = _cause(self._log)
            whole_log = f"the whole log: {self._log}"
            raise ServiceError(
                f"the engine process {what}: {cause}",
                next_step=f"{next_step} ({whole_log})" if next_step else f"read {whole_log}",
            )
        event: dict[str, Any] = json.loads(line)
        assert event["event"] == name, event
        return event


@contextmanager
def engine_process(
    task: EngineTask, log: Path, note: Callable[[str], None], *, environment: Mapping[str, str] | None = None
) -> Iterator[EngineProcess]:
    """One engine process for ``task``; it lives until the block ends, which then waits for its orderly end."""
    command = [sys.executable, "-m", "meshfusion.tools.quickstart_engine"]
    reporting = reporting_process(
        command, lambda fd: EngineTask(**{**asdict(task), "report_fd": fd}).to_json(), log, environment=environment
    )
    with reporting as (process, report):
        yield EngineProcess(process, report, log, note)


@contextmanager
def reporting_process(
    command: list[str],
    task_of: Callable[[int], str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """``command``, told ``task_of(report_fd)`` on its standard input; its reports come line by line. Ended whole."""
    read_fd, write_fd = os.pipe()
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=(write_fd,),
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    os.close(write_fd)
    assert process.stdin is not None
    with os.fdopen(read_fd) as report:
        try:
            process.stdin.write(task_of(write_fd) + "\n")
            process.stdin.flush()
            yield process, report
            process.stdin.close()
            process.wait(60)
        finally:
            _end(process)


def wait_for_saves(pool: Path, prompt_tokens: int, log: Path, note: Callable[[str], None]) -> int:
    """Until every whole chunk of the prompt is committed: the index shows only what is durable. Returns bytes."""
    from meshfusion.dpu.pool_inspect import open_for_reading

    deadline_s = time.monotonic() + SAVE_DEADLINE_S
    with open_for_reading(pool) as (_, _, index):
        while time.monotonic() < deadline_s:
            count = index.chunk_count()
            first = index.chunks_after(b"", 1)
            if first and count >= prompt_tokens // first[0].token_count:
                return index.scan().payload_bytes
            note(f"{count} chunks in the pool so far")
            time.sleep(0.1)
    raise ServiceError(f"the pool got only part of the prompt within {SAVE_DEADLINE_S:.0f} s", next_step=f"read {log}")


def _end(process: subprocess.Popen[str]) -> None:
    """The engine has processes of its own: end the whole group, whatever happened."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# vLLM puts the process and, for its logger, level, time and place before each line, tracebacks included.
_PREFIX = re.compile(r"^(?:\([^()]*pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[\S+\] ?)?")
_OURS = re.compile(
    r"(?:meshfusion\.jbof\.errors\.\w+|\b(?:Unsupported|Config|Format|PoolBusy|Media|Service)\w*Error): "
)
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:: .*)?$")
_HANDLED = re.compile(r"^(?:\([^()]*pid=\d+\) )?(?:DEBUG|INFO|WARNING) ")
# What vLLM's outer processes say once an inner one has failed.
_ECHO = re.compile(r"initialization failed|EngineDeadError|Worker failed|Failed core proc")
_NEXT_STEP = "next step:"
_MESSAGE_LINES_MAX = 12


def _cause(log: Path) -> tuple[str, str]:
    """What the engine's log says went wrong, and the next step it names, or "".

    Our own errors come first, else the first exception that is not the echo of another, else the last "Error".
    """
    logged = log.read_text(errors="replace").splitlines()
    lines = [_PREFIX.sub("", line) for line in logged]
    for i, line in enumerate(lines):
        found = _OURS.search(line)
        if found:
            return _message_of(line[found.end() :], lines[i + 1 : i + _MESSAGE_LINES_MAX])
    # A traceback that is logged as less than an error was dealt with.
    fatal = [line for line, whole in zip(lines, logged, strict=True) if not _HANDLED.match(whole)]
    exceptions = [*_exceptions(fatal), *_exceptions(lines)]
    first = next((told for told in exceptions if not _ECHO.search(told)), "")
    errors = [line for line in lines if "Error" in line]
    return first or (errors or lines or ["it said nothing"])[-1], ""


def _message_of(first: str, following: list[str]) -> tuple[str, str]:
    """Message and next step of one of our errors, whose message may have several lines."""
    for i, line in enumerate(following):
        if _NEXT_STEP in line:
            return "\n".join([first, *following[:i]]), line.partition(_NEXT_STEP)[2].strip()
    return first, ""


def _exceptions(lines: list[str]) -> Iterator[str]:
    """The last line of each traceback; one without a message gets the place it was raised at."""
    place = None
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            place = ""
        elif place is not None and (found := re.match(r'\s+File "(.+)", line (\d+)', line)):
            place = f" at {found[1]}:{found[2]}"
        elif place is not None and _EXCEPTION.match(line):
            yield line if ":" in line else line + place
            place = None
