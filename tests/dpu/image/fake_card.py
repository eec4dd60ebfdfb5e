"""A BlueField behind its rshim, as far as the driver shows it: keyed writes, the log ring, ``boot``, resets, faults.

What it does is modelled on ``src/rshim.c``, ``src/rshim_fuse.c`` and ``src/rshim_log.c`` of the driver, and on the
installers of github.com/Mellanox/bfb-build. Time is given from outside, so that it serves simulations as well as the
file system in :mod:`tests.dpu.image.fuse_rshim`.
"""

from __future__ import annotations

import errno
import io
from dataclasses import dataclass, field
from pathlib import Path

from meshfusion.dpu.image.bf_cfg import assignments
from meshfusion.dpu.image.bfb import BL2_IMAGE_ID, BfbImage, make_bfb
from meshfusion.tools.vdpu.rshim_view import RING_BYTES, misc_setting, misc_text
from meshfusion.tools.vdpu.stream_parts import end_of_bfb

LOGS = Path(__file__).parent / "logs"

BF_CFG = b"device=/dev/mmcblk0\nERASE_SSD=no\nubuntu_PASSWORD='$6$salt$hash'\nbfb_modify_os() { true; }\n"


def recorded(name: str) -> tuple[str, ...]:
    return tuple(line for line in (LOGS / f"{name}.txt").read_text().splitlines() if line.strip())


INSTALLATION = (*recorded("bf3_ubuntu_installation"), " INFO[MISC]: Rebooting...")
NEW_SYSTEM = recorded("bf3_boot_from_emmc")


