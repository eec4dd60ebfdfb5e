"""The local path: units move between a namespace this machine can open and device memory, through aligned staging.

Threads read with O_DIRECT into their own staging buffer, copy to the destination and digest what the destination then
holds (rule 4), many units in one pass without the GIL: a thread that needs the GIL after every unit waits for it every
time, milliseconds while the engine's own thread is busy in Python.

Staging is what makes a load abandonable: bytes that come late stay in our buffer, and memory the engine has taken back
is never written (rule 3's concern, on the host's side).
"""

from __future__ import annotations

import logging
import operator
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshfusion.dpu.api.types import Extent
from meshfusion.host.kv.layout import GroupLayout
from meshfusion.host.path.cpus import Cpus, use_cpus
from meshfusion.host.path.load_job import LoadJob, UnitFailure, UnitRead
from meshfusion.host.path.spans import Span, spans_of
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.format import ChunkHeader, encode_chunk_header
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile

logger = logging.getLogger("meshfusion.path")

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """Write one chunk's shard: its header and the units held in ``block_ids``, at ``extent``.

    ``save_id`` comes back with the outcome: the run and the chunk of it.
    """

    save_id: tuple[int, int]
    extent: Extent
    header: ChunkHeader  # without digests; they are computed here
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardWritten:
    """``unit_digests`` is None when the write failed; its fate is known either way: nothing is in flight."""

    save_id: tuple[int, int]
    unit_digests: tuple[bytes, ...] | None
    reason: str = ""


