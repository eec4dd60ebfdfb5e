"""A command in a guest, seen from the host: its output is passed on as it comes, its terminal is the caller's."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from meshfusion.tools.lab.guest_agent.frames import CHUNK_BYTES, Frame, Kind, Request, encode_size
from meshfusion.tools.lab.line import Line, LineTimeout
from meshfusion.tools.lab.machine import OUT, python_path

Sink = Callable[[Kind, bytes], None]
"""Takes what a command wrote: OUTPUT or ERRORS, and the bytes."""

PASSED_VARIABLES: Final = ("CI", "HF_HUB_OFFLINE", "HOME", "LANG", "PYTHONPATH", "TERM", "USER", "VIRTUAL_ENV")
PASSED_PREFIX: Final = "MESHFUSION_"
_SESSION: Final = 1
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def guest_environment(host: Mapping[str, str], folder: Path, kind: str, more: Mapping[str, str]) -> dict[str, str]:
    """What a command gets: the host's for Python and tests, this Python first, the distribution's pyverbs, ``more``."""
    passed = {n: v for n, v in host.items() if n in PASSED_VARIABLES or n.startswith(PASSED_PREFIX)}
    paths = [host["PYTHONPATH"]] if host.get("PYTHONPATH") else []
    return {
        "HOME": "/root",
        "LANG": "C.UTF-8",
        **passed,
        "PATH": ":".join((str(Path(sys.executable).parent), *filter(None, [host.get("PATH")]), _SYSTEM_PATH)),
        "PYTHONPATH": ":".join((*paths, str(python_path(folder)))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LAB_KIND": kind,
        "LAB_OUT": OUT,
        **more,
    }


def to_own_streams(kind: Kind, data: bytes) -> None:
    """The usual sink: stdout to stdout, stderr to stderr."""
    stream = sys.stdout.buffer if kind is Kind.OUTPUT else sys.stderr.buffer
    stream.write(data)
    stream.flush()


class OutputTail:
    """A sink that keeps the last ``max_bytes`` of each stream."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = {Kind.OUTPUT: b"", Kind.ERRORS: b""}

    def __call__(self, kind: Kind, data: bytes) -> None:
        self._kept[kind] = (self._kept[kind] + data)[-self._max_bytes :]

    @property
    def stdout(self) -> str:
        return self._kept[Kind.OUTPUT].decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._kept[Kind.ERRORS].decode(errors="replace")


def run_command(line: Line, request: Request, sink: Sink, deadline: float) -> int:
    """Run it, pass on what it writes, return its exit code. Raises LineClosed, LineTimeout."""
    line.send(Frame(Kind.RUN, _SESSION, request.encode()), deadline)
    while True:
        frame = line.receive(deadline)
        if frame.kind is Kind.EXIT:
            return int(frame.payload)
        if frame.kind in (Kind.OUTPUT, Kind.ERRORS):
            sink(frame.kind, frame.payload)


def run_at_terminal(line: Line, request: Request, deadline: float) -> int:
    """As :func:`run_command`, with the caller's terminal handed through. Raises LineClosed, LineTimeout."""
    line.send(Frame(Kind.RUN, _SESSION, request.encode()), deadline)
    stdin = sys.stdin.fileno()
    with _raw_terminal(stdin), _told_of_resizes() as resized:
        while True:
            for frame in line.receive_nowait():
                if frame.kind is Kind.EXIT:
                    return int(frame.payload)
                if frame.kind is Kind.OUTPUT:
                    to_own_streams(frame.kind, frame.payload)
            if (left := deadline - time.monotonic()) <= 0:
                raise LineTimeout
            readable, _, _ = select.select([line, stdin, resized], [], [], left)
            if stdin in readable:
                line.send(Frame(Kind.INPUT, _SESSION, os.read(stdin, CHUNK_BYTES)), deadline)
            if resized in readable:
                os.read(resized, CHUNK_BYTES)
                line.send(Frame(Kind.RESIZE, _SESSION, encode_size(*terminal_size())), deadline)


def terminal_size() -> tuple[int, int]:
    """Rows and columns."""
    size = shutil.get_terminal_size()
    return size.lines, size.columns


@contextmanager
def _raw_terminal(fd: int) -> Iterator[None]:
    """Every key goes to the guest, Ctrl-C too. Does nothing when ``fd`` is no terminal."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)  # what was typed ahead is kept
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _told_of_resizes() -> Iterator[int]:
    """A file descriptor that becomes readable when the terminal's size has changed."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)

    def on_resize(number: int, frame: Any) -> None:
        os.write(tell, b"\0")

    before = signal.signal(signal.SIGWINCH, on_resize)
    try:
        yield told
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(told)
        os.close(tell)
