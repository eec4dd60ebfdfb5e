"""The thread that keeps segments free ahead of need: see :mod:`~meshfusion.dpu.store.tidying` for the steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from meshfusion.dpu.api.types import ChunkRecord
from meshfusion.dpu.chunk_mover import ChunkMover, MovingMedium
from meshfusion.dpu.index import Index
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.store.store import Store
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.tidying")

INTERVAL_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
"""After a failure the next attempt comes later, up to this: what fails, such as a full disk, fails for long."""
DURABLE_S: Final = 60.0


class Wait(Protocol):
    def __call__(self, step: Step[object], deadline_s: float) -> object: ...


class Tidier:
    """``submit`` and ``wait``: the pool's, of a step's effects; ``submit`` under ``mutex``. ``drives``: those that are
    here, by namespace."""

    def __init__(
        self,
        store: Store,
        index: Index,
        mover: ChunkMover,
        *,
        drives: Callable[[], Mapping[int, MovingMedium]],
        mutex: threading.Lock,
        submit: Callable[[Step[object]], None],
        wait: Wait,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._index, self._mover = store, index, mover
        self._drives, self._mutex = drives, mutex
        self._submit, self._wait, self._clock = submit, wait, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshfusion-tidy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        """After the segment that it is at. False: it is still at that."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = INTERVAL_S
        while not self._stop.wait(pause_s):
            pause_s = INTERVAL_S if self._tidy_all() else min(2 * pause_s, RETRY_MAX_S)

    def _tidy_all(self) -> bool:
        """As much as there is to do. False: one was not given up."""
        try:
            while not self._stop.is_set() and self.tidy_one():
                pass
        except MeshFusionError as error:
            logger.warning("a segment was not given up: %s", error)
            return False
        except Exception:  # a bug over one segment must not end what keeps others free
            logger.exception("a segment was not given up")
            return False
        return True

    def tidy_one(self) -> bool:
        """Give one segment up; False when enough are free, or none can be. Raises what the medium raises, and then the
        segment stays what it was."""
        with self._mutex:
            record = self._store.begin_tidying(self._clock())
        if record is None:
            return False
        try:
            self._move(self._index.chunks_in(record) or [])
        except BaseException:
            with self._mutex:
                self._store.leave_as_is()
            raise
        with self._mutex:
            step = self._store.give_up()
            self._submit(step)
        self._wait(step, DURABLE_S)
        return bool(step.effects)

    def _move(self, chunks: list[ChunkRecord]) -> None:
        """Those that are worth it. Whatever happens, the store is told of every one that it planned."""
        written: frozenset[bytes] = frozenset()
        try:
            with self._mutex:
                plan = self._store.plan_moves(self._clock(), chunks)
                self._submit(plan)
            self._wait(plan, DURABLE_S)
            written = self._mover.carry_out(plan.reply, self._drives())
        finally:
            with self._mutex:
                step = self._store.moved(written)
                self._submit(step)
        self._wait(step, DURABLE_S)
