"""A guest's process on the host: started with a line to its agent, ended whole on every path."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from meshfusion.tools.lab.errors import GuestDeadlineError, LabError
from meshfusion.tools.lab.guest_agent.frames import Frame, Kind
from meshfusion.tools.lab.line import Line, LineClosed, LineTimeout
from meshfusion.tools.lab.machine import Boot, Machine, boot_folder

POWER_OFF_DEADLINE_S: Final = 10.0
_TAIL_LINES: Final = 15
_TAIL_BYTES: Final = 16 << 10


class Console:
    """Keeps the end of what the kernel says; all of it goes to ``file`` as well, if there is one."""

    def __init__(self, stream: IO[bytes], file: Path | None) -> None:
        self._stream = stream
        self._file = file
        self._tail = b""
        self._thread = threading.Thread(target=self._copy, name="lab-console", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The last lines. Waits a moment for a dead guest's last words."""
        self._thread.join(timeout=1.0)
        lines = self._tail.decode(errors="replace").replace("\r", "").splitlines()
        return "\n".join(line for line in lines[-_TAIL_LINES:] if line.strip())

    def _copy(self) -> None:
        with self._stream, open(self._file or os.devnull, "wb", buffering=0) as copy:
            while data := os.read(self._stream.fileno(), 4096):
                copy.write(data)
                self._tail = (self._tail + data)[-_TAIL_BYTES:]


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest that was started. ``folder``: what it booted from; its path is the same on both sides.
    ``release``: of its kernel, once that is known.
    """

    kind: str
    folder: Path
    line: Line
    console: Console
    process: subprocess.Popen[bytes]
    release: str = ""

    def when_ready(self, deadline: float) -> Guest:
        """Wait until the agent answers; the result knows its kernel's release. ``deadline``: of the monotonic clock.

        Raises LabError: the guest ended, GuestDeadlineError: it did not come up.
        """
        try:
            frame = self.line.receive(deadline)
        except LineClosed as e:
            raise self.lost("did not come up") from e
        except LineTimeout as e:
            raise GuestDeadlineError(
                f"the guest did not come up in time; its console ends with:\n{self.console.tail()}",
                next_step="allow more time, or see what the console says",
            ) from e
        assert frame.kind is Kind.READY, "the agent's first frame"
        return replace(self, release=frame.payload.decode())

    def lost(self, what: str) -> LabError:
        return LabError(
            f"the guest {what}; its console ends with:\n{self.console.tail()}",
            next_step="see what the console says: a kernel panic names its cause, and memory is set with --memory",
        )

    def power_off(self) -> None:
        """Ask for it and wait a little: what was written to the output directory is written back. Never raises."""
        with suppress(LineClosed, LineTimeout):
            self.line.send(Frame(Kind.HALT), time.monotonic() + POWER_OFF_DEADLINE_S)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(POWER_OFF_DEADLINE_S)


@contextmanager
def started_guest(
    machine: Machine, *, memory_mib: int, output_directory: Path | None, console_file: Path | None = None
) -> Iterator[Guest]:
    """Start ``machine``. At the end nothing of it is left: no process, no folder. Raises LabError."""
    with boot_folder(machine, output_directory) as folder:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                launch = machine.launch(Boot(folder, theirs.fileno(), memory_mib, output_directory))
                process = _start(launch.argv, dict(launch.environment), theirs)
            try:
                assert process.stdout is not None
                console = Console(process.stdout, console_file)
                threading.Thread(target=_end_line, args=(process, ours), name="lab-watch", daemon=True).start()
                yield Guest(machine.kind, folder, Line(ours), console, process)
            finally:
                end_process_group(process)


def _start(argv: tuple[str, ...], environment: dict[str, str], line: socket.socket) -> subprocess.Popen[bytes]:
    # Should this process be killed, the kernel kills the guest.
    setpriv = shutil.which("setpriv")
    prefix = (setpriv, "--pdeathsig", "KILL") if setpriv else ()
    try:
        return subprocess.Popen(
            (*prefix, *argv),
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(line.fileno(),),
            start_new_session=True,
        )
    except OSError as e:
        raise LabError(f"cannot start the guest: {e.filename}: {e.strerror}", next_step="check that path") from e


def _end_line(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    """A kernel that crashed may leave processes which hold the line open: readers must see its end all the same."""
    process.wait()
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def end_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it started; User-Mode Linux runs each guest process as one of the host."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
