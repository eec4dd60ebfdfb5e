"""Every Debian package that the lab needs, in this one place, and how they get there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from typing import Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.progress import Note

GUEST: Final = (
    "busybox-static",  # pid 1 runs before there is a root to load libraries from
    "cryptsetup-bin",
    "ibverbs-providers",  # the user-space half of soft-RoCE
    "ibverbs-utils",  # ibv_devinfo
    "iproute2",  # ip, tc, rdma
    "kmod",
    "mount",  # losetup
    "nvme-cli",
    "python3-pyverbs",
    "rdma-core",
)
UML_BUILD: Final = ("bc", "binutils", "bison", "flex", "gcc", "libc6-dev", "make", "xz-utils")
TCG: Final = ("qemu-system-x86", "seabios")

_APT_INSTALL: Final = ("apt-get", "install", "-y", "--no-install-recommends")


def missing_packages(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are not installed, in order. On a machine without dpkg: none, for nobody can tell."""
    wanted = sorted(set(names))
    if shutil.which("dpkg-query") is None:
        return ()
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    installed = {line.split()[0] for line in answer.splitlines() if line.endswith(" installed")}
    return tuple(name for name in wanted if name not in installed)


def apt_line(names: Iterable[str]) -> str:
    """What a person without root's rights hands to the one who has them."""
    return f"sudo apt-get update && sudo {' '.join(_APT_INSTALL)} {' '.join(names)}"


def ensure_packages(names: Iterable[str], note: Note) -> None:
    """Install what is missing, as root. Raises LabError, with the one line to run, for anybody else."""
    missing = missing_packages(names)
    if not missing:
        return
    if os.geteuid() != 0:
        raise LabError(
            f"system packages are missing: {' '.join(missing)}",
            next_step=f"run this, then the same command again:\n{apt_line(missing)}",
        )
    note(f"installing system packages: {' '.join(missing)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A failed update is no failure yet: the lists that are there may do.
    subprocess.run(["apt-get", "update", "-qq"], env=quiet, capture_output=True, check=False)
    done = subprocess.run([*_APT_INSTALL, "-qq", *missing], env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise LabError(
            f"apt-get install {' '.join(missing)} failed: {''.join(last)}",
            next_step="check the network and the package sources, then run the same command again",
        )
