"""Kernel packages of the distribution: which there are, and their content without installing them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.host_steps import Steps
from meshfusion.tools.lab.progress import Note

DOWNLOAD_DEADLINE_S: Final = 1800.0
_LISTS: Final = Path("/var/lib/apt/lists")


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str


def remembered(file: Path, look: Callable[[], Package], lists: Path = _LISTS) -> Package:
    """What ``look`` finds, asked again only when the package lists have changed: reading them takes a second."""
    changed_ns = lists.stat().st_mtime_ns if lists.exists() else 0
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(file.read_text())
        if known["lists_changed_ns"] == changed_ns:
            return Package(known["name"], known["version"])
    package = look()
    file.parent.mkdir(parents=True, exist_ok=True)
    changed_ns = lists.stat().st_mtime_ns if lists.exists() else 0  # root may have fetched them
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({**asdict(package), "lists_changed_ns": changed_ns}) + "\n")
    new.replace(file)
    return package


def kernel_source(note: Note) -> Package:
    """``linux-source-6.1``, which everything was tried with, else the newest that there is. Raises LabError."""
    names = _with_lists(lambda: _search("^linux-source-[0-9.]+$"), note)
    if not names:
        raise _nothing("linux-source-*")
    return _package("linux-source-6.1" if "linux-source-6.1" in names else max(names, key=version_of))


def kernel_image(architecture: str, note: Note) -> Package:
    """What ``linux-image-ARCHITECTURE`` stands for now. Raises LabError."""
    meta = f"linux-image-{architecture}"
    names = _with_lists(lambda: _depends(meta), note)
    images = [name for name in names if name.startswith("linux-image-")]
    if not images:
        raise _nothing(meta)
    return _package(images[0])


def version_of(name: str) -> tuple[int, ...]:
    """Of a package's name: ``linux-source-6.12`` is newer than ``linux-source-6.1``."""
    return tuple(int(number) for number in re.findall(r"\d+", name))


def download(package: Package, directory: Path, steps: Steps) -> Path:
    """The package's file, in ``directory``. Raises LabError."""
    argv = ["apt-get", "download", f"{package.name}={package.version}"]
    if os.geteuid() == 0:
        argv[1:1] = ["-o", "APT::Sandbox::User=root"]  # its own user could not write here
    steps.run(
        f"downloading {package.name} {package.version}",
        argv,
        directory=directory,
        deadline_s=DOWNLOAD_DEADLINE_S,
        environment=dict(os.environ),  # a proxy may be set there
        progress=lambda: f"{sum(f.stat().st_size for f in directory.iterdir() if f.is_file()) >> 20} MiB",
    )
    return next(directory.glob(f"{package.name}_*.deb"))


def _with_lists(look: Callable[[], list[str]], note: Note) -> list[str]:
    """What ``look`` finds in the package lists; root fetches them when there are none."""
    found = look()
    if not found and os.geteuid() == 0 and shutil.which("apt-get"):
        note("fetching the package lists")
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
        found = look()
    return found


def _search(pattern: str) -> list[str]:
    return [line.split()[0] for line in _apt_cache("search", "--names-only", pattern)]


def _depends(name: str) -> list[str]:
    return [line.split()[-1] for line in _apt_cache("depends", name) if "Depends:" in line]


def _package(name: str) -> Package:
    fields = dict(line.split(": ", 1) for line in _apt_cache("show", "--no-all-versions", name) if ": " in line)
    return Package(name, fields["Version"])


def _apt_cache(*arguments: str) -> list[str]:
    try:
        done = subprocess.run(["apt-cache", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines()


def _nothing(what: str) -> LabError:
    return LabError(
        f"the package lists have no {what}",
        next_step="on Debian or Ubuntu: sudo apt-get update, then the same command again; elsewhere name a kernel "
        "that was built on one (MESHFUSION_LAB_KERNEL=/path/to/linux)",
    )
