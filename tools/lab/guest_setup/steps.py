"""What a setup does, as values: commands to run, and changes to configfs."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.errors import LabError

COMMAND_DEADLINE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Write:
    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: Path


@dataclass(frozen=True, slots=True)
class Link:
    path: Path
    target: Path


@dataclass(frozen=True, slots=True)
class Remove:
    """A directory of configfs, which takes its attributes with it, or a link."""

    path: Path


Step = Run | Write | MakeDirectory | Link | Remove


def run(command: str) -> Run:
    """A command written as in a shell, without the shell's other powers."""
    return Run(tuple(shlex.split(command)))


def carry_out(steps: Iterable[Step]) -> None:
    """In order. Raises LabError at the first that fails."""
    for step in steps:
        try:
            _do(step)
        except OSError as e:
            raise LabError(f"{step}: {e.strerror}", next_step="see the end of the guest's kernel log: dmesg") from e


def try_all(steps: Iterable[Step]) -> list[str]:
    """In order, all of them; returns what failed. For taking down what may be there in part only."""
    failures: list[str] = []
    for step in steps:
        with suppress(FileNotFoundError):
            try:
                _do(step)
            except FileNotFoundError:
                raise
            except (OSError, LabError) as e:
                failures.append(f"{step}: {e}")
    return failures


def output_of(*argv: str) -> str:
    """What a command prints. Raises LabError with what it said when it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False)
    except FileNotFoundError as e:
        raise LabError(f"{argv[0]} is not installed", next_step="install what tools/lab/packages.py lists") from e
    except subprocess.TimeoutExpired as e:
        text = f"{shlex.join(argv)} was not done after {COMMAND_DEADLINE_S:.0f} s"
        raise LabError(text, next_step="see the end of the guest's kernel log: dmesg") from e
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(
            f"{shlex.join(argv)} failed with exit status {done.returncode}: {said}",
            next_step="see the end of the guest's kernel log: dmesg",
        )
    return done.stdout


def load_modules(*names: str) -> None:
    """Where the kernel has modules; a User-Mode Linux of ours has all of it built in."""
    if Path("/proc/modules").exists():
        output_of("modprobe", "-a", *names)


def _do(step: Step) -> None:
    match step:
        case Run(argv):
            output_of(*argv)
        case Write(path, text):
            path.write_text(text)
        case MakeDirectory(path):
            path.mkdir()
        case Link(path, target):
            path.symlink_to(target)
        case Remove(path):
            path.unlink() if path.is_symlink() else path.rmdir()
