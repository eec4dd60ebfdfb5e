"""A worker's saves: its shards of granted chunks, written under the incarnation that they are granted to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.types import Attachment
from meshfusion.host.connector.vllm.messages import RunWritten, SaveOrder
from meshfusion.host.connector.vllm.path_slot import PathSlot, is_reached_alike
from meshfusion.host.connector.vllm.run_writes import RunWrites
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.path.shards import ShardWrite
from meshfusion.jbof.errors import MeshFusionError


class WorkerSaves:
    """Of the worker ``rank``, over the path in ``slot``. Each order is reported once."""

    def __init__(self, slot: PathSlot, form: ChunkForm, rank: int) -> None:
        self._slot = slot
        self._form = form
        self._rank = rank
        self._liveness: int | None = None  # held only while something is written: an idle engine holds up nobody
        self._runs: dict[int, RunWrites] = {}  # being written, by run id
        self._waiting: list[SaveOrder] = []
        self._next: Attachment | None = None  # the attachment told last
        self._written: list[RunWritten] = []

    @property
    def is_writing(self) -> bool:
        return bool(self._runs)

    def told(self, attachment: Attachment) -> None:
        """Orders for this incarnation may come from now on, also while a former one is writing, or this one over a
        path that does not reach all drives."""
        self._next = attachment

    def start(self, orders: Iterable[SaveOrder]) -> None:
        """The blocks that hold the chunks are final."""
        writes: list[ShardWrite] = []
        for order in orders:
            run = RunWrites(order, self._form, self._rank)
            if run.is_empty:
                self._written.append(run.not_begun())
                continue
            if self._must_wait(order.granted.holder_id):
                self._waiting.append(order)
                continue
            refusal = self._refuse(order)
            if refusal:
                self._written.append(run.not_begun(refusal))
            else:
                self._runs[order.run_id] = run
                writes += run.shard_writes(self._pool_uuid())
        if writes:
            assert self._slot.path is not None
            self._slot.path.save(writes)

    def start_waiting(self) -> None:
        """What waited for a path, or for the end of a former incarnation's writes: it may be decided now."""
        waiting, self._waiting = self._waiting, []
        self.start(waiting)

    def take_reports(self) -> tuple[RunWritten, ...]:
        """What has been written since the last call."""
        path = self._slot.path
        if path is not None:
            for shard in path.take_written():
                run_id, _ = shard.save_id
                report = self._runs[run_id].written(shard, path.kind.value)
                if report is not None:
                    del self._runs[run_id]
                    self._written.append(report)
            if not self._runs:
                self.let_go()
        written, self._written = tuple(self._written), []
        return written

    def let_go(self) -> None:
        """Nothing of ours is in flight any more: our space may become others'."""
        if self._liveness is not None:
            os.close(self._liveness)
            self._liveness = None

    # ---- inside --------------------------------------------------------------------------------------------------

    def _pool_uuid(self) -> bytes:
        assert self._slot.attachment is not None
        return bytes.fromhex(self._slot.attachment.pool_uuid.replace("-", ""))

    def _must_wait(self, holder_id: str) -> bool:
        """Is the path of this incarnation being opened, or about to be, when the former one has written?"""
        attachment, told = self._slot.attachment, self._next
        is_next = (
            attachment is not None
            and told is not None
            and holder_id == told.holder_id
            and (attachment.holder_id != holder_id or not is_reached_alike(attachment, told))
        )
        return holder_id == self._slot.opening_holder_id or (is_next and bool(self._runs))

    def _refuse(self, order: SaveOrder) -> str:
        attachment = self._slot.attachment
        if attachment is None:
            return "no pool attached"
        if self._slot.opening_holder_id:
            return "another incarnation of this worker is about to take over"
        if order.granted.holder_id != attachment.holder_id:
            return "granted to another incarnation of this worker"
        return self._hold(attachment)

    def _hold(self, attachment: Attachment) -> str:
        """With local access, hold the liveness lock before the first write: while it is held, our space is nobody
        else's (rule 3). A target knows by itself who writes."""
        if self._liveness is None and attachment.liveness_path:
            try:
                self._liveness = hold_liveness(Path(attachment.liveness_path))
            except MeshFusionError as error:
                return error.message
        return ""
