"""Steps of a served pool's store, made durable in order, and what follows when they are or cannot be."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from meshfusion.dpu.index import Index
from meshfusion.dpu.pool_medium import ShelfMedium
from meshfusion.dpu.pool_writer import TransactionWriter
from meshfusion.dpu.progress import Progress
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.store.store import Store
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.pool")

Reply = TypeVar("Reply")


class Transactions:
    """``mutex``: the pool's. ``take_moved_away``: has a drive failed, and others take what would have gone there?"""

    def __init__(
        self,
        store: Store,
        index: Index,
        medium: ShelfMedium,
        *,
        mutex: threading.Lock,
        clock: Callable[[], float],
        take_moved_away: Callable[[], bool],
    ) -> None:
        self._store, self._mutex, self._clock, self._take_moved_away = store, mutex, clock, take_moved_away
        self._then: dict[int, Callable[[], None]] = {}  # by ticket
        self._writer = TransactionWriter(index, medium, self._settle)

    @property
    def pending_count(self) -> int:
        """Submitted, and not known to be durable or to have failed yet."""
        return self._writer.pending_count

    def submit(self, step: Step[object], then: Callable[[], None] | None = None) -> None:
        """Under the mutex, so that tickets reach the writer in order. ``then``: to be done, under the mutex too, when
        it is durable."""
        if step.effects:
            if then is not None:
                self._then[step.ticket] = then
            self._writer.submit(step.ticket, step.effects)

    def wait(self, step: Step[Reply], deadline_s: float) -> Reply:
        """The reply, once everything it stands on is durable. Raises as
        :meth:`~meshfusion.dpu.pool_writer.TransactionWriter.wait`."""
        for ticket in (step.ticket, step.after):  # the later one first: the second wait then returns at once
            if ticket:
                self._writer.wait(ticket, deadline_s)
        return step.reply

    @property
    def progress(self) -> Progress:
        """Under the mutex."""
        return self._writer.progress

    def close(self) -> None:
        """What was submitted is settled when this returns."""
        self._writer.close()

    def _settle(self, ticket: int, error: MeshFusionError | None) -> None:
        """Called by the writer, in ticket order, before waiters are woken."""
        with self._mutex:
            then = self._then.pop(ticket, None)
            if error is None:
                self._store.durable(ticket)
                if then is not None:
                    then()
            else:
                self._store.failed(self._clock(), ticket, f"{error.message}; {error.next_step}")
                pauses = not self._take_moved_away()
                if not pauses:
                    self._store.saves_go_elsewhere()
        if error is not None:
            logger.error("index transaction failed, saves %s: %s", "pause" if pauses else "go elsewhere", error)
