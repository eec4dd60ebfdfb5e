"""What the store asks its surroundings to do. Effects of one step form one atomic, durable transaction of the index.

Two of them also ask for something on the medium, and its place in the order is part of them: see :class:`OpenSegment`
and :class:`SummarizeSegment`. A step is durable when all of it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.dpu.api.types import Access, ChunkRecord, Extent
from meshfusion.jbof.segments import SegmentRecord


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """A worker incarnation the service has admitted. ``fenced``: never to be readmitted (rule 3).

    ``exported_as``: which target lets it reach the data, and under which NQNs, since only that one can tell when it is
    gone (:attr:`~meshfusion.dpu.export.plan.ExportPlan.name`); empty with local access.
    """

    holder_id: str
    engine_kind: str
    engine_version: str
    host: str
    pid: int
    identity: bytes
    fenced: bool = False
    access: Access = Access.LOCAL
    exported_as: str = ""


@dataclass(frozen=True, slots=True)
class PutChunk:
    record: ChunkRecord


@dataclass(frozen=True, slots=True)
class DeleteChunk:
    """Forget ``key`` if its record still lies at ``extent``."""

    key: bytes
    extent: Extent


@dataclass(frozen=True, slots=True)
class MoveChunk:
    """The chunk lies elsewhere now, if the index still has it as ``before`` says."""

    before: ChunkRecord
    after: ChunkRecord


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """Forget every chunk that has a shard in this segment, and make the record durable (rule 2): in the index, and
    then as the segment's header on the medium. Then all behind the header is deallocated.

    The header is first: while old blocks can be gone in part, the medium says already that none of them counts.
    """

    record: SegmentRecord


@dataclass(frozen=True, slots=True)
class SummarizeSegment:
    """Make the summary of this segment durable, of the chunks that the index has in it; then note that in the index.

    Nothing to do when the segment has been opened anew: the index then has another generation.
    """

    record: SegmentRecord


@dataclass(frozen=True, slots=True)
class NoteBudget:
    """So much may still be written to this drive: a restart must not begin with more."""

    drive_number: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class PutHolder:
    record: HolderRecord


@dataclass(frozen=True, slots=True)
class DeleteHolder:
    holder_id: str


Effect = PutChunk | DeleteChunk | MoveChunk | OpenSegment | SummarizeSegment | NoteBudget | PutHolder | DeleteHolder
