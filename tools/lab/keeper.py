"""The background process that keeps a guest running: ``python -m meshfusion.tools.lab.keeper STATE KIND ...``.

Its state lies in one folder: ``lock`` is held as long as it lives, ``state.json`` says how to reach it once the guest
is ready, ``keeper.log`` is what it had to say, ``out`` is the guest's ``/out`` unless another folder was named.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.guest import GuestRun, ending_on_signals, ready_guest, ready_machine
from meshfusion.tools.lab.machine import KINDS, Kind
from meshfusion.tools.lab.router import Router

LOCK: Final = "lock"
STATE: Final = "state.json"
LOG: Final = "keeper.log"
_TAKE_LOCK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class KeptGuest:
    """A guest in the background. ``folder``: what it booted from; paths are the same in the guest."""

    kind: Kind
    pid: int
    release: str
    folder: str
    socket: str
    out: str
    memory_mib: int
    started_unix_s: float
    expires_unix_s: float


def keep(state: Path, run: GuestRun, boot_deadline_s: float) -> str:
    """Boot, serve the clients, power off; returns why. ``run.deadline_s`` is how long it lives at most."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / LOCK).open("w") as lock:
        _take(lock)
        (state / STATE).unlink(missing_ok=True)  # of a keeper that was killed
        machine = ready_machine(run.kind, run.drives)
        began = time.monotonic()
        with ready_guest(run, machine, began + boot_deadline_s) as guest, socket.socket(socket.AF_UNIX) as listener:
            address = guest.folder / "socket"
            listener.bind(str(address))
            listener.listen()
            kept = KeptGuest(
                kind=run.kind,
                pid=os.getpid(),
                release=guest.release,
                folder=str(guest.folder),
                socket=str(address),
                out=str(run.output_directory),
                memory_mib=run.memory_mib,
                started_unix_s=time.time(),
                expires_unix_s=time.time() + run.deadline_s,
            )
            _write_state(state, kept)
            router = Router(guest.line.connection, listener, guest.release.encode())
            try:
                return router.serve(began + run.deadline_s)
            finally:
                (state / STATE).unlink(missing_ok=True)
                guest.power_off()
                router.close()


def _take(lock: IO[str]) -> None:
    """Raises LabError. Tried for a second: those who only ask whether we live hold the lock for a moment, too."""
    end = time.monotonic() + _TAKE_LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise already_up() from None
            time.sleep(0.05)


def already_up() -> LabError:
    return LabError("a guest is up already", next_step="use it, or end it: mfctl lab down")


def _write_state(state: Path, kept: KeptGuest) -> None:
    new = state / f"{STATE}.new"
    new.write_text(json.dumps(asdict(kept), indent=2) + "\n")
    new.replace(state / STATE)


def kept_guest(state: Path) -> KeptGuest | None:
    """The guest that is up, or None. A state that a killed keeper left is none."""
    if not keeper_lives(state):
        return None
    with suppress(FileNotFoundError):
        return KeptGuest(**json.loads((state / STATE).read_text()))
    return None


def keeper_lives(state: Path) -> bool:
    try:
        lock = (state / LOCK).open("r")
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("memory_mib", type=int)
    parser.add_argument("lifetime_s", type=float)
    parser.add_argument("boot_deadline_s", type=float)
    parser.add_argument("out", type=Path)
    a = parser.parse_args()
    run = GuestRun((), a.kind, output_directory=a.out, memory_mib=a.memory_mib, deadline_s=a.lifetime_s)
    try:
        with ending_on_signals():
            print(f"lab: the guest has ended: {keep(a.state, run, a.boot_deadline_s)}", file=sys.stderr, flush=True)
    except LabError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
