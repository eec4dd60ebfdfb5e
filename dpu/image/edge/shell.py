"""Running shell scripts on a card's host: this one, or another over OpenSSH's client.

Scripts are POSIX shell, since a BMC has no more. ssh never asks for anything: keys and known hosts are set up before.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from meshfusion.dpu.image.edge.faults import card_error_from_text
from meshfusion.dpu.image.errors import CardError, FaultKind

ANSWER_S: Final = 30.0
_BANNER_S: Final = 3.0
_BANNER_BYTES: Final = 255
_SSH_FAILED: Final = 255
_MAX_SAID_BYTES: Final = 1 << 16
_NOT_FORWARDED: Final = re.compile(rb"open failed|forwarding (request )?failed", re.IGNORECASE)
_PROHIBITED: Final = re.compile(rb"administratively prohibited", re.IGNORECASE)
_DENIED: Final = re.compile(r"Permission denied|Host key verification failed|REMOTE HOST IDENTIFICATION", re.IGNORECASE)


class Shell(Protocol):
    """``where``: the host, as the operator knows it."""

    where: str

    def run(self, script: str, *, about: str, data: bytes = b"", timeout_s: float = ANSWER_S) -> bytes:
        """What ``script`` prints, with ``data`` for its input. Raises CardError, which names ``about``."""

    def start(self, script: str) -> subprocess.Popen[bytes]:
        """The running script; pipes at all three ends."""

    def failed(self, code: int, stderr: bytes, about: str) -> CardError:
        """Of a script of :meth:`start` that ended with ``code``."""

    def banner(self, address: str, port: int) -> str:
        """The first line that is said at ``address``, seen from the host; "" where nothing is."""

    def exchange(self, address: str, port: int, request: bytes, *, within_s: float, most_bytes: int) -> bytes:
        """All that is answered at ``address``, seen from the host, until the other side closes; b"" where nobody
        is. What takes longer than ``within_s`` is cut off. Raises CardError when the host itself is not reached."""

    def close(self) -> None: ...


class LocalShell:
    """On this machine."""

    where = "this host"

    def run(self, script: str, *, about: str, data: bytes = b"", timeout_s: float = ANSWER_S) -> bytes:
        return _run(self, _arguments(script), about, data, timeout_s)

    def start(self, script: str) -> subprocess.Popen[bytes]:
        return _start(_arguments(script))

    def failed(self, code: int, stderr: bytes, about: str) -> CardError:
        return card_error_from_text(stderr.decode(errors="replace"), about)

    def banner(self, address: str, port: int) -> str:
        try:
            with socket.create_connection((address, port), timeout=_BANNER_S) as connection:
                return _first_line(connection.recv(_BANNER_BYTES))
        except OSError:
            return ""

    def exchange(self, address: str, port: int, request: bytes, *, within_s: float, most_bytes: int) -> bytes:
        try:
            with socket.create_connection((address, port), timeout=within_s) as connection:
                connection.sendall(request)
                return _read_all(connection.fileno(), within_s, most_bytes)
        except OSError:
            return b""

    def close(self) -> None:
        pass


class SshShell:
    """On ``destination`` (``[user@]host``), over one connection that all scripts share. ``program``: the ssh client."""

    def __init__(self, destination: str, port: int | None = None, *, program: str = "ssh") -> None:
        assert not destination.startswith("-"), destination
        self.where = destination
        self._sockets = tempfile.TemporaryDirectory(prefix="mfctl-ssh-")
        port_options = () if port is None else ("-p", str(port))
        self._ssh = (program, *_ssh_options(Path(self._sockets.name)), *port_options)

    def run(self, script: str, *, about: str, data: bytes = b"", timeout_s: float = ANSWER_S) -> bytes:
        return _run(self, self._remote(script), about, data, timeout_s)

    def start(self, script: str) -> subprocess.Popen[bytes]:
        return _start(self._remote(script))

    def failed(self, code: int, stderr: bytes, about: str) -> CardError:
        text = stderr.decode(errors="replace")
        if code != _SSH_FAILED:
            return card_error_from_text(text, f"{about} on {self.where}")
        said = text.strip().splitlines()[-1] if text.strip() else "the connection ended"
        if _DENIED.search(text):
            step = f"Set up a key and the known host, until this works without a question: ssh {self.where} true."
            return CardError(FaultKind.DENIED, f"ssh to {self.where}: {said}", next_step=step)
        step = f"See why this fails: ssh {self.where} true."
        return CardError(FaultKind.UNREACHABLE, f"ssh to {self.where}: {said}", next_step=step)

    def banner(self, address: str, port: int) -> str:
        command = (*self._ssh, "-W", f"{address}:{port}", self.where)
        with _start(command) as process:
            try:
                assert process.stdout is not None
                return _first_line(_read_within(process.stdout.fileno(), _BANNER_S))
            finally:
                process.kill()

    def exchange(self, address: str, port: int, request: bytes, *, within_s: float, most_bytes: int) -> bytes:
        host = f"[{address}]" if ":" in address else address
        with _start((*self._ssh, "-W", f"{host}:{port}", self.where)) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stderr is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request)
                    process.stdin.flush()
                answer = _read_all(process.stdout.fileno(), within_s, most_bytes)
                if answer:
                    return answer
                return self._nothing_answered(process, within_s)
            finally:
                process.kill()

    def _nothing_answered(self, process: subprocess.Popen[bytes], within_s: float) -> bytes:
        """Nobody is there, or ssh did not get as far as to know. Raises CardError for the latter."""
        assert process.stderr is not None
        said = _read_all(process.stderr.fileno(), within_s, _MAX_SAID_BYTES)
        try:
            code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            return b""
        if code == 0 or (_NOT_FORWARDED.search(said) and not _PROHIBITED.search(said)):
            return b""
        if _PROHIBITED.search(said):
            step = f"Allow it in the sshd_config of {self.where}: AllowTcpForwarding local."
            raise CardError(FaultKind.DENIED, f"ssh to {self.where}: forwarding is not allowed there", next_step=step)
        raise self.failed(_SSH_FAILED, said, "forwarding")

    def close(self) -> None:
        subprocess.run(
            (*self._ssh, "-O", "exit", self.where), capture_output=True, timeout=ANSWER_S, check=False
        )  # nobody may be there any more
        self._sockets.cleanup()

    def _remote(self, script: str) -> tuple[str, ...]:
        return (*self._ssh, self.where, f"LC_ALL=C exec sh -c {shlex.quote(script)}")


def _ssh_options(sockets: Path) -> tuple[str, ...]:
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ControlMaster": "auto",
        "ControlPath": f"{sockets}/%C",
        "ControlPersist": "60",
    }
    return tuple(word for name, value in options.items() for word in ("-o", f"{name}={value}"))


def _arguments(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "LC_ALL": "C"}
    # A group of its own: Ctrl-C in a terminal is for us to hear, not for what writes to a card.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        start_new_session=True,
    )  # fmt: skip


def _run(shell: Shell, command: Sequence[str], about: str, data: bytes, timeout_s: float) -> bytes:
    with _start(command) as process:
        try:
            out, err = process.communicate(data, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise CardError(
                FaultKind.UNREACHABLE,
                f"{about} on {shell.where}: no answer within {timeout_s:g} s",
                next_step="Look at that host; then run the same command again.",
            ) from None
    if process.returncode != 0:
        raise shell.failed(process.returncode, err, about)
    return out


def _read_within(descriptor: int, within_s: float) -> bytes:
    import select

    ready, _, _ = select.select([descriptor], [], [], within_s)
    return os.read(descriptor, _BANNER_BYTES) if ready else b""


def _read_all(descriptor: int, within_s: float, most_bytes: int) -> bytes:
    """Until the end, the time, or so many bytes."""
    import select

    end_s = time.monotonic() + within_s
    found = bytearray()
    while len(found) < most_bytes and (left_s := end_s - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left_s)[0]:
            break
        piece = os.read(descriptor, min(1 << 16, most_bytes - len(found)))
        if not piece:
            break
        found += piece
    return bytes(found)


def _first_line(data: bytes) -> str:
    return data.split(b"\n")[0].decode(errors="replace").strip()
