"""What decides which chunks of a pool are written and reclaimed, and what it must be told after a restart."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from typing import Final

from meshfusion.dpu.index import Index
from meshfusion.dpu.store.curator import Curator, WritesEverything
from meshfusion.dpu.store.learning_curator import LearningCurator
from meshfusion.dpu.store.segments import Segments
from meshfusion.dpu.store.store import Store
from meshfusion.jbof.policy.density_policy import DensityPolicy, PolicySettings
from meshfusion.jbof.pool_addresses import drive_of_segment
from meshfusion.jbof.segments import SegmentRecord
from meshfusion.jbof.shelf import Shelf

_USUAL_CHUNK_BYTES: Final = 1 << 20
_MOST_CHUNKS: Final = 1 << 23
"""More are remembered for a shorter time: 160 MiB for each KV group is the most that is taken."""


ADOPTED_CHUNKS: Final = 4096
"""That the curator is told of in a second, of those that were there before: some hundredths of a second's work."""


class Policy(enum.Enum):
    """docs/medium-policies.md"""

    LEARNED = "learned"  # by uses that are expected for the room and the write
    EVERYTHING = "everything"  # all is written, and what was used longest ago goes first


def make_curator(policy: Policy, segments: Segments) -> Curator:
    match policy:
        case Policy.LEARNED:
            return LearningCurator(DensityPolicy(_settings(segments)), segments)
        case Policy.EVERYTHING:
            return WritesEverything()


class Adoption:
    """Segments whose chunks a new life of the service has to tell its curator of, some at a time; those that were
    opened first come first. Those of a drive that is away wait for it. ``mutex``: the pool's."""

    def __init__(
        self, records: Iterable[SegmentRecord], store: Store, shelf: Shelf, index: Index, mutex: threading.Lock
    ) -> None:
        self._store, self._shelf, self._index, self._mutex = store, shelf, index, mutex
        opened = (record for record in records if record.opened_seq)
        self._left = sorted(opened, key=lambda record: -record.opened_seq)
        self._waiting: dict[int, list[SegmentRecord]] = {}  # by the number of their drive

    def go_on(self, now_s: float) -> None:
        """About :data:`ADOPTED_CHUNKS` more. Lookups come in between: not under the mutex."""
        with self._mutex:
            back = [number for number in self._waiting if self._shelf.is_offered(number)]
        for number in back:
            self._left += self._waiting.pop(number)
        adopted = 0
        while self._left and adopted < ADOPTED_CHUNKS:
            record = self._left.pop()
            chunks = self._index.chunks_in(record) or ()
            adopted += len(chunks) + ADOPTED_CHUNKS // 64  # an empty one takes its time, too
            number = drive_of_segment(record.segment)
            with self._mutex:
                is_here = self._shelf.is_offered(number)
                if is_here:
                    self._store.adopt(now_s, record, chunks)
            if not is_here:
                self._waiting.setdefault(number, []).append(record)


def _settings(segments: Segments) -> PolicySettings:
    """How many chunks will fit is not known before there are any; memory is used as they come."""
    geometry = segments.geometry
    chunk_count = geometry.segment_count * geometry.segment_bytes // _USUAL_CHUNK_BYTES
    return PolicySettings.for_pool(min(max(chunk_count, 1), _MOST_CHUNKS))
