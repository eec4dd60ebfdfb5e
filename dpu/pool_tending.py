"""What decides which chunks of a pool are written and reclaimed, and what it must be told after a restart."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from meshfusion.dpu.store.curator import Curator, WritesEverything
from meshfusion.dpu.store.learning_curator import LearningCurator
from meshfusion.dpu.store.segments import Segments
from meshfusion.jbof.policy.density_policy import DensityPolicy, PolicySettings
from meshfusion.jbof.segments import SegmentRecord

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


def unadopted(records: Iterable[SegmentRecord]) -> list[SegmentRecord]:
    """Segments whose chunks a new life of the service has to tell its curator of; the last one first."""
    return sorted((record for record in records if record.opened_seq), key=lambda record: -record.opened_seq)


def _settings(segments: Segments) -> PolicySettings:
    """How many chunks will fit is not known before there are any; memory is used as they come."""
    geometry = segments.geometry
    chunk_count = geometry.segment_count * geometry.segment_bytes // _USUAL_CHUNK_BYTES
    return PolicySettings.for_pool(min(max(chunk_count, 1), _MOST_CHUNKS))
