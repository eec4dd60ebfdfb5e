"""Asking a service that only another machine reaches, over ssh."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.image.edge.shell import LocalShell, Shell, SshShell
from meshfusion.dpu.image.errors import CardError, FaultKind
from tests.dpu.image.slots.card_rig import free_port, make_programs

ANSWER = b"x" * 200_000


@pytest.fixture(params=["here", "ssh"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    programs = make_programs(tmp_path)
    (tmp_path / "host-1").mkdir()
    (tmp_path / "host-1/environment").touch()
    made: Shell = LocalShell() if request.param == "here" else SshShell("root@host-1", program=str(programs / "ssh"))
    yield made
    made.close()


class _Server:
    """Answers once with ANSWER, or not at all."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.heard = b""
        self._is_silent = is_silent
        self._end = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        there, _ = self._socket.accept()
        with there:
            self.heard = there.recv(1000)
            if self._is_silent:
                self._end.wait(30)
            else:
                there.sendall(ANSWER)

    def close(self) -> None:
        self._end.set()
        self._socket.close()


def test_all_of_an_answer(shell: Shell) -> None:
    server = _Server()
    assert shell.exchange("127.0.0.1", server.port, b"hello", within_s=20, most_bytes=1 << 20) == ANSWER
    assert server.heard == b"hello"
    server.close()


def test_no_more_than_wanted(shell: Shell) -> None:
    server = _Server()
    assert shell.exchange("127.0.0.1", server.port, b"hello", within_s=20, most_bytes=1000) == ANSWER[:1000]
    server.close()


def test_nobody_there_is_an_answer_too(shell: Shell) -> None:
    assert shell.exchange("127.0.0.1", free_port(), b"hello", within_s=20, most_bytes=1000) == b""


def test_silence_has_an_end(shell: Shell) -> None:
    server = _Server(is_silent=True)
    begun_s = time.monotonic()
    assert shell.exchange("127.0.0.1", server.port, b"hello", within_s=0.3, most_bytes=1000) == b""
    assert time.monotonic() - begun_s < 10
    server.close()


@pytest.mark.parametrize(
    ("says", "kind", "step"),
    [
        ("ssh: connect to host host-1 port 22: Connection refused", FaultKind.UNREACHABLE, "ssh root@host-1 true"),
        ("root@host-1: Permission denied (publickey).", FaultKind.DENIED, "ssh root@host-1 true"),
        ("channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed",
         FaultKind.DENIED, "AllowTcpForwarding"),
    ],
)  # fmt: skip
def test_ssh_that_fails_is_no_service_that_is_silent(tmp_path: Path, says: str, kind: FaultKind, step: str) -> None:
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\nexit 255\n")
    program.chmod(0o755)
    shell = SshShell("root@host-1", program=str(program))
    with pytest.raises(CardError) as raised:
        shell.exchange("127.0.0.1", 1, b"hello", within_s=20, most_bytes=1000)
    assert raised.value.kind is kind
    assert step in raised.value.next_step
    shell.close()
