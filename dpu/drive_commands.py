"""How the service's own commands to a pool's drives do, as its writer tells from its threads: not under the mutex."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from meshfusion.dpu.drive_answers import HangingDriveError
from meshfusion.dpu.drive_look import fault_of
from meshfusion.jbof.drives.life_words import CommandFailed, State, Written
from meshfusion.jbof.errors import MediaError

if TYPE_CHECKING:
    from meshfusion.dpu.running_drives import RunningDrives

logger = logging.getLogger("meshfusion.drives")

NO_ANSWER: Final = "it does not answer"


class OwnCommands:
    """``mutex``: the pool's."""

    def __init__(self, drives: RunningDrives, mutex: threading.Lock, clock: Callable[[], float]) -> None:
        self._drives, self._mutex, self._clock = drives, mutex, clock
        self._moved_away = False

    def take_moved_away(self) -> bool:
        """Has a command failed on a drive since the last call, while others take what would have gone there? Under the
        mutex."""
        moved, self._moved_away = self._moved_away, False
        return moved

    def failed(self, number: int, error: MediaError) -> None:
        """On the writer's thread."""
        drives = self._drives
        with self._mutex:
            if number not in drives.lives.numbers:
                return
            if isinstance(error, HangingDriveError) and not error.is_news:
                drives.apply()  # nothing was asked of it: it has failed once
            else:
                problem = NO_ANSWER if isinstance(error, HangingDriveError) else error.message
                drives.saw(self._clock(), number, CommandFailed(fault_of(error)), problem)
            others = (other for other in drives.shelf.numbers if other != number)
            self._moved_away |= any(drives.lives.use(other).takes_segments for other in others)

    def worked(self, number: int) -> None:
        """After one that failed."""
        with self._mutex:
            if number in self._drives.lives.numbers:
                self._drives.saw(self._clock(), number, Written())

    def answers_again(self, number: int) -> None:
        """On a thread of its own."""
        logger.warning("drive %d answers again", number)
        drives = self._drives
        with self._mutex:
            if number not in drives.lives.numbers:
                return
            if drives.lives.news(number).state is State.ONLINE:
                drives.problems.end(number)
            drives.apply()
