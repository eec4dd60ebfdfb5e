"""A card's rshim: its log and settings, and the pushing of a stream. Through the driver's files, here or over ssh."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from meshfusion.dpu.image.edge.faults import card_error
from meshfusion.dpu.image.edge.shell import ANSWER_S, Shell
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.flash_types import PushEnded, PushMoved
from meshfusion.dpu.image.misc import READ_BYTES, Misc, misc_command, parse_misc
from meshfusion.dpu.image.stream import Stream

_LAST_PIECE_S: Final = 330.0
"""As long as the driver waits for a card that takes no bytes, and a little."""
_CLOSING_S: Final = 5.0


class Rshim(Protocol):
    """Each call raises CardError. A push that was begun is to be ended or abandoned."""

    def take(self) -> None:
        """Have this side own it."""

    def read_misc(self) -> Misc: ...
    def set_misc(self, key: str, value: int) -> None: ...
    def begin_push(self, stream: Stream) -> None: ...
    def continue_push(self) -> PushMoved | PushEnded: ...
    def abandon_push(self) -> None: ...


class LocalRshim:
    """``folder``: ``/dev/rshimN``. To be used by one thread, in which signals that would interrupt a write are blocked:
    the driver gives up a write whose thread has one pending, in the middle of the last piece as well."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._boot: int | None = None
        self._stream: Stream | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._done_bytes = 0

    def take(self) -> None:
        if not (self._folder / "misc").exists():
            raise card_error(FileNotFoundError(2, "No such file or directory"), str(self._folder / "misc"))

    def read_misc(self) -> Misc:
        path = self._folder / "misc"
        with _explained(path), _opened(path, os.O_RDONLY) as descriptor:
            return parse_misc(os.read(descriptor, READ_BYTES).decode(errors="replace"))

    def set_misc(self, key: str, value: int) -> None:
        path = self._folder / "misc"
        with _explained(path), _opened(path, os.O_WRONLY) as descriptor:
            os.write(descriptor, misc_command(key, value))

    def begin_push(self, stream: Stream) -> None:
        assert self._boot is None, "a push runs"
        with _explained(self._folder / "boot"):
            self._boot = os.open(self._folder / "boot", os.O_WRONLY | os.O_CLOEXEC)
        self._stream, self._pieces, self._done_bytes = stream, stream.body(), 0

    def continue_push(self) -> PushMoved | PushEnded:
        assert self._stream is not None
        piece = _next_piece(self._pieces)
        self._write(piece if piece is not None else _last_piece(self._stream))
        if piece is not None:
            return PushMoved(self._done_bytes, self._stream.total_bytes)
        self.abandon_push()
        return PushEnded()

    def abandon_push(self) -> None:
        if self._boot is not None:
            boot, self._boot = self._boot, None
            with _explained(self._folder / "boot"):
                os.close(boot)

    def _write(self, data: bytes) -> None:
        assert self._boot is not None
        left = memoryview(data)
        with _explained(self._folder / "boot"):
            while left:
                written = os.write(self._boot, left)
                if not written:
                    raise OSError("takes no bytes")
                left = left[written:]
        self._done_bytes += len(data)


class SshRshim:
    """``folder`` of the host at ``shell``.

    What must arrive together, the end of the BFB and ``bf.cfg``, is put onto the host first. The script that writes to
    ``boot`` adds it when its input has ended and a file says that it ended where it should: a connection that breaks
    leaves the card without either.
    """

    def __init__(self, shell: Shell, folder: str) -> None:
        self._shell, self._folder = shell, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: Stream | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._beside = ""
        self._done_bytes = 0

    def take(self) -> None:
        self._sh(f"ls {self._path('misc')} >/dev/null", "misc")

    def read_misc(self) -> Misc:
        return parse_misc(self._sh(f"cat {self._path('misc')}", "misc").decode(errors="replace"))

    def set_misc(self, key: str, value: int) -> None:
        text = misc_command(key, value).decode().strip()
        self._sh(f"printf '%s\\n' {shlex.quote(text)} > {self._path('misc')}", "misc")

    def begin_push(self, stream: Stream) -> None:
        assert self._process is None, "a push runs"
        last = _last_piece(stream)
        made = self._sh('d=$(mktemp -d) && cat > "$d/last" && echo "$d"', "a temporary file", data=last)
        self._beside = made.decode().strip()
        beside = shlex.quote(self._beside)
        size = self._sh(f"wc -c < {beside}/last", "a temporary file").strip()
        if size != str(len(last)).encode():
            raise CardError(
                FaultKind.BROKEN, f"{self._shell.where}: a file of {len(last)} bytes has {size.decode()} there",
                next_step="Make room in its /tmp; then run the same command again.",
            )  # fmt: skip
        boot = self._path("boot")
        # The shell opens boot once; its message of why it cannot is what tells one fault from another.
        script = f"exec 3>{boot} && echo opened && cat >&3 && [ -e {beside}/whole ] && cat {beside}/last >&3"
        self._process = self._shell.start(script)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"opened\n":
            raise self._ended()
        self._stream, self._pieces, self._done_bytes = stream, stream.body(), 0

    def continue_push(self) -> PushMoved | PushEnded:
        assert self._stream is not None
        assert self._process is not None
        assert self._process.stdin is not None
        piece = _next_piece(self._pieces)
        try:
            if piece is not None:
                self._process.stdin.write(piece)
                self._process.stdin.flush()
                self._done_bytes += len(piece)
                return PushMoved(self._done_bytes, self._stream.total_bytes)
            self._sh(f": > {shlex.quote(self._beside)}/whole", "a temporary file")
            self._process.stdin.close()
            code = self._process.wait(_LAST_PIECE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            raise self._ended() from None
        if code != 0:
            raise self._ended()
        self.abandon_push()
        return PushEnded()

    def abandon_push(self) -> None:
        process, self._process = self._process, None
        beside, self._beside = self._beside, ""
        if process is not None:
            _end(process)
        if beside:
            with contextlib.suppress(CardError):
                self._sh(f"rm -rf {shlex.quote(beside)}", "a temporary file")

    def _ended(self) -> CardError:
        assert self._process is not None
        process = self._process
        _end(process)
        assert process.stderr is not None
        return self._shell.failed(process.returncode, process.stderr.read(), f"{self._folder}/boot")

    def _path(self, name: str) -> str:
        return shlex.quote(f"{self._folder}/{name}")

    def _sh(self, script: str, what: str, *, data: bytes = b"") -> bytes:
        about = f"{self._folder}/{what}" if what in ("misc", "boot") else what
        return self._shell.run(script, about=about, data=data, timeout_s=ANSWER_S)


def _next_piece(pieces: Iterator[bytes]) -> bytes | None:
    with _readable():
        return next(pieces, None)


def _last_piece(stream: Stream) -> bytes:
    with _readable():
        return stream.last_piece()


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """The BFB may go away, or be written to, while it is pushed."""
    try:
        yield
    except (OSError, EOFError) as error:
        said = "it has become shorter" if isinstance(error, EOFError) else error.strerror
        step = "Leave the file alone while it is pushed; then run the same command again."
        raise CardError(FaultKind.REFUSED, f"the BFB cannot be read any more: {said}", next_step=step) from error


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise card_error(error, str(path)) from error


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _end(process: subprocess.Popen[bytes]) -> None:
    """By its input's end where that is enough, so that what runs on the host closes boot in order."""
    with contextlib.suppress(OSError, ValueError):
        assert process.stdin is not None
        process.stdin.close()
    give_up_s = time.monotonic() + _CLOSING_S
    while process.poll() is None and time.monotonic() < give_up_s:
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
        process.wait()
