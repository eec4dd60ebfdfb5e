"""Run one command in a guest of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshfusion.tools.lab.commands import Sink, guest_environment, run_at_terminal, run_command, to_own_streams
from meshfusion.tools.lab.errors import GuestDeadlineError, LabError
from meshfusion.tools.lab.guest_agent.frames import Request
from meshfusion.tools.lab.guest_process import Guest, started_guest
from meshfusion.tools.lab.kernel import uml_kernel
from meshfusion.tools.lab.line import LineClosed, LineTimeout
from meshfusion.tools.lab.machine import Kind, Machine
from meshfusion.tools.lab.mappings import allow_large_processes
from meshfusion.tools.lab.packages import GUEST, TCG, ensure_packages
from meshfusion.tools.lab.places import Places, default_cache
from meshfusion.tools.lab.progress import Note, elapsed_notes
from meshfusion.tools.lab.qemu import EmulatedDrive, TcgMachine, tcg_image
from meshfusion.tools.lab.uml import UmlMachine

DEFAULT_MEMORY_MIB: Final = 1536
DEFAULT_DEADLINE_S: Final = 300.0
CONSOLE_LOG: Final = "console.log"


@dataclass(frozen=True, slots=True)
class GuestRun:
    """What to run, and where.

    ``command`` runs as the guest's root in ``directory`` of the host's tree. ``environment`` is added to what
    :func:`.commands.guest_environment` gives. ``output_directory`` is the guest's ``/out``, the only place where what
    it writes stays. ``deadline_s`` counts from the start of the guest. ``drives`` are for "tcg".
    """

    command: tuple[str, ...]
    kind: Kind = "uml"
    directory: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=dict)
    output_directory: Path | None = None
    memory_mib: int = DEFAULT_MEMORY_MIB
    deadline_s: float = DEFAULT_DEADLINE_S
    drives: tuple[EmulatedDrive, ...] = ()
    terminal: tuple[int, int] | None = None
    """Rows and columns when the command gets the caller's terminal."""


@dataclass(frozen=True, slots=True)
class GuestResult:
    """``boot_s``: until the agent answered; ``run_s``: from then to the command's end."""

    exit_code: int
    boot_s: float
    run_s: float


_KILLED: Final = 128 + signal.SIGKILL
_MAPPINGS: Final = "vm.max_map_count has been reached"  # the kernel's words (arch/um/os-Linux/skas/mem.c)
_MAPPINGS_HINT: Final = (
    "a process in the guest was killed: each of its pages can be a mapping of its own on this machine, and "
    "vm.max_map_count limits them, by default to 250 MB a process; raise it (sudo sysctl vm.max_map_count=1000000), or "
    "use --kind tcg"
)


def ready_machine(kind: Kind, drives: tuple[EmulatedDrive, ...] = (), note: Note | None = None) -> Machine:
    """Install and build what ``kind`` needs, as far as it is not there. Raises LabError."""
    note = note or elapsed_notes()
    places = Places(default_cache())
    if kind == "uml":
        if drives:
            raise LabError("User-Mode Linux has no PCI, so no emulated drives", next_step="use kind tcg for them")
        ensure_packages(GUEST, note)
        return UmlMachine(uml_kernel(places.uml, note))
    ensure_packages((*GUEST, *TCG), note)
    return TcgMachine(tcg_image(places.tcg, note), drives)


def run_guest(
    run: GuestRun, *, machine: Machine | None = None, sink: Sink = to_own_streams, note: Note | None = None
) -> GuestResult:
    """Boot, run, power off. Raises LabError when there is no guest, GuestDeadlineError when it took too long.

    Nothing is left of the guest on any path: not after an exception, Ctrl-C, SIGTERM or SIGHUP. Waits only in the
    calling thread, whose end is the guest's end.
    """
    if machine is None:
        machine = ready_machine(run.kind, run.drives, note)
    if machine.kind == "uml" and run.memory_mib > DEFAULT_MEMORY_MIB:
        allow_large_processes(run.memory_mib, note or elapsed_notes())
    began = time.monotonic()
    deadline = began + run.deadline_s
    with ending_on_signals(), ready_guest(run, machine, deadline) as guest:
        ready = time.monotonic()
        request = request_of(run, guest.folder, guest.kind)
        try:
            if run.terminal is None:
                code = run_command(guest.line, request, sink, deadline)
            else:
                code = run_at_terminal(guest.line, request, deadline)
        except LineClosed as e:
            raise guest.lost("ended before its command did") from e
        except LineTimeout as e:
            raise GuestDeadlineError(
                f"{run.command[0]} was not done {run.deadline_s:.0f} s after the guest's start, so the guest was ended",
                next_step="allow more time (--deadline), or see where it hangs",
            ) from e
        ended = time.monotonic()
        guest.power_off()
        if code == _KILLED and _MAPPINGS in guest.console.tail():
            (note or elapsed_notes())(_MAPPINGS_HINT)
    return GuestResult(code, ready - began, ended - ready)


@contextmanager
def ready_guest(run: GuestRun, machine: Machine, deadline: float) -> Iterator[Guest]:
    """A guest whose agent has answered. The console's text goes to ``console.log`` in the output directory."""
    out = run.output_directory.absolute() if run.output_directory else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    console_file = out / CONSOLE_LOG if out else None
    with started_guest(machine, memory_mib=run.memory_mib, output_directory=out, console_file=console_file) as guest:
        yield guest.when_ready(deadline)


def request_of(run: GuestRun, folder: Path, kind: str) -> Request:
    """``folder``, ``kind``: of the guest that it is for."""
    environment = guest_environment(os.environ, folder, kind, run.environment)
    return Request(run.command, str(run.directory.absolute()), environment, run.terminal)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack like Ctrl-C does; handlers that others have set stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
