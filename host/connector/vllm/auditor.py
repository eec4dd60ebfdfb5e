"""The worker's part of the audit: stored units are loaded beside the computed ones, and compared by a thread.

They are loaded into blocks that the engine lends for it, by the path that loads take, so that the audit covers that
way too; and with their digests, so that what differs then was stored like that.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from meshfusion.host.connector.audits import BlockDrift
from meshfusion.host.connector.vllm.messages import AuditOrder, AuditReport
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.drift import U8, UnitNumbers, drift_of
from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.kv_memory import KvMemory, Produced
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, UnitRead
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.audit")

PRODUCED_S: Final = 30.0
REMEMBERED_BYTES: Final = 32 << 20
"""Computed units that are kept, the youngest, to be compared with when they are computed again."""


class Auditor:
    """Of the worker ``rank``. Called on the engine's thread, and never waits, but in :meth:`close`.

    ``numbers``: of a unit of each KV group; without them every audit is refused.
    """

    def __init__(
        self,
        memory: KvMemory,
        layouts: Sequence[GroupLayout],
        numbers: Sequence[UnitNumbers],
        *,
        form: ChunkForm,
        rank: int,
    ) -> None:
        self._memory = memory
        self._form = form
        self._rank = rank
        self._layouts = tuple(layouts)
        self._numbers = tuple(numbers)
        self._loading: tuple[AuditOrder, LoadJob, Produced] | None = None
        self._thread: threading.Thread | None = None
        self._compared: queue.SimpleQueue[AuditReport] = queue.SimpleQueue()
        self._refused: list[AuditReport] = []
        self._remembered: OrderedDict[tuple[int, bytes], U8] = OrderedDict()  # by group and stored digest
        self._remembered_bytes = 0

    def start(self, order: AuditOrder, path: DataPath | None) -> None:
        """The work that fills the computed blocks has been issued."""
        assert self._loading is None, "one audit at a time"
        if path is None or not self._numbers:
            self._refused.append(self._nothing(order, "no pool attached"))
            return
        try:
            produced = self._memory.produced()
        except MeshFusionError as error:
            self._refused.append(self._nothing(order, error.message))
            return
        units = [
            UnitRead(lbas[shard], self._layouts[group].unit_bytes, block_id, digests[shard], group)
            for shard, group, lbas, block_id, digests in zip(
                self._shards(order), order.groups, order.lbas, order.spare_block_ids, order.digests, strict=True
            )
        ]
        self._loading = (order, path.load(units, abandon_after_s=order.abandon_after_s), produced)

    def take_reports(self) -> tuple[AuditReport, ...]:
        """Of audits that have ended: nothing of theirs is read or written any more."""
        self._advance()
        reports, self._refused = self._refused, []
        while not self._compared.empty():
            reports.append(self._compared.get())
        return tuple(reports)

    def close(self, *, deadline_s: float) -> bool:
        """True: nobody uses the memory any more. What is being loaded is the path's to end."""
        if self._loading is not None:
            self._loading[1].abandon("the engine is shutting down")
        if self._thread is not None:
            self._thread.join(deadline_s)
        return self._thread is None or not self._thread.is_alive()

    def _advance(self) -> None:
        if self._loading is None:
            return
        order, job, produced = self._loading
        result = job.result(time.monotonic())
        if result is None:
            return
        self._loading = None
        if result.failures:
            self._refused.append(self._nothing(order, result.failures[0].reason))
            return
        self._thread = threading.Thread(
            target=self._compare, args=(order, produced), name="meshfusion-audit", daemon=True
        )
        self._thread.start()

    def _shards(self, order: AuditOrder) -> list[int]:
        """Of each unit the one that this rank reads."""
        return [self._form.shard_at(group, self._rank) for group in order.groups]

    def _nothing(self, order: AuditOrder, reason: str) -> AuditReport:
        return AuditReport(order.audit_id, (), 0.0, reason, self._rank)

    # ---- on the thread -------------------------------------------------------------------------------------------

    def _compare(self, order: AuditOrder, produced: Produced) -> None:
        try:
            report = self._compared_units(order, produced)
        except MeshFusionError as error:
            report = self._nothing(order, error.message)
        except Exception as error:  # a bug must cost the audit, not the blocks that are held for it
            logger.exception("an audit failed")
            report = self._nothing(order, repr(error))
        self._compared.put(report)

    def _compared_units(self, order: AuditOrder, produced: Produced) -> AuditReport:
        produced.wait(PRODUCED_S)
        unit_bytes_max = max(self._layouts[group].unit_bytes for group in order.groups)
        stride_bytes = -(-unit_bytes_max // mmap.PAGESIZE) * mmap.PAGESIZE
        staging = self._memory.staging(2 * stride_bytes)
        drifts, variation = [], 0.0
        try:
            columns = zip(
                self._shards(order), order.groups, order.block_ids, order.spare_block_ids, order.digests, strict=True
            )
            for unit, (shard, group, block_id, spare_id, digests) in enumerate(columns):
                layout = self._layouts[group]
                staging.save(0, stride_bytes, layout.run_offsets_of([block_id, spare_id]), layout.run_bytes)
                both = staging.buffer.array
                computed = both[: layout.unit_bytes]
                stored = both[stride_bytes : stride_bytes + layout.unit_bytes]
                drifts.append(BlockDrift(unit, *drift_of(computed, stored, self._numbers[group]), rank=self._rank))
                variation = max(variation, self._variation(group, digests[shard], computed))
        finally:
            staging.close()
        return AuditReport(order.audit_id, tuple(drifts), variation, rank=self._rank)

    def _variation(self, group: int, digest: bytes, computed: U8) -> float:
        """How far it is from what was computed when the same stored unit was audited before; 0: it was not."""
        former = self._remembered.pop((group, digest), None)
        if former is not None:
            self._remembered_bytes -= former.size
        self._remembered[group, digest] = np.array(computed)
        self._remembered_bytes += computed.size
        while self._remembered_bytes > REMEMBERED_BYTES:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_bytes -= oldest.size
        return 0.0 if former is None else drift_of(computed, former, self._numbers[group]).difference
