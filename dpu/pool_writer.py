"""The pool's one writer thread: applies transactions in ticket order, grouping what has queued up into one sync.

Of a group, summaries are written first, so that the index notes only what is there; then comes the index; then headers
of opened segments, since the medium may name a generation only once the index does. Everything can be applied twice.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from meshfusion.dpu.api.types import ChunkRecord
from meshfusion.dpu.progress import Progress
from meshfusion.dpu.store.effects import Effect, OpenSegment, SummarizeSegment
from meshfusion.jbof.errors import MediaError, MeshFusionError, ServiceUnavailableError
from meshfusion.jbof.segments import SegmentRecord

logger = logging.getLogger("meshfusion.index")

_GROUP_MAX = 64


class TransactionWriter:
    """``settle(ticket, error)`` is called in ticket order, after the sync and before waiters wake."""

    def __init__(
        self, index: EffectIndex, medium: EffectMedium, settle: Callable[[int, MeshFusionError | None], None]
    ) -> None:
        self._index = index
        self._medium = medium
        self._settle = settle
        self._queue: queue.SimpleQueue[tuple[int, tuple[Effect, ...]] | None] = queue.SimpleQueue()
        self._settled = threading.Condition()
        self._last_submitted = 0
        self._last_settled = 0
        self._submitted_count = self._settled_count = 0
        self._errors: dict[int, MeshFusionError] = {}
        self._thread = threading.Thread(target=self._run, name="meshfusion-index", daemon=True)
        self._thread.start()

    def submit(self, ticket: int, effects: tuple[Effect, ...]) -> None:
        """By one thread at a time."""
        self._last_submitted = ticket
        self._submitted_count += 1
        self._queue.put((ticket, effects))

    @property
    def progress(self) -> Progress:
        """Under the lock that keeps tickets in order."""
        return Progress(self._last_submitted, self._last_settled)

    @property
    def pending_count(self) -> int:
        """Transactions that are submitted and not settled."""
        return self._submitted_count - self._settled_count

    def wait(self, ticket: int, deadline_s: float) -> None:
        """Until the transaction of ``ticket`` is settled. Raises its error, or ServiceUnavailableError past the
        deadline (its fate is then not known to the caller)."""
        with self._settled:
            if not self._settled.wait_for(lambda: self._last_settled >= ticket, timeout=deadline_s):
                raise ServiceUnavailableError(
                    f"the index transaction did not become durable within {deadline_s:.3f} s",
                    next_step="check the medium that holds the pool's index",
                )
            error = self._errors.get(ticket)
        if error is not None:
            raise error

    def close(self) -> None:
        """Settle what is queued, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._queue.get()]
            while len(batch) < _GROUP_MAX and not self._queue.empty():
                batch.append(self._queue.get())
            stopping = None in batch
            self._apply([entry for entry in batch if entry is not None])

    def _apply(self, batch: list[tuple[int, tuple[Effect, ...]]]) -> None:
        if not batch:
            return
        error = self._try_apply([effect for _, effects in batch for effect in effects])
        if error is not None and len(batch) > 1:
            for entry in batch:  # one bad transaction must not take the others with it
                self._apply([entry])
            return
        for ticket, _ in batch:
            try:
                self._settle(ticket, error)
            except Exception:  # what is durable is durable, and others wait for this thread
                logger.exception("an index transaction was carried out, and what follows from it failed")
        with self._settled:
            self._last_settled = batch[-1][0]
            self._settled_count += len(batch)
            if error is not None:
                self._errors[batch[-1][0]] = error
                for old in [t for t in self._errors if t < self._last_settled - 1024]:
                    del self._errors[old]
            self._settled.notify_all()

    def _try_apply(self, effects: list[Effect]) -> MeshFusionError | None:
        try:
            apply_effects(effects, self._index, self._medium)
        except MeshFusionError as error:
            return error
        except OSError as error:
            return MediaError(f"the index cannot be written: {error}", next_step="check its filesystem")
        except Exception as error:  # a bug must fail this transaction, not the thread that all others need
            logger.exception("an index transaction failed")
            return MediaError(f"the index transaction failed: {error!r}", next_step="report this with the log")
        return None


class EffectIndex(Protocol):
    """What is used of :class:`~meshfusion.dpu.index.Index`."""

    def chunks_in(self, record: SegmentRecord) -> list[ChunkRecord] | None: ...

    def apply(self, effects: Iterable[Effect]) -> None: ...


class EffectMedium(Protocol):
    """What is used of :class:`~meshfusion.dpu.pool_medium.PoolMedium`, or of all drives' as one."""

    def write_summaries(self, summaries: Iterable[tuple[SegmentRecord, Iterable[ChunkRecord]]]) -> None: ...

    def open_segments(self, records: Iterable[SegmentRecord]) -> None: ...


def apply_effects(effects: Sequence[Effect], index: EffectIndex, medium: EffectMedium) -> None:
    """All of it is durable when this returns. Raises what the index and the medium raise; part of it may be done then,
    and no segment that was to be opened is used."""
    due = [effect.record for effect in effects if isinstance(effect, SummarizeSegment)]
    held = [(record, index.chunks_in(record)) for record in due]
    medium.write_summaries((record, chunks) for record, chunks in held if chunks is not None)
    index.apply(effects)
    medium.open_segments(effect.record for effect in effects if isinstance(effect, OpenSegment))
