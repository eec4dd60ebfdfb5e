"""Start, use and end the guest in the background, from other processes than its keeper."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.commands import Sink, run_at_terminal, run_command
from meshfusion.tools.lab.errors import GuestDeadlineError, LabError
from meshfusion.tools.lab.guest import GuestRun, request_of
from meshfusion.tools.lab.guest_agent.frames import Frame, Kind
from meshfusion.tools.lab.keeper import LOG, KeptGuest, already_up, keeper_lives, kept_guest
from meshfusion.tools.lab.line import Line, LineClosed, LineTimeout

STARTED_UP_DEADLINE_S: Final = 120.0
_ANSWER_DEADLINE_S: Final = 10.0
_DOWN_DEADLINE_S: Final = 30.0
_POLL_S: Final = 0.05


def bring_up(state: Path, run: GuestRun, boot_deadline_s: float = STARTED_UP_DEADLINE_S) -> KeptGuest:
    """Start a keeper and wait until its guest is ready; what it needs is installed and built (``ready_machine``).

    Raises LabError: one is up already, or it did not come up.
    """
    if keeper_lives(state):
        raise already_up()
    assert run.output_directory is not None, "the caller chose one"
    state.mkdir(parents=True, exist_ok=True)
    module = "meshfusion.tools.lab.keeper"
    numbers = [str(n) for n in (run.memory_mib, run.deadline_s, boot_deadline_s)]
    argv = [sys.executable, "-m", module, str(state), run.kind, *numbers, str(run.output_directory.absolute())]
    with (state / LOG).open("wb") as log:
        keeper = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    try:
        return _when_up(state, keeper, time.monotonic() + boot_deadline_s + _ANSWER_DEADLINE_S)
    except BaseException:
        keeper.terminate()
        raise


def _when_up(state: Path, keeper: subprocess.Popen[bytes], deadline: float) -> KeptGuest:
    while time.monotonic() < deadline:
        if (kept := kept_guest(state)) is not None and kept.pid == keeper.pid:
            return kept
        if keeper.poll() is not None:
            said = (state / LOG).read_text(errors="replace").strip().removeprefix("error: ")
            message, _, next_step = said.partition("\n  next step: ")
            raise LabError(message, next_step=next_step or f"read {state / LOG}")
        time.sleep(_POLL_S)
    raise GuestDeadlineError("the guest in the background did not come up in time", next_step=f"read {state / LOG}")


def bring_down(state: Path) -> bool:
    """End the guest in the background; was there one? Raises LabError when it would not end."""
    if not keeper_lives(state):
        return False
    kept = kept_guest(state)
    if kept is not None:
        with suppress(LabError, LineClosed, LineTimeout), connected(kept) as line:
            line.send(Frame(Kind.HALT), time.monotonic() + _ANSWER_DEADLINE_S)
        if _ended(state):
            return True
        with suppress(ProcessLookupError):
            os.kill(kept.pid, signal.SIGKILL)  # its guest goes with it
    if not _ended(state):
        raise LabError(
            "the guest in the background does not end", next_step=f"kill the process that holds {state / 'lock'}"
        )
    return True


def _ended(state: Path) -> bool:
    end = time.monotonic() + _DOWN_DEADLINE_S
    while time.monotonic() < end:
        if not keeper_lives(state):
            return True
        time.sleep(_POLL_S)
    return False


@contextmanager
def connected(kept: KeptGuest) -> Iterator[Line]:
    """A line for one command. Its end is the command's end. Raises LabError."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(kept.socket)
            line = Line(connection)
            line.receive(time.monotonic() + _ANSWER_DEADLINE_S)
        except (OSError, LineClosed, LineTimeout) as e:
            raise LabError(
                f"the guest in the background (process {kept.pid}) does not answer", next_step="mfctl lab down"
            ) from e
        yield line


def run_in_background_guest(kept: KeptGuest, run: GuestRun, sink: Sink) -> tuple[int, float]:
    """As ``run_guest`` does, in the guest that is up; ``run.deadline_s`` counts from now. Exit code and seconds."""
    began = time.monotonic()
    deadline = began + run.deadline_s
    request = request_of(run, Path(kept.folder), kept.kind)
    with connected(kept) as line:
        try:
            if run.terminal is None:
                code = run_command(line, request, sink, deadline)
            else:
                code = run_at_terminal(line, request, deadline)
        except LineClosed as e:
            raise LabError(
                "the guest in the background ended before the command did",
                next_step=f"see {kept.out}/console.log, then mfctl lab up",
            ) from e
        except LineTimeout as e:
            raise GuestDeadlineError(
                f"{run.command[0]} was not done after {run.deadline_s:.0f} s, so it was ended",
                next_step="allow more time (--deadline), or see where it hangs; the guest is still up",
            ) from e
    return code, time.monotonic() - began
