"""What people are told of the drives of a pool that is served: in its log, and as what is wrong with each."""

from __future__ import annotations

import logging

from meshfusion.jbof.drives.life_words import Alarm, State
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.drives")


class DriveProblems:
    """By the drives' numbers. Under the pool's mutex; no I/O but the log."""

    def __init__(self) -> None:
        self.alarm_count = 0
        self._problems: dict[int, str] = {}
        self._refusals: dict[int, str] = {}  # why the last check of a drive that is back failed, as it was told

    def of(self, number: int) -> str:
        """What was found wrong last; empty: nothing since it was last well, or back."""
        return self._problems.get(number, "")

    def found(self, number: int, problem: str) -> None:
        self._problems[number] = problem

    def end(self, number: int) -> None:
        """What was wrong is so no more."""
        self._problems.pop(number, None)

    def tell(self, number: int, alarm: Alarm) -> None:
        self.alarm_count += 1
        if alarm.state is State.ONLINE:
            self.end(number)
        why = "; ".join(sorted(reason.value for reason in alarm.reasons)) or "all is well again"
        is_asked_for = alarm.state in (State.ONLINE, State.DRAINING, State.DRAINED)
        problem = self.of(number)
        logger.log(
            logging.INFO if is_asked_for else logging.ERROR,
            "drive %d is %s: %s%s",
            *(number, alarm.state.value, why, problem and f" ({problem})"),
        )

    def refused(self, number: int, error: MeshFusionError, *, is_told: bool) -> None:
        """A drive that is back was not taken, for this: told once, though it is tried again and again. ``is_told``: an
        alarm has just told of it."""
        if not is_told and self._refusals.get(number) != error.message:
            logger.error("drive %d is still not used: %s", number, error)
        self._refusals[number] = error.message

    def left(self, number: int) -> None:
        """It is none of the pool's any more."""
        self._problems.pop(number, None)
        self._refusals.pop(number, None)
