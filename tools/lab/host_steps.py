"""Long commands on the host: logged, with a sign of life for the person who waits, ended whole when they must be."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.progress import Note

SIGN_OF_LIFE_S: Final = 15.0
_TAIL_LINES: Final = 15


def build_environment() -> dict[str, str]:
    """As little as compilers need: what a shell happens to have set must not change what they make."""
    return {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"}


@dataclass(frozen=True, slots=True)
class Steps:
    """Commands that add to one log. ``what``: the whole of it, for error messages."""

    what: str
    log: Path
    note: Note

    def run(
        self,
        step: str,
        argv: Sequence[str],
        *,
        directory: Path,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
        progress: Callable[[], str] = str,
    ) -> None:
        """Raises LabError, which names the log. ``progress``: how far it is, told every 15 seconds."""
        self.note(f"{self.what}: {step}")
        with self.log.open("ab") as log:
            log.write(f"\n== {step}: {' '.join(argv)}\n".encode())
            log.flush()
            try:
                code = self._wait(step, argv, directory, deadline_s, environment or build_environment(), log, progress)
            except OSError as e:
                raise self.failure(step, f"{e.filename}: {e.strerror}") from e
        if code:
            tail = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            raise self.failure(step, f"exit status {code}\n" + "\n".join(tail))

    def failure(self, step: str, cause: str) -> LabError:
        return LabError(
            f"{self.what}: {step} failed: {cause}",
            next_step=f"read {self.log}, then run the same command again",
        )

    def _wait(
        self,
        step: str,
        argv: Sequence[str],
        directory: Path,
        deadline_s: float,
        environment: Mapping[str, str],
        log: IO[bytes],
        progress: Callable[[], str],
    ) -> int:
        began = time.monotonic()
        process = subprocess.Popen(
            argv,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return process.wait(SIGN_OF_LIFE_S)
                except subprocess.TimeoutExpired:
                    self.note(f"{self.what}: {step} {progress()}".rstrip())
                if time.monotonic() - began > deadline_s:
                    raise self.failure(step, f"not done after {deadline_s:.0f} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def only_one(lock: Path, note: Note, deadline_s: float) -> Iterator[None]:
    """Hold ``lock``, a file that is made; waits while another process holds it. Raises LabError at the deadline."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + deadline_s
    told = False
    with lock.open("w") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise LabError(
                        f"{lock} is still held by another process after {deadline_s:.0f} s",
                        next_step=f"see who holds it (fuser {lock}), then run the same command again",
                    ) from None
            if not told:
                note("another process is building the same; waiting for it")
                told = True
            time.sleep(0.2)
        yield
