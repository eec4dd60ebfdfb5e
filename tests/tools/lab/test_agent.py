"""The agent, run on this machine: what commands write, how they end, and that nobody waits for what they leave."""

from __future__ import annotations

import os
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest

from meshfusion.tools.lab.commands import OutputTail, run_command
from meshfusion.tools.lab.guest_agent.agent import Agent
from meshfusion.tools.lab.guest_agent.frames import Frame, Kind, Request, encode_size
from meshfusion.tools.lab.line import Line, LineClosed

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def soon() -> float:
    return time.monotonic() + 20.0


class Order(StrEnum):
    """In which order a loop is told of what came while it was busy."""

    AS_IT_COMES = "as it comes"
    OLDEST_FIRST = "all at once, oldest first"
    NEWEST_FIRST = "all at once, newest first"


class OrderedSelector(selectors.SelectSelector):
    """Looks only after a while, when much has happened, and tells it by number of the stream."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._order is not Order.AS_IT_COMES:
            time.sleep(0.02)
        return sorted(super().select(timeout), key=lambda e: e[0].fd, reverse=self._order is Order.NEWEST_FIRST)


@pytest.fixture(params=list(Order))
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            Agent(theirs.fileno(), OrderedSelector(request.param)).serve()
        except BaseException as e:
            failures.append(e)
        theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        agent_line = Line(ours)
        assert agent_line.receive(soon()) == Frame(Kind.READY, payload=os.uname().release.encode())
        yield agent_line
    finally:
        ours.close()
        thread.join(20)
        assert not thread.is_alive()
        assert not failures


def shell(line: Line, script: str, **more: str) -> tuple[int, str, str]:
    tail = OutputTail(1 << 20)
    request = Request(("sh", "-c", script), environment={**ENVIRONMENT, **more})
    code = run_command(line, request, tail, soon())
    return code, tail.stdout, tail.stderr


def test_both_streams_and_the_exit_code(line: Line) -> None:
    assert shell(line, "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")


def test_only_the_given_environment(line: Line) -> None:
    assert shell(line, 'echo "$NAME $HOME"', NAME="value") == (0, "value \n", "")


def test_every_byte_arrives(line: Line) -> None:
    tail = OutputTail(1 << 24)
    count = 3_000_000
    assert (
        run_command(line, Request(("head", "-c", str(count), "/dev/zero"), environment=ENVIRONMENT), tail, soon()) == 0
    )
    assert tail.stdout == "\0" * count


def test_death_by_signal_is_told_as_shells_do(line: Line) -> None:
    assert shell(line, "kill -TERM $$")[0] == 128 + 15


def test_a_command_that_is_not_there(line: Line) -> None:
    tail = OutputTail(1000)
    assert run_command(line, Request(("no-such-command",), environment=ENVIRONMENT), tail, soon()) == 127
    assert "no-such-command" in tail.stderr


def test_a_command_that_may_not_be_run(line: Line, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("text")
    tail = OutputTail(1000)
    assert run_command(line, Request((str(plain),), environment=ENVIRONMENT), tail, soon()) == 126
    assert "Permission denied" in tail.stderr


def test_what_it_leaves_running_is_not_waited_for(line: Line) -> None:
    began = time.monotonic()
    code, said, _ = shell(line, "(sleep 5; echo late) & echo now")
    assert (code, said) == (0, "now\n")
    assert time.monotonic() - began < 4
    assert shell(line, "echo next") == (0, "next\n", ""), "what is said late belongs to nobody"


def test_two_at_once_and_a_kill(line: Line) -> None:
    long, short = Request(("sleep", "100"), environment=ENVIRONMENT), Request(("echo", "hi"), environment=ENVIRONMENT)
    line.send(Frame(Kind.RUN, 5, long.encode()), soon())
    line.send(Frame(Kind.RUN, 6, short.encode()), soon())
    assert line.receive(soon()) == Frame(Kind.OUTPUT, 6, b"hi\n")
    assert line.receive(soon()) == Frame(Kind.EXIT, 6, b"0")
    line.send(Frame(Kind.KILL, 5), soon())
    assert line.receive(soon()) == Frame(Kind.EXIT, 5, b"137")
    line.send(Frame(Kind.KILL, 5), soon())  # on its way as it ended
    assert shell(line, "echo still there") == (0, "still there\n", "")


def terminal_text(line: Line, until: str, session: int = 1) -> str:
    text = ""
    while until not in text:
        frame = line.receive(soon())
        assert (frame.kind, frame.session) == (Kind.OUTPUT, session), text
        text += frame.payload.decode()
    return text


def test_terminal(line: Line) -> None:
    request = Request(
        ("sh", "-c", "tty; stty size; read a; stty size; echo got $a"), environment=ENVIRONMENT, terminal=(33, 77)
    )
    line.send(Frame(Kind.RUN, 1, request.encode()), soon())
    assert re.match(r"/dev/pts/\d+\r\n33 77\r\n", terminal_text(line, "33 77\r\n"))
    line.send(Frame(Kind.RESIZE, 1, encode_size(44, 88)), soon())
    line.send(Frame(Kind.INPUT, 1, b"words\r"), soon())
    assert "44 88\r\n" in terminal_text(line, "got words\r\n")
    assert line.receive(soon()) == Frame(Kind.EXIT, 1, b"0")


def test_a_closed_terminal_takes_nothing(line: Line) -> None:
    ignore_hangup = "import os, signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    script = f"{ignore_hangup}; [os.close(fd) for fd in range(3)]; time.sleep(0.5)"
    request = Request((sys.executable, "-c", script), environment=ENVIRONMENT, terminal=(24, 80))
    line.send(Frame(Kind.RUN, 1, request.encode()), soon())
    for _ in range(20):
        line.send(Frame(Kind.INPUT, 1, b"words"), soon())
        line.send(Frame(Kind.RESIZE, 1, encode_size(44, 88)), soon())
        time.sleep(0.02)
    while (frame := line.receive(soon())).kind is Kind.OUTPUT:
        pass  # the terminal's echo
    assert frame == Frame(Kind.EXIT, 1, b"0")
    assert shell(line, "echo next") == (0, "next\n", "")


def test_interrupt_key(line: Line) -> None:
    # Not a shell: dash loses an interrupt that comes between its own writing and its child.
    script = "import time; print('ready', flush=True); time.sleep(100)"
    request = Request((sys.executable, "-c", script), environment=ENVIRONMENT, terminal=(24, 80))
    line.send(Frame(Kind.RUN, 1, request.encode()), soon())
    terminal_text(line, "ready\r\n")
    line.send(Frame(Kind.INPUT, 1, b"\x03"), soon())
    while (frame := line.receive(soon())).kind is Kind.OUTPUT:
        pass
    assert frame == Frame(Kind.EXIT, 1, b"130")


def test_halt_ends_what_runs(line: Line, tmp_path: Path) -> None:
    request = Request(("sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 100"), environment=ENVIRONMENT)
    line.send(Frame(Kind.RUN, 1, request.encode()), soon())
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    line.send(Frame(Kind.HALT), soon())
    with pytest.raises(LineClosed):
        line.receive(soon())
    end = soon()
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end
        time.sleep(0.01)
