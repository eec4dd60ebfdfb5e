"""Which drives of a pool its target shows to hosts, and which it has yet to take out. No I/O.

A drive is *shown*, or it is *outgoing* until the target has confirmed that nobody reaches it any more, or it is *out*.
It is never shown again before it was out: what the target has open may be the drive as it was, before it went and came
back. One that leaves the pool is somebody else's only when it is out (rule 3). The durable list of the pool's drives is
all that this begins with: a drive that is not here may still be shown from an earlier life of the service, so that it
is outgoing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DrivesNow:
    """By the drives' numbers, where each is. ``outgoing``: None where it was never here."""

    shown: Mapping[int, Path]
    outgoing: Mapping[int, Path | None]


class _Stage(enum.Enum):
    SHOWN = enum.auto()
    OUTGOING = enum.auto()
    OUT = enum.auto()


@dataclass(slots=True)
class _Drive:
    """``place``: where it is shown, or was; ``wanted``: where it shall be, None for nowhere."""

    stage: _Stage
    place: Path | None
    wanted: Path | None


class DriveShowing:
    def __init__(self) -> None:
        self._drives: dict[int, _Drive] = {}

    def begin(self, number: int, place: Path | None) -> None:
        """A drive of the pool, at the start of its service. ``place``: None where it is not here."""
        self._drives[number] = _Drive(_Stage.OUTGOING if place is None else _Stage.SHOWN, place, place)

    def stand(self, number: int, wanted: Path | None) -> None:
        """Where the drive shall be shown from now on; None for nowhere. One that was not known is taken out first."""
        drive = self._drives.setdefault(number, _Drive(_Stage.OUTGOING, None, None))
        drive.wanted = wanted
        if drive.stage is _Stage.SHOWN and wanted != drive.place:
            drive.stage = _Stage.OUTGOING
        elif drive.stage is _Stage.OUT and wanted is not None:
            drive.stage, drive.place = _Stage.SHOWN, wanted

    def taken_out(self, number: int) -> bool:
        """The target has confirmed it of one that was outgoing at :meth:`now`. Is it shown again from here on?"""
        drive = self._drives.get(number)
        if drive is None or drive.stage is not _Stage.OUTGOING:
            return False
        drive.stage = _Stage.OUT
        self.stand(number, drive.wanted)
        return self.is_shown(number)

    def end(self, number: int) -> None:
        """It has left the pool."""
        self._drives.pop(number, None)

    def now(self) -> DrivesNow:
        """What the target is to be told, all of one moment."""
        drives = self._drives.items()
        shown = {number: drive.place for number, drive in drives if drive.stage is _Stage.SHOWN and drive.place}
        return DrivesNow(shown, {number: drive.place for number, drive in drives if drive.stage is _Stage.OUTGOING})

    def is_shown(self, number: int) -> bool:
        return number in self._drives and self._drives[number].stage is _Stage.SHOWN

    def is_out(self, number: int) -> bool:
        """Does nobody reach it through the target?"""
        return number not in self._drives or self._drives[number].stage is _Stage.OUT
