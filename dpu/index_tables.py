"""The tables of the index in LMDB, and how their keys are made."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import lmdb

from meshfusion.dpu.api.types import Extent
from meshfusion.jbof.segments import SegmentRecord

META_VERSION: Final = b"index_version"
META_POOL: Final = b"pool_uuid"
META_PAYLOAD: Final = b"payload_bytes"
META_EPOCH: Final = b"epoch"
META_BUDGET: Final = b"budget_left_bytes/"  # and the drive's number
POSITION: Final = struct.Struct(">IQ")  # segment, lba: big-endian so that keys sort by position


@dataclass(frozen=True, slots=True)
class Tables:
    """``chunks``: by their keys; ``positions``: of shards, each with its chunk's key; ``segments``: by their numbers;
    ``holders``: by their ids."""

    meta: Any
    chunks: Any
    positions: Any
    segments: Any
    holders: Any

    @classmethod
    def of(cls, env: lmdb.Environment, *, create: bool = False) -> Tables:
        """Raises :class:`lmdb.Error`, also where one is missing and is not to be made."""
        names = (b"meta", b"chunks", b"positions", b"segments", b"holders")
        return cls(*(env.open_db(name, create=create) for name in names))


def position_key(extent: Extent) -> bytes:
    return POSITION.pack(extent.segment, extent.lba)


def segment_key(record: SegmentRecord) -> bytes:
    return record.segment.to_bytes(4, "big")
