"""What a path is asked to write, and what became of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshfusion.dpu.api.types import Extent
from meshfusion.host.memory.host_memory import ALREADY_PRODUCED
from meshfusion.host.memory.kv_memory import Produced
from meshfusion.jbof.format import ChunkHeader


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """Write one chunk's shard: its header and the units held in ``block_ids``, at ``extent``.

    ``save_id`` comes back with the outcome: the run and the chunk of it. ``produced``: when the blocks may be read; the
    path that the write is given to sets it.
    """

    save_id: tuple[int, int]
    extent: Extent
    header: ChunkHeader  # without digests; they are computed here
    block_ids: tuple[int, ...]
    produced: Produced = ALREADY_PRODUCED


class WriteFate(enum.Enum):
    """What is known of a write that is reported. The blocks that it was written from are free, whatever it is."""

    DURABLE = "durable"
    FAILED = "failed"  # nothing of it is under way
    UNKNOWN = "unknown"  # it may still land on the medium, until the target says that its writer is gone (rule 3)


@dataclass(frozen=True, slots=True)
class ShardWritten:
    """``unit_digests`` unless the write failed or its fate is unknown; ``descriptors``: pieces of KV memory, each with
    its place on the medium, that it took."""

    save_id: tuple[int, int]
    unit_digests: tuple[bytes, ...] | None
    reason: str = ""
    fate: WriteFate = WriteFate.DURABLE
    descriptors: int = 0

    def __post_init__(self) -> None:
        assert (self.unit_digests is not None) == (self.fate is WriteFate.DURABLE)
