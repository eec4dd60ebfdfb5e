"""A guest whose kernel is an ordinary process: User-Mode Linux. One processor, no PCI, up in half a second."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.machine import Boot, Kind, Launch, boot_script

_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class UmlMachine:
    """``kernel``: the executable that :mod:`.kernel` builds."""

    kernel: Path

    @property
    def kind(self) -> Kind:
        return "uml"

    @property
    def settings(self) -> Mapping[str, str]:
        return {"LAB_LINE": "/dev/tty1"}

    def prepare(self, folder: Path) -> None:
        init = folder / "init"
        init.write_text(boot_script("uml_init.sh"))
        init.chmod(0o755)
        (folder / "uml").mkdir()

    def launch(self, boot: Boot) -> Launch:
        """The console is the process's stdout. Its own files go to the boot folder, and so it needs no HOME."""
        argv = (
            *one_processor(),
            str(self.kernel),
            f"mem={boot.memory_mib}M",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            f"init={boot.folder}/init",
            f"lab={boot.folder}",
            f"uml_dir={boot.folder}/uml/",
            "quiet",
            "panic=-1",  # a panic ends the process
            "ssl=null",  # or each serial line would look for a terminal emulator
            "con=null",
            "con0=null,fd:1",
            f"con1=fd:{boot.line_fd}",
        )
        return Launch(argv, {"HOME": str(boot.folder), "TMPDIR": str(memory_directory(boot))})


def one_processor() -> tuple[str, ...]:
    """Keeps the guest on one of our processors, its only one anyway.

    Kernel and guest processes hand over to each other at every system call; from one processor to another that takes so
    long that a guest on an otherwise idle machine was two to eight times slower (measured on two virtual processors).
    """
    taskset = shutil.which("taskset")
    allowed = sorted(os.sched_getaffinity(0))
    return (taskset, "-c", str(allowed[os.getpid() % len(allowed)])) if taskset else ()


def memory_directory(boot: Boot, shared_memory: Path = _SHARED_MEMORY) -> Path:
    """Where the file that is the guest's memory lies: /dev/shm, unless that is too small (containers) or noexec."""
    try:
        about = os.statvfs(shared_memory)
    except OSError:
        return boot.folder
    fits = about.f_bavail * about.f_frsize >= boot.memory_mib << 20
    return shared_memory if fits and not about.f_flag & os.ST_NOEXEC else boot.folder
