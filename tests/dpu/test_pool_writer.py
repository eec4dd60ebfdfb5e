"""The one writer thread: what it tells of what is not durable yet."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from meshfusion.dpu.api.types import ChunkRecord
from meshfusion.dpu.pool_writer import TransactionWriter
from meshfusion.dpu.store.effects import Effect, NoteBudget
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.segments import SegmentRecord


class Index:
    """Waits while ``hold`` is clear, and refuses budgets of drive 9."""

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.begun = threading.Event()

    def chunks_in(self, record: SegmentRecord) -> list[ChunkRecord] | None:
        return None

    def apply(self, effects: Iterable[Effect]) -> None:
        self.begun.set()
        assert self.hold.wait(20.0)
        if any(isinstance(effect, NoteBudget) and effect.drive_number == 9 for effect in effects):
            raise MediaError("full", next_step="make room")


class Medium:
    def write_summaries(self, summaries: object) -> None: ...

    def open_segments(self, records: object) -> None: ...


def test_what_is_submitted_is_pending_until_it_is_durable_or_has_failed() -> None:
    index = Index()
    writer = TransactionWriter(index, Medium(), lambda ticket, error: None)
    assert writer.pending_count == 0
    writer.submit(1, (NoteBudget(0, 1),))
    assert index.begun.wait(20.0)
    for ticket in (2, 3, 4):
        writer.submit(ticket, (NoteBudget(9 if ticket == 3 else 0, 1),))
    assert writer.pending_count == 4
    index.hold.set()
    writer.close()
    assert writer.pending_count == 0
