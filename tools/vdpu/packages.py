"""The Debian packages that a virtual card's system is made of, and getting them for another kind of machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.host_steps import Steps
from meshfusion.tools.lab.progress import Note

ARCHITECTURE: Final = "arm64"
SYSTEM: Final = (
    "base-passwd", "bash", "busybox-static", "ca-certificates", "coreutils", "dash", "dbus", "dosfstools", "e2fsprogs",
    "fdisk", "findutils", "grep", "gzip", "hostname", "iproute2", "kmod", "libc-bin", "linux-image-arm64", "mount",
    "netbase", "nvme-cli", "openssh-server", "procps", "sed", "systemd", "systemd-boot-efi", "systemd-sysv", "tar",
    "udev", "util-linux", "xz-utils", "zstd",
)  # fmt: skip
HOST: Final = ("qemu-system-arm", "qemu-efi-aarch64", "kmod", "iproute2", "fuse3", "openssh-client")
"""What the machine needs that a virtual card runs on."""

_SOURCES: Final = Path("/etc/apt/sources.list.d/debian.sources")
_OLD_SOURCES: Final = Path("/etc/apt/sources.list")
INSTALLED: Final = re.compile(r"Inst (\S+) \((\S+) .*\[(\w+)\]\)")
_UPDATE_S: Final = 600.0
_DOWNLOAD_S: Final = 3600.0


def fetched(cache: Path, note: Note) -> tuple[Path, ...]:
    """The files of :data:`SYSTEM` and all that they depend on, for ARCHITECTURE, in ``cache``. Raises LabError.

    apt chooses and checks them, in a root of its own, from the machine's own sources.
    """
    for name in ("state/lists/partial", "archives/partial", "sources"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    (cache / "state" / "status").touch()
    _take_sources(cache / "sources")
    configuration = cache / "apt.conf"
    configuration.write_text(_configuration(cache))
    environment = {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C"}
    steps = Steps("the virtual card's system", cache / "apt.log", note)
    _apt(steps, "reading package lists", ("update", "-qq"), cache, environment, _UPDATE_S)
    wanted = _wanted(environment)
    _apt(
        steps, f"downloading {len(wanted)} packages",
        ("install", "--download-only", "-y", "-qq", *SYSTEM), cache, environment, _DOWNLOAD_S,
    )  # fmt: skip
    return tuple(cache / "archives" / name for name in wanted)


def _take_sources(folder: Path) -> None:
    found = [path for path in (_SOURCES, _OLD_SOURCES) if path.exists()]
    if not found:
        raise LabError(
            "this machine names no Debian package source", next_step="run it on Debian 12, or build the system there"
        )
    for path in found:
        shutil.copy(path, folder / (path.name if path.suffix == ".sources" else "debian.list"))


def _configuration(cache: Path) -> str:
    settings = {
        "APT::Architecture": ARCHITECTURE,
        "APT::Architectures": ARCHITECTURE,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
        "Acquire::Languages": "none",
        "Dir::State": f"{cache}/state",
        "Dir::State::status": f"{cache}/state/status",
        "Dir::Cache": str(cache),
        "Dir::Cache::archives": "archives",
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": f"{cache}/sources",
    }
    return "".join(f'{name} "{value}";\n' for name, value in settings.items())


def _wanted(environment: Mapping[str, str]) -> list[str]:
    """Names of their files, as apt calls them in its archives."""
    argv = ("apt-get", "install", "--simulate", "-qq", *SYSTEM)
    done = subprocess.run(argv, env=dict(environment), capture_output=True, text=True, check=False)
    names = [file_name(*found.groups()) for found in map(INSTALLED.match, done.stdout.splitlines()) if found]
    if done.returncode or not names:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise LabError(
            f"apt finds no packages for {ARCHITECTURE}: {said}",
            next_step="see that the machine's package source has this architecture",
        )
    return names


def file_name(package: str, version: str, architecture: str) -> str:
    """As apt names it: the colon behind an epoch is written as %3a."""
    return f"{package}_{version.replace(':', '%3a')}_{architecture}.deb"


def _apt(
    steps: Steps, what: str, arguments: tuple[str, ...], cache: Path, environment: Mapping[str, str], deadline_s: float
) -> None:
    def progress() -> str:
        return f"{sum(f.stat().st_size for f in (cache / 'archives').rglob('*') if f.is_file()) >> 20} MiB"

    steps.run(
        what, ["apt-get", *arguments], directory=cache, deadline_s=deadline_s, environment=environment,
        progress=progress,
    )  # fmt: skip
