"""What the rshim driver shows of a card and lets be set: the keys of ``misc``, and the ring of the card's log. No I/O.

Modelled on ``src/rshim_fuse.c`` and ``src/rshim_log.c`` of github.com/Mellanox/rshim-user-space.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

RING_BYTES: Final = 1024
DRIVER_BUFFER_BYTES: Final = 4069
_RULE: Final = "-" * 39
_BANNER: Final = f"{_RULE}\n             Log Messages\n{_RULE}\n"


def misc_text(keys: Iterable[tuple[str, str]], level: int, clear_on_read: bool, log: Iterable[str] | None) -> str:
    """As the driver's first read of an opened file gives it; what is beyond its buffer is lost. ``log``: None where it
    cannot be read."""
    text = "".join(f"{key:<16}{value}\n" for key, value in keys)
    if level == 1:
        text += f"{'CLEAR_ON_READ':<16}{int(clear_on_read)} (0:no, 1:yes)\n"
    elif level == 2 and log is not None:
        text += _BANNER + "".join(f"{line}\n" for line in log)
    return text.encode()[:DRIVER_BUFFER_BYTES].decode(errors="replace")


def misc_setting(data: bytes) -> tuple[str, int]:
    """Key and number of what was written. Raises OSError (EINVAL)."""
    key, _, value = data.decode(errors="replace").partition(" ")
    try:
        return key, int(value)
    except ValueError:
        raise OSError(errno.EINVAL, "no number") from None


@dataclass
class RshimView:
    """``device_name``, ``chip``: as the driver calls them. ``boot_mode``: 0 while a stream is taken, else 1."""

    device_name: str
    chip: str
    display_level: int = 0
    clear_on_read: bool = False
    boot_mode: int = 1
    boot_timeout_s: int = 300
    _ring: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """The card adds to its log; what is oldest makes room."""
        self._ring.append(line)
        while sum(len(entry) for entry in self._ring) > RING_BYTES:
            self._ring.pop(0)

    def forget_log(self) -> None:
        self._ring.clear()

    def read(self, up_s: float) -> str:
        keys = [
            ("DISPLAY_LEVEL", f"{self.display_level} (0:basic, 1:advanced, 2:log)"),
            ("BF_MODE", "DPU mode"),
            ("BOOT_MODE", f"{self.boot_mode} (0:rshim, 1:emmc, 2:emmc-boot-swap)"),
            ("BOOT_TIMEOUT", f"{self.boot_timeout_s} (seconds)"),
            ("DROP_MODE", "0 (0:normal, 1:drop)"),
            ("SW_RESET", "0 (1: reset)"),
            ("DEV_NAME", self.device_name),
            ("DEV_INFO", self.chip),
            ("OPN_STR", "N/A"),
            ("UP_TIME", f"{int(up_s)}(s)"),
            ("SECURE_NIC_MODE", "0 (0:no, 1:yes)"),
            ("FORCE_CMD", "0 (1: send Force command)"),
        ]
        text = misc_text(keys, self.display_level, self.clear_on_read, self._ring)
        if self.display_level == 2 and self.clear_on_read:
            self._ring.clear()
        return text

    def write(self, data: bytes) -> bool:
        """Whether the card is to be reset. Raises OSError (EINVAL)."""
        key, number = misc_setting(data)
        match key:
            case "DISPLAY_LEVEL":
                self.display_level = number
            case "CLEAR_ON_READ":
                self.clear_on_read = bool(number)
            case "BOOT_TIMEOUT":
                self.boot_timeout_s = number
            case "SW_RESET":
                return bool(number)
            case _:
                raise OSError(errno.EINVAL, "unknown key")
        return False
