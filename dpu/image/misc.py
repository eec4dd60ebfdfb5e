"""What ``/dev/rshimN/misc`` says, and what is written to it. No I/O.

A read gives one line for each key, ``"%-16s%s"``, the value followed by an explanation in brackets; at display level
2 the card's log follows. One read of 4096 bytes or more gets all of it, a second one of the same opening nothing, and
with CLEAR_ON_READ the log is gone then for every reader. A write is ``KEY VALUE``, at offset 0, one key at a time.
Source: ``src/rshim_fuse.c`` and ``src/rshim_log.c`` of github.com/Mellanox/rshim-user-space.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

READ_BYTES: Final = 8192
"""More than the driver's buffer, so that one read gets all."""
LOG_DISPLAY_LEVEL: Final = 2

_KEY_CHARS: Final = 16
_LINE: Final = re.compile(r"^([A-Z][A-Z0-9_]*)\s+(.*)$")
_LOG_BANNER: Final = re.compile(r"^\s+Log Messages\s*$")
_DEVICE_INFO: Final = re.compile(r"^(BlueField-\d+)\(Rev (\d+)\)")
_PCI: Final = re.compile(r"pcie-(?:lf-)?(?:([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2})\.[0-7]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Misc:
    """``values``: as they stand, without explanations. ``log``: its lines, oldest first."""

    values: dict[str, str]
    log: tuple[str, ...]

    @property
    def chip_family(self) -> str:
        """``BlueField-3``; "" where the driver does not tell."""
        found = _DEVICE_INFO.match(self.values.get("DEV_INFO", ""))
        return found.group(1) if found else ""

    @property
    def part_number(self) -> str:
        """The card's, "" where it does not tell. Early boot loaders do not."""
        part_number = self.values.get("OPN_STR", "")
        return "" if part_number == "N/A" else part_number

    @property
    def mode(self) -> str:
        """``DPU mode``, ``NIC mode``, ``Unknown``, ``Reserved``; "" where the driver does not tell: BlueField-2."""
        return self.values.get("BF_MODE", "")

    @property
    def is_dropped(self) -> bool:
        """The other side owns the rshim."""
        return self.values.get("DROP_MODE") == "1"

    @property
    def is_locked(self) -> bool:
        """Secure NIC mode: the firmware keeps the host out."""
        return self.values.get("SECURE_NIC_MODE") == "1"

    @property
    def display_level(self) -> int | None:
        level = self.values.get("DISPLAY_LEVEL", "")
        return int(level) if level.isdecimal() else None

    @property
    def pci_device(self) -> str:
        """``0000:83:00``, domain, bus and device of the card in its host; "" where it is reached over USB."""
        found = _PCI.fullmatch(self.values.get("DEV_NAME", ""))
        return f"{found.group(1) or '0000'}:{found.group(2)}".lower() if found else ""


def parse_misc(text: str) -> Misc:
    """Keys that nobody has heard of are kept; what is no line of either kind is dropped."""
    values: dict[str, str] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if _LOG_BANNER.match(line):
            log = lines[number + 1 :]
            return Misc(values, tuple(entry for entry in log if entry.strip() and not entry.startswith("---")))
        if found := _LINE.match(line):
            values[found.group(1)] = _bare(found.group(1), found.group(2))
    return Misc(values, ())


def misc_command(key: str, value: int) -> bytes:
    assert key.isupper(), key
    return f"{key} {value}\n".encode()


def _bare(key: str, value: str) -> str:
    """Without the explanation, which all but names have: ``1 (0:normal, 1:drop)``, ``9628(s)``."""
    return value.strip() if key.startswith("DEV_") else value.partition("(")[0].strip()
