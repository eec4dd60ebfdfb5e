"""What the kinds of guest have in common: the folder that a guest boots from, and how its kernel is started."""

from __future__ import annotations

import fcntl
import importlib.resources
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from meshfusion.tools.lab.errors import LabError

Kind = Literal["uml", "tcg"]
KINDS: Final[tuple[Kind, ...]] = ("uml", "tcg")

OUT: Final = "/out"
"""Where the guest finds the output directory."""

_PREFIX: Final = "meshfusion-lab-"
_SEED_BYTES: Final = 64
_YOUNG_S: Final = 60.0
"""A folder this young may be one whose maker has not locked it yet."""
_DISTRIBUTION_PYTHON: Final = Path("/usr/lib/python3/dist-packages")


@dataclass(frozen=True, slots=True)
class Boot:
    """What a machine is started with. ``line_fd``: our end's peer, an open socket that the machine inherits."""

    folder: Path
    line_fd: int
    memory_mib: int
    output_directory: Path | None


@dataclass(frozen=True, slots=True)
class Launch:
    """The process to start. ``environment``: all that it gets."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Machine(Protocol):
    """A kind of guest that is ready to start."""

    @property
    def kind(self) -> Kind: ...

    @property
    def settings(self) -> Mapping[str, str]:
        """What its init scripts need to know besides the common: LAB_LINE, and more of its own."""
        ...

    def prepare(self, folder: Path) -> None:
        """Put what only this kind needs into the boot folder."""
        ...

    def launch(self, boot: Boot) -> Launch: ...


def boot_script(name: str) -> str:
    return (importlib.resources.files("meshfusion.tools.lab") / "boot" / name).read_text()


@contextmanager
def boot_folder(machine: Machine, output_directory: Path | None) -> Iterator[Path]:
    """A folder of its own for one guest, removed afterwards; those that killed processes left are removed before."""
    remove_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(c.isspace() or c in "\"'" for c in str(folder)):
            raise LabError(f"{folder} does not fit on a kernel's command line", next_step="set TMPDIR to a plain path")
        _fill(folder, machine, output_directory)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale_folders() -> None:
    """A folder is in use as long as the process that made it holds its lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                about = os.fstat(lock)
                if about.st_uid == os.geteuid() and about.st_mtime < time.time() - _YOUNG_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _fill(folder: Path, machine: Machine, output_directory: Path | None) -> None:
    settings = {
        "LAB_PYTHON": sys.executable,
        "LAB_HOST_OUT": str(output_directory or ""),
        **machine.settings,
    }
    (folder / "settings").write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items()))
    (folder / "main.sh").write_text(boot_script("main.sh"))
    (folder / "seed").write_bytes(os.urandom(_SEED_BYTES))
    agent = folder / "python" / "meshfusion" / "tools" / "lab" / "guest_agent"
    agent.parent.mkdir(parents=True)
    agent.symlink_to(Path(__file__).resolve().parent / "guest_agent")
    modules = python_path(folder)
    modules.mkdir()
    if (_DISTRIBUTION_PYTHON / "pyverbs").is_dir():
        (modules / "pyverbs").symlink_to(_DISTRIBUTION_PYTHON / "pyverbs")
    machine.prepare(folder)


def python_path(folder: Path) -> Path:
    """Holds the distribution's pyverbs and nothing else: its other modules would hide a virtual environment's."""
    return folder / "modules"