@dataclass(slots=True)
class PathCounters:
    loaded_bytes: int = 0
    saved_bytes: int = 0
    mismatches: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class StagedPath:
    """Moves units for one worker. It owns ``data`` from now on.

    ``close`` ends its threads; queued saves are then reported as failed, queued loads as abandoned.
    """

    def __init__(
        self,
        data: DataFile,
        memory: Memory,
        layout: GroupLayout,
        kernels: DigestKernels,
        *,
        lba_bytes: int,
        load_threads: int,
        read_bytes: int,
        write_bytes: int,
        cpus: Cpus | None = None,
        is_digest_right: Callable[[bytes, bytes], bool] = operator.eq,
    ) -> None:
        """``read_bytes``: staging per load thread; ``write_bytes``: of the largest shard. ``cpus``: where the
        threads run (None: where their maker does). ``is_digest_right`` exists for negative controls in tests: anything
        but equality is wrong."""
        self._data = data
        self._memory = memory
        self._layout = layout
        self._kernels = kernels
        self._lba_bytes = lba_bytes
        self._cpus = cpus
        self._is_digest_right = is_digest_right
        self._unit_lbas = -(-layout.unit_bytes // lba_bytes)
        self._read_lbas = max(self._unit_lbas, read_bytes // lba_bytes)
        self._spans: queue.SimpleQueue[tuple[LoadJob, Span] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[ShardWrite, ...] | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[ShardWritten] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._write_staging = AlignedBuffer(write_bytes, huge_pages=True)
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

    # ---- loads ---------------------------------------------------------------------------------------------------

    def load(self, units: Sequence[UnitRead], *, abandon_after_s: float) -> LoadJob:
        """Start loading; poll the job for its result."""
        now_s = time.monotonic()
        job = LoadJob(units, now_s + abandon_after_s, now_s)
        spans = spans_of([unit.lba for unit in units], unit_lbas=self._unit_lbas, read_lbas=self._read_lbas)
        for span in spans:
            self._spans.put((job, span))
        return job

    def _load_loop(self) -> None:
        staging = AlignedBuffer(self._read_lbas * self._lba_bytes, huge_pages=True)
        self._settle()
        staging.array[:] = 0  # its pages exist before the first load
        try:
            while (part := self._spans.get()) is not None:
                self._load_span(*part, staging)
        finally:
            staging.close()
            self._thread_ends()

    def _load_span(self, job: LoadJob, span: Span, staging: AlignedBuffer) -> None:
        if self._closing.is_set():
            job.abandon("the engine is shutting down")
        if job.is_abandoned:
            return
        indexes = range(span.first, span.first + span.unit_count)
        try:
            self._data.read_into(span.lba, staging.view[: span.lba_count * self._lba_bytes])
            outcomes = self._place(job, indexes, staging, span.stride_lbas * self._lba_bytes)
        except MeshFusionError as error:
            outcomes = [UnitFailure(index, False, error.message) for index in indexes]
        except Exception as error:  # a bug must fail the load, not the thread that later loads need
            logger.exception("loading a span failed")
            outcomes = [UnitFailure(index, False, repr(error)) for index in indexes]
        job.done(indexes, outcomes)

    def _place(
        self, job: LoadJob, indexes: range, staging: AlignedBuffer, stride_bytes: int
    ) -> list[UnitFailure | None]:
        """Copy the units of a span to their blocks and prove them there. One call without the GIL for all of them."""
        units = job.units[indexes.start : indexes.stop]
        run_offsets = self._layout.run_offsets_of([unit.block_id for unit in units])
        if not job.enter():
            return [None] * len(units)  # abandoned: whatever we say about them is not heard
        try:
            digests = self._kernels.scatter_and_digest_units(
                staging.array,
                0,
                stride_bytes,
                self._memory,
                run_offsets,
                self._layout.run_bytes,
            )
        finally:
            job.leave()
        outcomes = [
            None
            if self._is_digest_right(got, unit.digest)
            else UnitFailure(index, True, f"digest {got.hex()} at lba {unit.lba}, expected {unit.digest.hex()}")
            for index, unit, got in zip(indexes, units, digests, strict=True)
        ]
        with self.counters.lock:
            self.counters.loaded_bytes += self._layout.unit_bytes * outcomes.count(None)
            self.counters.mismatches += len(outcomes) - outcomes.count(None)
        return outcomes

    # ---- saves ---------------------------------------------------------------------------------------------------

    def save(self, writes: Sequence[ShardWrite]) -> None:
        """Queue a batch; the blocks must stay pinned until :meth:`take_written` reports them."""
        self._writes.put(tuple(writes))

    def take_written(self) -> list[ShardWritten]:
        """What has been written, and flushed, since the last call."""
        taken = []
        while not self._written.empty():
            taken.append(self._written.get())
        return taken

    def _settle(self) -> None:
        if self._cpus is not None:
            use_cpus(self._cpus)
        self.thread_cpus.append(frozenset(os.sched_getaffinity(0)))

    def _save_loop(self) -> None:
        self._settle()
        try:
            while (batch := self._writes.get()) is not None:
                for result in self._save_batch(batch):
                    self._written.put(result)
        finally:
            self._write_staging.close()
            self._thread_ends()

    def _save_batch(self, batch: tuple[ShardWrite, ...]) -> list[ShardWritten]:
        results = []
        for write in batch:
            if self._closing.is_set():
                results.append(ShardWritten(write.save_id, None, "the engine is shutting down"))
                continue
            try:
                results.append(ShardWritten(write.save_id, self._write_shard(write)))
            except MeshFusionError as error:
                results.append(ShardWritten(write.save_id, None, error.message))
            except Exception as error:  # a bug must fail the save, not the thread that later saves need
                logger.exception("writing a shard failed")
                results.append(ShardWritten(write.save_id, None, repr(error)))
        try:
            self._data.flush()  # rule 1: durable before anybody may commit
        except MediaError as error:
            return [ShardWritten(result.save_id, None, error.message) for result in results]
        except Exception as error:  # as above: whatever it was, nothing of this batch is known to be durable
            logger.exception("flushing failed")
            return [ShardWritten(result.save_id, None, repr(error)) for result in results]
        return results

    def _write_shard(self, write: ShardWrite) -> tuple[bytes, ...]:
        unit_bytes, lba_bytes = self._layout.unit_bytes, self._lba_bytes
        total_bytes = write.extent.lba_count * lba_bytes
        header_bytes = total_bytes - len(write.block_ids) * self._unit_lbas * lba_bytes
        digests = []
        for i, block_id in enumerate(write.block_ids):
            offset = header_bytes + i * self._unit_lbas * lba_bytes
            digest = self._kernels.gather_and_digest(
                self._memory,
                self._layout.run_offsets(block_id),
                self._layout.run_bytes,
                self._write_staging.array,
                offset,
            )
            self._write_staging.array[offset + unit_bytes : offset + self._unit_lbas * lba_bytes] = 0
            digests.append(digest)
        header = encode_chunk_header(replace(write.header, unit_digests=tuple(digests)), lba_bytes)
        assert len(header) == header_bytes, (len(header), header_bytes)
        self._write_staging.view[:header_bytes] = header
        self._data.write_from(write.extent.lba, self._write_staging.view[:total_bytes])
        with self.counters.lock:
            self.counters.saved_bytes += unit_bytes * len(digests)
        return tuple(digests)

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self, *, deadline_s: float = 5.0) -> bool:
        """Stop the threads. True when all of them ended: no transfer is in flight any more, and ``data`` is closed.

        Otherwise the last thread closes it when its transfer returns: a descriptor must not be reused under one.
        """
        self._closing.set()
        self._writes.put(None)
        for _ in self._threads[:-1]:
            self._spans.put(None)
        end_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _thread_ends(self) -> None:
        with self._ending:
            self._threads_left -= 1
            if self._threads_left == 0:
                self._data.close()