def tiny_bfb(size_bytes: int = 200_000, *, hardware_version: int = 2) -> bytes:
    """A valid one, of about this size."""
    return make_bfb((
        BfbImage(BL2_IMAGE_ID, hardware_version, b"bl2" * 11),
        BfbImage(62, 0, b"kernel"),
        BfbImage(63, 0, bytes(range(256)) * (size_bytes // 256)),
    ))  # fmt: skip


@dataclass
class Behaviour:
    """What a card is, and what goes wrong with it. Times are seconds after the event that they belong to.

    ``stall_at_bytes``: it takes no more from there, as often as ``stalls``. ``line_s``: between two lines of its log.
    ``installation``, ``new_system``: what it says. ``hangs_after``: it stops after the line with this text.
    """

    mode: str = "DPU mode"
    chip: str = "BlueField-3(Rev 1)"
    part_number: str = "900-9D3B6-00CV-AA0"
    device_name: str = "pcie-0000:83:00.2"
    is_dropped: bool = False
    is_locked: bool = False
    boot_timeout_s: int = 300
    busy_for_s: float = 0.0
    stall_at_bytes: int | None = None
    stalls: int = 1
    line_s: float = 1.0
    installation: tuple[str, ...] = INSTALLATION
    new_system: tuple[str, ...] = NEW_SYSTEM
    hangs_after: str = ""
    tmfifo_s: float = 2.0
    ssh_s: float = 4.0
    ports_s: float = 6.0
    is_secretly_read: bool = False
    """Another program reads the log too."""


@dataclass
class FakeCard:
    behaviour: Behaviour = field(default_factory=Behaviour)
    now_s: float = 0.0
    display_level: int = 0
    clear_on_read: bool = False
    boot_mode: int = 1
    is_boot_open: bool = False
    resets: int = 0
    installed: int = 0
    erased_pool_drives: int = 0
    cut_short: int = 0
    """Installations that a reset ended."""
    pushed: bytearray = field(default_factory=bytearray)
    _ring: list[str] = field(default_factory=list)
    _due: list[tuple[float, str]] = field(default_factory=list)
    _is_installing: bool = False
    _up_since_s: float | None = None
    _began_s: float | None = None

    def __post_init__(self) -> None:
        self._boot(NEW_SYSTEM, self.now_s - 1000)

    # The driver's files.

    def read_misc(self) -> str:
        """As the driver's first read of an opened file gives it; what is beyond its buffer is lost."""
        self._live()
        b = self.behaviour
        lines = [
            ("DISPLAY_LEVEL", f"{self.display_level} (0:basic, 1:advanced, 2:log)"),
            *([("BF_MODE", b.mode)] if b.mode else []),
            ("BOOT_MODE", f"{self.boot_mode} (0:rshim, 1:emmc, 2:emmc-boot-swap)"),
            ("BOOT_TIMEOUT", f"{b.boot_timeout_s} (seconds)"),
            ("DROP_MODE", f"{int(b.is_dropped)} (0:normal, 1:drop)"),
            ("SW_RESET", "0 (1: reset)"),
            ("DEV_NAME", b.device_name),
            ("DEV_INFO", b.chip),
            ("OPN_STR", b.part_number),
            ("UP_TIME", "9628(s)"),
            ("SECURE_NIC_MODE", f"{int(b.is_locked)} (0:no, 1:yes)"),
            ("FORCE_CMD", "0 (1: send Force command)"),
        ]
        log = None if b.is_dropped else tuple(self._ring)
        text = misc_text(lines, self.display_level, self.clear_on_read, log)
        if self.display_level == 2 and self.clear_on_read and not b.is_dropped:
            self._ring.clear()
        return text

    def write_misc(self, data: bytes) -> None:
        self._live()
        key, number = misc_setting(data)
        match key:
            case "DISPLAY_LEVEL":
                self.display_level = number
            case "CLEAR_ON_READ":
                self.clear_on_read = bool(number)
            case "BOOT_TIMEOUT":
                self.behaviour.boot_timeout_s = number
            case "SW_RESET":
                self._reset()
                self._boot(NEW_SYSTEM, self.now_s)
            case _:
                raise OSError(errno.EINVAL, "unknown key")

    def open_boot(self) -> None:
        self._live()
        if self.behaviour.is_dropped:
            raise OSError(errno.EINVAL, "drop mode")
        if self.behaviour.is_locked:
            raise OSError(errno.EPERM, "locked")
        if self.is_boot_open or self.now_s < self.behaviour.busy_for_s:
            raise OSError(errno.EBUSY, "busy")
        self.is_boot_open, self.boot_mode = True, 0
        self._reset()
        self._say(" INFO[BL2]: start")

    def write_boot(self, data: bytes) -> int:
        """How many were taken; when none are, time has passed and the driver gives up."""
        assert self.is_boot_open
        b = self.behaviour
        if b.stall_at_bytes is not None and b.stalls > 0 and len(self.pushed) + len(data) > b.stall_at_bytes:
            b.stalls -= 1
            self.now_s += b.boot_timeout_s
            raise OSError(errno.ETIMEDOUT, "boot timeout")
        self.pushed += data
        self.now_s += len(data) / 12e6
        return len(data)

    def close_boot(self) -> None:
        self.is_boot_open, self.boot_mode = False, 1
        end = end_of_bfb(io.BytesIO(self.pushed))
        if end is None:
            return
        bf_cfg = bytes(self.pushed[end:])
        found = assignments(bf_cfg.decode(errors="replace"))
        if found.get("ERASE_SSD") != "no" or "device" not in found:
            self.erased_pool_drives += 1  # as the installers do without
        lines = [line for line in self.behaviour.installation if bf_cfg or "Found bf.cfg" not in line]
        self._boot(tuple(lines), self.now_s)

    # What it does by itself.

    @property
    def is_up(self) -> bool:
        self._live()
        return self._up_since_s is not None

    def up_for_s(self) -> float:
        self._live()
        return self.now_s - self._up_since_s if self._up_since_s is not None else -1.0

    def _boot(self, lines: tuple[str, ...], from_s: float) -> None:
        self._up_since_s = None
        for number, line in enumerate(lines, 1):
            self._due.append((from_s + number * self.behaviour.line_s, line))
            if self.behaviour.hangs_after and self.behaviour.hangs_after in line:
                return

    def _reset(self) -> None:
        self.resets += 1
        self._live()
        if self._is_installing:
            self.cut_short += 1
        self._is_installing = False
        self._up_since_s = None
        self._due.clear()
        self._ring.clear()
        self.pushed.clear()

    def _live(self) -> None:
        while self._due and self._due[0][0] <= self.now_s:
            at_s, line = self._due.pop(0)
            self._say(line)
            if "installation started" in line:
                self._is_installing = True
            if "Rebooting" in line or "Installation failed" in line:
                self.installed += "Rebooting" in line
                self._is_installing = False
                self._boot(self.behaviour.new_system, at_s + 5 * self.behaviour.line_s)
            elif "Linux up" in line:
                self._up_since_s = at_s

    def _say(self, line: str) -> None:
        if self.behaviour.is_secretly_read:
            self._ring.clear()
        self._ring.append(line)
        while sum(len(entry) for entry in self._ring) > RING_BYTES:
            self._ring.pop(0)
