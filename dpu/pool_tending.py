"""What decides which chunks of a pool are written and reclaimed, and what it must be told after a restart."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from meshfusion.dpu.store.curator import Curator, LearningCurator, WritesEverything
from meshfusion.dpu.store.segments import Segments
from meshfusion.jbof.policy.density_policy import DensityPolicy
from meshfusion.jbof.segments import SegmentRecord


class Policy(enum.Enum):
    """docs/medium-policies.md"""

    LEARNED = "learned"  # by uses that are expected for the room and the write
    EVERYTHING = "everything"  # all is written, and what was used longest ago goes first


def make_curator(policy: Policy, segments: Segments) -> Curator:
    match policy:
        case Policy.LEARNED:
            return LearningCurator(DensityPolicy(), segments)
        case Policy.EVERYTHING:
            return WritesEverything()


def unadopted(records: Iterable[SegmentRecord]) -> list[SegmentRecord]:
    """Segments whose chunks a new life of the service has to tell its curator of; the last one first."""
    return sorted((record for record in records if record.opened_seq), key=lambda record: -record.opened_seq)
