"""Keeps one virtual card, until interrupted: its machine, its files in a folder, the host's end of its tmfifo."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.host_steps import only_one
from meshfusion.tools.lab.packages import ensure_packages
from meshfusion.tools.lab.progress import Note
from meshfusion.tools.vdpu.card import VirtualCard
from meshfusion.tools.vdpu.hardware import FIRMWARE, FIRMWARE_VARIABLES, Hardware
from meshfusion.tools.vdpu.packages import HOST
from meshfusion.tools.vdpu.rshim_view import RshimView
from meshfusion.tools.vdpu.tmfifo import host_end

BOOT_DRIVE_MIB: Final = 8192
_TAKE_LOCK_S: Final = 1.0
_ENDING_S: Final = 30.0
_ENDED_BY_SIGNAL: Final = 8  # what libfuse's loop then gives
_CHIP: Final = "BlueField-3(Rev 1)"


@dataclass(frozen=True, slots=True)
class CardWanted:
    """``folder``: for its drives and files; what lies there is kept. ``index``: N of its ``rshimN``."""

    folder: Path
    index: int = 0
    drives: int = 2
    drive_mib: int = 1024
    memory_mib: int = 2048
    processors: int = 2

    @property
    def rshim(self) -> Path:
        """Where the driver's files are, as in ``/dev/rshimN``."""
        return self.folder / f"rshim{self.index}"


def serve(wanted: CardWanted, note: Note, ready: Callable[[], None]) -> None:
    """Until SIGINT, SIGTERM or SIGHUP. ``ready``: called when the files are there. Raises LabError."""
    if not Path("/dev/fuse").exists():
        raise LabError("this kernel has no FUSE (/dev/fuse)", next_step="use another machine")
    ensure_packages(HOST, note)
    wanted.folder.mkdir(parents=True, exist_ok=True)
    with only_one(wanted.folder / "lock", note, _TAKE_LOCK_S), host_end(wanted.index) as tmfifo:
        hardware = Hardware(wanted.folder, wanted.drives, wanted.memory_mib, wanted.processors, tmfifo)
        make_drives(hardware, wanted.drive_mib)
        view = RshimView(device_name=f"usb-{wanted.index + 1}-1", chip=_CHIP)
        card = VirtualCard(hardware, view)
        machine = threading.Thread(target=card.live, name="machine")
        machine.start()
        try:
            _mount(card, wanted.rshim, ready)
        finally:
            card.end()
            machine.join(_ENDING_S)


def make_drives(hardware: Hardware, drive_mib: int) -> None:
    """Those that are not there yet: sparse files."""
    sizes = {hardware.jbof_image(index): drive_mib for index in range(hardware.drives)}
    for path, size_mib in {hardware.boot_image: BOOT_DRIVE_MIB, **sizes}.items():
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(size_mib << 20)
    if not hardware.variables.exists():
        if not FIRMWARE.exists():
            raise LabError(f"{FIRMWARE} does not exist", next_step="install qemu-efi-aarch64")
        shutil.copy(FIRMWARE_VARIABLES, hardware.variables)


def _mount(card: VirtualCard, folder: Path, ready: Callable[[], None]) -> None:
    """Serves the files in this thread. A mount that a killed process left is taken away before."""
    os.environ.setdefault("FUSE_LIBRARY_PATH", find_library("fuse3") or "")  # else it is looked for with a compiler
    try:
        import mfusepy
    except ImportError:
        raise LabError(
            "the Python package mfusepy is not installed", next_step="pip install 'mfusepy>=3.1,<4'"
        ) from None
    from meshfusion.tools.vdpu.rshim_files import RshimFiles

    _unmount(folder)
    folder.mkdir(exist_ok=True)
    files = RshimFiles(lambda: card)
    waiting = threading.Thread(target=_when_there, args=(folder / "misc", ready), daemon=True)
    waiting.start()
    try:
        mfusepy.FUSE(files, str(folder), foreground=True, raw_fi=True, nothreads=False)
    except RuntimeError as error:
        if error.args != (_ENDED_BY_SIGNAL,):
            raise LabError(
                f"the files cannot be mounted at {folder}: libfuse gives {error}", next_step="look above for its words"
            ) from None
    finally:
        _unmount(folder)


def _when_there(path: Path, ready: Callable[[], None]) -> None:
    done = threading.Event()
    while not path.exists():
        done.wait(0.05)
    ready()


def _unmount(folder: Path) -> None:
    subprocess.run(("umount", "-l", str(folder)), capture_output=True, check=False)
