"""Commands in the guest: each with its own process group, and pipes or a terminal to read it by."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import termios
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from meshfusion.tools.lab.guest_agent.frames import CHUNK_BYTES, Kind, Request, encode_size

NOT_FOUND_EXIT: Final = 127
NOT_STARTED_EXIT: Final = 126
MAX_TYPED_AHEAD_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Session:
    """``streams``: what to read, and as what it is sent. ``terminal``: the fd to type at, if it has one."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    streams: dict[int, Kind]
    terminal: int | None
    typed: bytearray
    ended: bool = False

    def read(self, fd: int) -> bytes | None:
        """What is there: empty at the end of the stream, None when nothing came yet."""
        try:
            return os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""  # EIO: nobody has the terminal open any more

    def type(self, data: bytes) -> bool:
        """Hand over ``data`` behind what is left of earlier input; is something left? Beyond 1 MiB it is lost."""
        if self.terminal is None:
            return False
        self.typed += data[: MAX_TYPED_AHEAD_BYTES - len(self.typed)]
        with suppress(OSError):
            while self.typed:
                del self.typed[: os.write(self.terminal, self.typed)]
        return bool(self.typed)

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal is not None:
            set_terminal_size(self.terminal, rows, columns)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def exit_code(self) -> int:
        """Of a process that has ended: 128 + n for signal n, as a shell tells it."""
        code = self.process.wait()
        return 128 - code if code < 0 else code


def start_session(number: int, request: Request) -> Session:
    """Raises OSError when the command cannot be started."""
    if request.terminal is None:
        process = subprocess.Popen(
            request.command,
            cwd=request.directory,
            env=request.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        streams = {os.dup(process.stdout.fileno()): Kind.OUTPUT, os.dup(process.stderr.fileno()): Kind.ERRORS}
        process.stdout.close()
        process.stderr.close()
        terminal = None
    else:
        terminal, theirs = os.openpty()
        set_terminal_size(terminal, *request.terminal)
        try:
            process = subprocess.Popen(
                request.command,
                cwd=request.directory,
                env=request.environment,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
                preexec_fn=_take_terminal,
            )
        except BaseException:
            os.close(terminal)
            raise
        finally:
            os.close(theirs)
        streams = {terminal: Kind.OUTPUT}
    for fd in streams:
        os.set_blocking(fd, False)
    return Session(number, process, os.pidfd_open(process.pid), streams, terminal, bytearray())


def set_terminal_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, encode_size(rows, columns) + bytes(4))


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Whoever started us may ignore them, as a shell does for what it runs in the background, and commands inherit that.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
