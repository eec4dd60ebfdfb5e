"""The card's log while it boots, installs and comes back: how far it is, and everything that went wrong. No I/O.

Lines are `` SEVERITY[MODULE]: text``. They come through a ring of 1 KiB, which other readers may empty, and which holds
what was said before as well: what counts is what arrives after it was emptied for this flash. A failure stays one,
whatever follows: after ``Installation failed`` the installer reboots, and what was there before comes up and is ready.

Sources: ``src/rshim_log.c`` and ``scripts/bfb-install`` of github.com/Mellanox/rshim-user-space, ``install.sh`` and
``common/install.env`` of github.com/Mellanox/bfb-build, ``bfup`` of github.com/Mellanox/bfscripts.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final


class Milestone(enum.IntEnum):
    """In the order in which a flash passes them; not every image has them all."""

    FIRMWARE = 1
    UEFI = 2
    OS_STARTED = 3
    BF_CFG_FOUND = 4
    INSTALLATION_STARTED = 5
    OS_INSTALLED = 6
    NIC_FIRMWARE = 7
    INSTALLATION_FINISHED = 8
    REBOOTING = 9
    LINUX_UP = 10
    READY = 11

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS: Final = {
    Milestone.FIRMWARE: "boot firmware started",
    Milestone.UEFI: "UEFI started",
    Milestone.OS_STARTED: "kernel started",
    Milestone.BF_CFG_FOUND: "installer found bf.cfg",
    Milestone.INSTALLATION_STARTED: "installation started",
    Milestone.OS_INSTALLED: "operating system installed",
    Milestone.NIC_FIRMWARE: "updating NIC firmware",
    Milestone.INSTALLATION_FINISHED: "installation finished",
    Milestone.REBOOTING: "rebooting",
    Milestone.LINUX_UP: "Linux is up",
    Milestone.READY: "the card says that it is ready",
}

_MILESTONES: Final = (
    (re.compile(r"BL2: start|PSC BL1 START", re.IGNORECASE), Milestone.FIRMWARE),
    (re.compile(r"UEFI loaded|eMMC init|PCIe enum start", re.IGNORECASE), Milestone.UEFI),
    (re.compile(r"exit Boot Service", re.IGNORECASE), Milestone.OS_STARTED),
    (re.compile(r"Found bf\.cfg"), Milestone.BF_CFG_FOUND),
    (re.compile(r"installation started", re.IGNORECASE), Milestone.INSTALLATION_STARTED),
    (re.compile(r"installation completed", re.IGNORECASE), Milestone.OS_INSTALLED),
    (re.compile(r"Updating NIC firmware"), Milestone.NIC_FIRMWARE),
    (re.compile(r"Installation finished"), Milestone.INSTALLATION_FINISHED),
    (re.compile(r"Rebooting\.\.\."), Milestone.REBOOTING),
    (re.compile(r"Linux up"), Milestone.LINUX_UP),
    (re.compile(r"DPU is ready"), Milestone.READY),
)
_FATAL: Final = (
    re.compile(r"Installation failed", re.IGNORECASE),
    re.compile(r"CRITICAL ERROR", re.IGNORECASE),
    re.compile(r"Invalid bf\.cfg", re.IGNORECASE),
    re.compile(r"^\s*(PANIC|Exception)\(", re.IGNORECASE),
    re.compile(r"Skip DPU OS installation", re.IGNORECASE),
    re.compile(r"In Enhanced NIC mode", re.IGNORECASE),
)
_POWER_CYCLE: Final = re.compile(r"Host power cycle is required|Run mlxfwreset or system-level reset", re.IGNORECASE)
_PARTIAL: Final = re.compile(r"firmware update failed|reset failed|were not found", re.IGNORECASE)
_PASSING: Final = re.compile(r"Retrying\.\.\.")
_LINE: Final = re.compile(r"^\s*([A-Z]+)\[([A-Z0-9]+)\]:\s*(.*?)\s*$")
_FAILED_SEVERITIES: Final = frozenset({"ERR", "ASSERT"})
_KEPT_LINES: Final = 200


class Verdict(enum.Enum):
    """What a line says of the flash."""

    FINE = "fine"
    PARTIAL = "partial"
    """Something of it failed; the rest goes on."""
    FATAL = "fatal"
    """The card will not run what was pushed."""


def verdict_of(line: str) -> Verdict:
    if any(pattern.search(line) for pattern in _FATAL):
        return Verdict.FATAL
    found = _LINE.match(line)
    severity = found.group(1) if found else ""
    if severity == "ASSERT":
        return Verdict.FATAL
    if (severity in _FAILED_SEVERITIES and not _PASSING.search(line)) or _PARTIAL.search(line):
        return Verdict.PARTIAL
    return Verdict.FINE


def milestone_of(line: str) -> Milestone | None:
    found = _LINE.match(line)
    text = f"{found.group(2)}: {found.group(3)}" if found else line
    return next((milestone for pattern, milestone in _MILESTONES if pattern.search(text)), None)


@dataclass(frozen=True, slots=True)
class InstallLog:
    """What was heard of one flash so far. ``lines``: the last of them.

    ``passed``: its milestones; ``fatal``, ``partial``: the lines that tell of failures, each once.
    """

    passed: frozenset[Milestone] = frozenset()
    fatal: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    wants_power_cycle: bool = False
    lines: tuple[str, ...] = ()

    @property
    def furthest(self) -> Milestone | None:
        return max(self.passed, default=None)

    def after(self, lines: Iterable[str]) -> InstallLog:
        """With ``lines`` behind those heard before.

        Once the card has said that it reboots, firmware and UEFI that start are those of the new system.
        """
        log = self
        for line in lines:
            log = log._after_line(line.strip())
        return log

    def _after_line(self, line: str) -> InstallLog:
        verdict = verdict_of(line)
        passed = self.passed
        if milestone := milestone_of(line):
            passed |= {milestone}
            if milestone is Milestone.INSTALLATION_STARTED and Milestone.BF_CFG_FOUND not in passed:
                verdict = Verdict.FATAL
                line = f"{line} (and no bf.cfg was found before)"
        return replace(
            self,
            passed=passed,
            fatal=_with(self.fatal, line) if verdict is Verdict.FATAL else self.fatal,
            partial=_with(self.partial, line) if verdict is Verdict.PARTIAL else self.partial,
            wants_power_cycle=self.wants_power_cycle or bool(_POWER_CYCLE.search(line)),
            lines=(*self.lines, line)[-_KEPT_LINES:],
        )


def new_lines(before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """Of two reads of a log that is not emptied by reading, what the second adds: what follows the longest end of
    ``before`` that ``now`` begins with, all of it where the log has begun anew."""
    for length in range(min(len(before), len(now)), 0, -1):
        if before[len(before) - length :] == now[:length]:
            return now[length:]
    return now


def _with(lines: tuple[str, ...], line: str) -> tuple[str, ...]:
    return lines if line in lines else (*lines, line)


def is_installing(lines: Iterable[str]) -> bool:
    """By ``lines``, the whole ring as it stands: has an installation begun that has not been heard to end?"""
    is_running = False
    for line in lines:
        milestone = milestone_of(line)
        if milestone is not None and Milestone.BF_CFG_FOUND <= milestone <= Milestone.INSTALLATION_FINISHED:
            is_running = True  # when it says that it has finished, it may reset the NIC next
        elif verdict_of(line) is Verdict.FATAL or (milestone or 0) >= Milestone.REBOOTING:
            is_running = False
        elif milestone is Milestone.FIRMWARE:
            is_running = False  # it was reset since
    return is_running
