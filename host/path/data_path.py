"""A path of one worker: its threads, the queues between them and the engine, and the way to the medium they use."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshfusion.host.path.cpus import Cpus, use_cpus
from meshfusion.host.path.load_job import LoadJob, UnitFailure, UnitRead
from meshfusion.host.path.medium import Loader, Medium, Saver, WriteInDoubtError
from meshfusion.host.path.medium_answers import failure_of
from meshfusion.host.path.movers import Savers, each_by_the_next, made_or_why_not
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from meshfusion.host.path.spans import Span, spans_of
from meshfusion.jbof.errors import MeshFusionError

if TYPE_CHECKING:
    from meshfusion.host.path.exported_drives import ExportedDrives

logger = logging.getLogger("meshfusion.path")


@dataclass(slots=True)
class PathCounters:
    loaded_bytes: int = 0
    saved_bytes: int = 0
    mismatches: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class DataPath:
    """Moves units for one worker, of ``unit_bytes`` in ``unit_runs`` pieces of memory for each KV group. It owns
    ``medium`` from now on, a way of ``kind``.

    ``close`` ends its threads; queued saves are then reported as failed, queued loads as abandoned. ``cpus``: where
    the threads run (None: where their maker does). ``take_key``: what :meth:`take_key` does, where a target asks for
    keys.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        kind: PathKind,
        unit_bytes: Sequence[int],
        unit_runs: Sequence[int],
        lba_bytes: int,
        load_threads: int,
        cpus: Cpus | None = None,
        take_key: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._take_key = take_key
        self._medium = medium
        self.kind = kind
        self.exported: ExportedDrives | None = None  # what a target shows of the pool; set by who opened it
        self._unit_bytes = tuple(unit_bytes)
        self._unit_runs = tuple(unit_runs)
        self._lba_bytes = lba_bytes
        self._cpus = cpus
        self._spans: queue.SimpleQueue[tuple[LoadJob, Span] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[ShardWrite, ...] | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[ShardWritten] = queue.SimpleQueue()
        self._closing = threading.Event()
        self.counters = PathCounters()
        self.thread_cpus: list[Cpus] = []  # where each thread found itself, for people who look
        self._threads = [
            threading.Thread(target=self._load_loop, name=f"meshfusion-load-{i}", daemon=True)
            for i in range(load_threads)
        ]
        self._threads.append(threading.Thread(target=self._save_loop, name="meshfusion-save", daemon=True))
        self._threads_left = len(self._threads)
        self._ending = threading.Lock()
        for thread in self._threads:
            thread.start()

    def take_key(self, host_key: str) -> None:
        """Connect with this key from now on, as ``DHHC-1:`` text. Nothing that is connected ends. Raises ConfigError
        for one that is none."""
        self._take_key(host_key)

    # ---- loads ---------------------------------------------------------------------------------------------------

    def load(self, units: Sequence[UnitRead], *, abandon_after_s: float) -> LoadJob:
        """Start loading; poll the job for its result. Units of one KV group lie side by side in ``units``.

        Called by the engine's thread when the blocks are given to it.
        """
        now_s = time.monotonic()
        try:
            cleared = self._medium.produced()
            job = LoadJob(units, now_s + abandon_after_s, now_s, cleared, path=self.kind.value)
        except MeshFusionError as error:
            job = LoadJob(units, now_s + abandon_after_s, now_s)
            job.abandon(error.message)
            return job
        first = 0
        for group, members in itertools.groupby(units, key=operator.attrgetter("group")):
            lbas = [unit.lba for unit in members]
            unit_lbas = -(-self._unit_bytes[group] // self._lba_bytes)
            for span in spans_of(lbas, unit_lbas=unit_lbas, read_lbas=self._medium.read_lbas):
                self._spans.put((job, span._replace(first=first + span.first, group=group)))
            first += len(lbas)
        return job

    def _load_loop(self) -> None:
        self._settle()
        loader = made_or_why_not(self._medium.loader)
        try:
            while (part := self._spans.get()) is not None:
                if isinstance(loader, MeshFusionError):
                    loader = made_or_why_not(self._medium.loader)
                self._load_span(*part, loader)
        finally:
            if not isinstance(loader, MeshFusionError):
                loader.close()
            self._thread_ends()

    def _load_span(self, job: LoadJob, span: Span, loader: Loader | MeshFusionError) -> None:
        if self._closing.is_set():
            job.abandon("the engine is shutting down")
        if job.is_abandoned:
            return
        indexes = range(span.first, span.first + span.unit_count)
        outcomes: Sequence[UnitFailure | None]
        try:
            if isinstance(loader, MeshFusionError):
                raise loader
            outcomes = loader.load(job, span)
        except MeshFusionError as error:
            outcomes = [failure_of(index, error) for index in indexes]
        except Exception as error:  # a bug must fail the load, not the thread that later loads need
            logger.exception("loading a span failed")
            outcomes = [UnitFailure(index, False, repr(error), is_untried=True) for index in indexes]
        with self.counters.lock:
            self.counters.loaded_bytes += self._unit_bytes[span.group] * sum(outcome is None for outcome in outcomes)
            self.counters.mismatches += sum(outcome is not None and outcome.is_mismatch for outcome in outcomes)
        job.done(indexes, outcomes, descriptors=self._unit_runs[span.group] * span.unit_count)

    # ---- saves ---------------------------------------------------------------------------------------------------

    def save(self, writes: Sequence[ShardWrite]) -> None:
        """Queue a batch; the blocks must stay pinned until :meth:`take_written` reports them.

        Called by the engine's thread when it has issued the work that fills them; whether it is done is waited for
        elsewhere.
        """
        if not writes:
            return
        try:
            produced = self._medium.produced()
        except MeshFusionError as error:
            for write in writes:
                self._written.put(_failed(write, error.message))
        else:
            self._writes.put(tuple(replace(write, produced=produced) for write in writes))

    def take_written(self) -> list[ShardWritten]:
        """What has been written, and flushed, since the last call."""
        taken = []
        while not self._written.empty():
            taken.append(self._written.get())
        return taken

    def _save_loop(self) -> None:
        self._settle()
        savers = Savers(self._medium)
        try:
            while (batch := self._writes.get()) is not None:
                for result in self._save_batch(batch, savers):
                    self._written.put(result)
        finally:
            savers.close()
            self._thread_ends()

    def _save_batch(self, batch: tuple[ShardWrite, ...], savers: Savers) -> list[ShardWritten]:
        made = savers.made(len(batch))
        if isinstance(made, MeshFusionError):
            return [_failed(write, made.message) for write in batch]
        results = each_by_the_next(made, batch, self._save_one)
        try:
            for saver in made:
                saver.flush()  # rule 1: durable before anybody may commit
        except MeshFusionError as error:
            return [_not_durable(result, error.message) for result in results]
        except Exception as error:  # whatever it was, nothing of this batch is known to be durable
            logger.exception("flushing failed")
            return [_not_durable(result, repr(error)) for result in results]
        return results

    def _save_one(self, write: ShardWrite, saver: Saver) -> ShardWritten:
        if self._closing.is_set():
            return _failed(write, "the engine is shutting down")
        try:
            digests = saver.write(write)
        except WriteInDoubtError as error:
            return ShardWritten(write.save_id, None, error.message, WriteFate.UNKNOWN)
        except MeshFusionError as error:
            return _failed(write, error.message)
        except Exception as error:  # a bug must fail the save, not the thread that later saves need
            logger.exception("writing a shard failed")
            return _failed(write, repr(error))
        with self.counters.lock:
            self.counters.saved_bytes += self._unit_bytes[write.header.group] * len(digests)
        return ShardWritten(
            write.save_id, digests, descriptors=self._unit_runs[write.header.group] * len(write.block_ids)
        )

    # ---- the threads ---------------------------------------------------------------------------------------------

    def finish(self, *, deadline_s: float) -> bool:
        """As :meth:`close`, but what was asked for before still gets done, for at most ``deadline_s``."""
        self._stop_threads()
        end_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return self.close()

    def close(self, *, deadline_s: float = 5.0) -> bool:
        """Stop the threads. True when all of them ended: no transfer is in flight any more, and the medium is closed.

        Otherwise the last thread closes it when its transfer returns: a descriptor must not be reused under one.
        """
        self._closing.set()
        self._stop_threads()
        end_s = time.monotonic() + deadline_s
        self._medium.interrupt(end_s)
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _stop_threads(self) -> None:
        """Each when it comes to it."""
        self._writes.put(None)
        for _ in self._threads[:-1]:
            self._spans.put(None)

    def _settle(self) -> None:
        if self._cpus is not None:
            use_cpus(self._cpus)
        self.thread_cpus.append(frozenset(os.sched_getaffinity(0)))

    def _thread_ends(self) -> None:
        with self._ending:
            self._threads_left -= 1
            if self._threads_left == 0:
                self._medium.close()


def _failed(write: ShardWrite, reason: str) -> ShardWritten:
    return ShardWritten(write.save_id, None, reason, WriteFate.FAILED)


def _not_durable(result: ShardWritten, reason: str) -> ShardWritten:
    """Its batch could not be flushed. What is not known stays so."""
    if result.fate is not WriteFate.DURABLE:
        return result
    return ShardWritten(result.save_id, None, reason, WriteFate.FAILED)
