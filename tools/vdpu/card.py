"""A virtual card behind its rshim: what is written to ``boot`` is booted, and installs; then it boots from its drive.

The machine is QEMU's, and so is all that happens on it; of the lines in its log those of PSC, BL2 and UEFI are said
here, when what they tell of happens, those of MISC by the card's own system.
"""

from __future__ import annotations

import errno
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from meshfusion.dpu.image.errors import BfbError
from meshfusion.tools.vdpu.hardware import BOOT_SERIAL, DriveBoot, Hardware, RshimBoot
from meshfusion.tools.vdpu.rshim_view import RshimView
from meshfusion.tools.vdpu.stream_parts import taken_apart, write_boot_files

_LOOK_S: Final = 0.1
_RESTART_S: Final = 1.0
"""A machine that cannot start, because of what QEMU then says, is not tried all the time."""
_ENDING_S: Final = 10.0
_FIRST_LINES: Final[dict[type, tuple[str, ...]]] = {
    RshimBoot: (" INFO[UEFI]: exit Boot Service",),
    DriveBoot: (" INFO[PSC]: PSC BL1 START", " INFO[BL2]: start", " INFO[BL2]: boot mode (emmc)"),
}
_UEFI_LINES: Final = (
    (re.compile(rb"UEFI firmware"), " INFO[BL2]: UEFI loaded"),
    (re.compile(rb"BdsDxe: loading "), " INFO[UEFI]: PCIe enum end"),
    (re.compile(rb"BdsDxe: starting .*" + BOOT_SERIAL.encode()), " INFO[UEFI]: exit Boot Service"),
)
"""What the firmware writes to its console, and what a card would say then. With nothing on the boot drive it starts its
own shell."""


class VirtualCard:
    """Files' calls come from one thread at a time; :meth:`live` runs in another, which starts and ends the machine."""

    def __init__(self, hardware: Hardware, view: RshimView) -> None:
        self._hardware, self._view = hardware, view
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._boot: RshimBoot | DriveBoot | None = DriveBoot()
        self._asked = threading.Event()
        self._ends = False
        self._pushed: Path = hardware.folder / "pushed.bfb"
        self._is_boot_open = False

    # The driver's files.

    def read_misc(self) -> str:
        with self._lock:
            return self._view.read(time.monotonic() - self._began_s)

    def write_misc(self, data: bytes) -> None:
        with self._lock:
            if self._view.write(data):
                self._reset(DriveBoot())

    def open_boot(self) -> None:
        with self._lock:
            if self._is_boot_open:
                raise OSError(errno.EBUSY, "busy")
            self._is_boot_open, self._view.boot_mode = True, 0
            self._pushed.write_bytes(b"")
            self._reset(None)
            self._view.say(" INFO[BL2]: start")
            self._view.say(" INFO[BL2]: boot mode (rshim)")

    def write_boot(self, data: bytes) -> int:
        with self._pushed.open("ab") as file:
            return file.write(data)

    def close_boot(self) -> None:
        with self._lock:
            self._is_boot_open, self._view.boot_mode = False, 1
        try:
            stream = taken_apart(self._pushed)
        except BfbError as error:
            with self._lock:
                self._view.say(f" ERR[BL2]: {error.message}")
            return
        if stream is None:
            return  # it waits for the rest, as a card does
        boot = RshimBoot(self._hardware.folder / "pushed-kernel", self._hardware.folder / "pushed-initrd")
        write_boot_files(self._pushed, stream, boot.kernel, boot.initrd)
        with self._lock:
            self._reset(boot, keep_log=True)

    def _reset(self, boot: RshimBoot | DriveBoot | None, *, keep_log: bool = False) -> None:
        """``boot``: what comes next; None: it waits for a stream."""
        if not keep_log:
            self._view.forget_log()
        self._boot = boot
        self._began_s = time.monotonic()
        self._asked.set()

    # The machine.

    def live(self) -> None:
        """Until :meth:`end`. In a thread that lives as long: the machine ends with the thread that started it."""
        while not self._ends:
            with self._lock:
                self._asked.clear()
                boot = self._boot
                for line in _FIRST_LINES.get(type(boot), ()):
                    self._view.say(line)
            if boot is None:
                self._asked.wait(_LOOK_S)
                continue
            self._run(boot)
            self._asked.wait(_RESTART_S)
            with self._lock:
                if not self._asked.is_set():  # it restarted by itself
                    self._boot = DriveBoot()
                    self._began_s = time.monotonic()

    def end(self) -> None:
        self._ends = True
        self._asked.set()

    def _run(self, boot: RshimBoot | DriveBoot) -> None:
        for path in (self._hardware.console, self._hardware.rshim_log):
            path.touch()
        self._hardware.wire.unlink(missing_ok=True)
        with (
            closing(_Tail(self._hardware.console)) as console,
            closing(_Tail(self._hardware.rshim_log)) as log,
        ):
            with started(self._hardware.argv(boot)) as machine:
                while machine.poll() is None and not self._asked.is_set() and not self._ends:
                    time.sleep(_LOOK_S)
                    self._listen(console, log, boot)
            self._listen(console, log, boot)

    def _listen(self, console: _Tail, log: _Tail, boot: RshimBoot | DriveBoot) -> None:
        for line in console.lines():
            if isinstance(boot, DriveBoot):
                for pattern, said in _UEFI_LINES:
                    if pattern.search(line):
                        self._say(said)
        for line in log.lines():
            self._say(line.decode(errors="replace"))

    def _say(self, line: str) -> None:
        """What a machine said that was reset meanwhile is not heard."""
        with self._lock:
            if not self._asked.is_set():
                self._view.say(line)


class _Tail:
    """Whole lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._file.seek(0, 2)
        self._rest = b""

    def lines(self) -> list[bytes]:
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line.rstrip(b"\r") for line in whole]

    def close(self) -> None:
        self._file.close()


@contextmanager
def started(argv: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """The machine, which ends with this, or when whoever started it dies."""
    # setpriv sets the signal that the kernel sends then, in the process that becomes the machine.
    process = subprocess.Popen(
        ("setpriv", "--pdeathsig", "KILL", "--", *argv), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
