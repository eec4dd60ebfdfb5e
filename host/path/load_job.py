"""One load under way, and the one promise that matters: once its outcome is told, nobody writes its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.host.memory.host_memory import ALREADY_PRODUCED
from meshfusion.host.memory.kv_memory import Produced


class UnitRead(NamedTuple):
    """Bring ``unit_bytes`` at ``lba``, a pool LBA (:mod:`meshfusion.jbof.pool_addresses`), into device block
    ``block_id`` of a KV group and prove them by ``digest``."""

    lba: int
    unit_bytes: int
    block_id: int
    digest: bytes
    group: int = 0


@dataclass(frozen=True, slots=True)
class UnitFailure:
    """``index`` of the unit in its job; ``is_mismatch``: the medium answered, with other bytes; ``is_untried``: it was
    given up, or broke on the way, before the medium answered, which says nothing of what lies there."""

    index: int
    is_mismatch: bool
    reason: str
    is_untried: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """``descriptors``: how many it took on ``path``, pieces of KV memory with their place on the medium."""

    load_bytes: int
    seconds: float
    failures: tuple[UnitFailure, ...]
    path: str = ""
    descriptors: int = 0


class LoadJob:
    """One load under way. Device memory is written only between ``enter`` and ``leave``.

    While anybody is in there, the outcome is not told, whatever was abandoned and whatever time has passed: whoever
    has the outcome may give the memory to others. ``cleared``, to be waited for before ``enter``: the engine's work
    with what the blocks held before has been done.
    """

    def __init__(
        self,
        units: Sequence[UnitRead],
        deadline_s: float,
        now_s: float,
        cleared: Produced = ALREADY_PRODUCED,
        *,
        path: str = "",
    ) -> None:
        self.units = tuple(units)
        self.deadline_s = deadline_s
        self.cleared = cleared
        self._started_s = now_s
        self._finished_s = now_s
        self._lock = threading.Lock()
        self._open = set(range(len(self.units)))
        self._writing = 0
        self._abandoned_why = ""
        self._failures: list[UnitFailure] = []
        self._path = path
        self._descriptors = 0

    def result(self, now_s: float) -> LoadResult | None:
        """The outcome, or None while it runs or may still write. Never waits.

        Past its deadline the load is abandoned: what is missing then has failed.
        """
        with self._lock:
            if self._open and now_s >= self.deadline_s:
                self._abandon("abandoned: it ran over its time")
            if self._writing:
                return None
            if self._abandoned_why:
                self._fail_open_units()
            if self._open:
                return None
            total = sum(unit.unit_bytes for unit in self.units)
            seconds = self._finished_s - self._started_s
            return LoadResult(total, seconds, tuple(self._failures), self._path, self._descriptors)

    def abandon(self, reason: str) -> None:
        """No more writing begins from here on; what is being written ends before the outcome is told."""
        with self._lock:
            self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        self._abandoned_why = self._abandoned_why or reason

    def _fail_open_units(self) -> None:
        self._failures += [UnitFailure(index, False, self._abandoned_why, True) for index in sorted(self._open)]
        self._open.clear()

    @property
    def is_abandoned(self) -> bool:
        return bool(self._abandoned_why)

    def enter(self) -> bool:
        """Called by a path's thread before it writes device memory, or lets it be written; False: it may not."""
        with self._lock:
            if self._abandoned_why or not self._open:
                return False
            self._writing += 1
            return True

    def leave(self) -> None:
        """The write that ``enter`` allowed is over: nobody can reach the memory through it any more."""
        with self._lock:
            assert self._writing > 0
            self._writing -= 1

    def refused(self, first: int, unit_count: int) -> list[UnitFailure]:
        """The outcomes of units whose writing :meth:`enter` did not allow. They are no less failed than those nobody
        came to: others that were let in before may still be writing theirs, and then these here are heard."""
        reason = self._abandoned_why or "its outcome was told"
        return [UnitFailure(first + i, False, reason, True) for i in range(unit_count)]

    def done(self, indexes: range, outcomes: Sequence[UnitFailure | None], *, descriptors: int = 0) -> None:
        """The outcomes of some units, and what they took; ignored once the load's outcome was told."""
        with self._lock:
            if not self._open:
                return
            self._descriptors += descriptors
            for index, failure in zip(indexes, outcomes, strict=True):
                if index in self._open:
                    self._open.discard(index)
                    if failure is not None:
                        self._failures.append(failure)
            if not self._open:
                self._finished_s = time.monotonic()
