"""One load under way, and the one promise that matters: after it is abandoned, nobody writes its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class UnitRead(NamedTuple):
    """Bring ``unit_bytes`` at ``lba`` into device block ``block_id`` and prove them by ``digest``."""

    lba: int
    unit_bytes: int
    block_id: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class UnitFailure:
    """``index`` of the unit in its job; ``is_mismatch``: the medium answered, with other bytes."""

    index: int
    is_mismatch: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LoadResult:
    load_bytes: int
    seconds: float
    failures: tuple[UnitFailure, ...]


class LoadJob:
    """One load under way. Device memory is written only between ``enter`` and ``leave``, never after abandoning."""

    def __init__(self, units: Sequence[UnitRead], deadline_s: float, now_s: float) -> None:
        self.units = tuple(units)
        self.deadline_s = deadline_s
        self._started_s = now_s
        self._finished_s = now_s
        self._state = threading.Condition()
        self._open = set(range(len(self.units)))
        self._writing = 0
        self._abandoned = False
        self._failures: list[UnitFailure] = []

    def result(self, now_s: float) -> LoadResult | None:
        """The outcome, or None while it runs. Past its deadline the load is abandoned: what is missing has failed."""
        with self._state:
            if self._open and now_s >= self.deadline_s:
                self._abandon("abandoned: it ran over its time")
            if self._open:
                return None
            total = sum(unit.unit_bytes for unit in self.units)
            return LoadResult(total, self._finished_s - self._started_s, tuple(self._failures))

    def abandon(self, reason: str) -> None:
        """After this returns, no thread writes the job's memory any more."""
        with self._state:
            self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        self._abandoned = True
        # A copy under way takes milliseconds and is waited for; a read under way is not: its bytes stay in staging.
        self._state.wait_for(lambda: self._writing == 0)
        for index in sorted(self._open):
            self._failures.append(UnitFailure(index, False, reason))
        self._open.clear()

    @property
    def is_abandoned(self) -> bool:
        return self._abandoned

    def enter(self) -> bool:
        """Called by a path's thread before it writes device memory; False: it may not any more."""
        with self._state:
            if self._abandoned:
                return False
            self._writing += 1
            return True

    def leave(self) -> None:
        """The write that ``enter`` allowed is over."""
        with self._state:
            self._writing -= 1
            self._state.notify_all()

    def done(self, indexes: range, outcomes: Sequence[UnitFailure | None]) -> None:
        """The outcomes of some units; ignored when the load was abandoned before."""
        with self._state:
            if not self._open:
                return
            for index, failure in zip(indexes, outcomes, strict=True):
                if index in self._open:
                    self._open.discard(index)
                    if failure is not None:
                        self._failures.append(failure)
            if not self._open:
                self._finished_s = time.monotonic()
