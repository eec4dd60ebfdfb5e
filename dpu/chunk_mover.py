"""Chunks are written again in another place of their pool: read, proven, given a header for the new place, flushed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from meshfusion.dpu.api.types import Shard
from meshfusion.dpu.pool_inspect import ChunkChecker
from meshfusion.dpu.store.tidying import Move
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.format import decode_chunk_header, encode_chunk_header
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.pool_addresses import pool_lba

logger = logging.getLogger("meshfusion.tidying")


class MovingMedium(Protocol):
    """What is used of :class:`~meshfusion.dpu.pool_medium.FileMedium`."""

    def read_into(self, lba: int, buffer: memoryview) -> None: ...

    def write_from(self, lba: int, buffer: memoryview) -> None: ...

    def flush(self) -> None: ...


class ChunkMover:
    """``label``: of any drive of the pool."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._checker = ChunkChecker(label)

    def carry_out(self, moves: Sequence[Move], drives: Mapping[int, MovingMedium]) -> frozenset[bytes]:
        """Keys of the chunks that are in their new places, durably. ``drives``: those that are here, by namespace."""
        written = [move for move in moves if self._is_written(move, drives)]
        touched = {shard.extent.namespace for move in written for shard in move.after.shards}
        flushed = {namespace for namespace in touched if _is_flushed(drives[namespace])}
        return frozenset(
            move.before.key for move in written if all(s.extent.namespace in flushed for s in move.after.shards)
        )

    def _is_written(self, move: Move, drives: Mapping[int, MovingMedium]) -> bool:
        try:
            for before, after in zip(move.before.shards, move.after.shards, strict=True):
                problem = self._move_shard(move, before, after, drives)
                if problem:
                    logger.warning("chunk %s is not written again: %s", move.before.key.hex(), problem)
                    return False
        except (MeshFusionError, KeyError) as error:  # KeyError: a drive that has just left
            logger.warning("chunk %s is not written again: %s", move.before.key.hex(), error)
            return False
        return True

    def _move_shard(self, move: Move, before: Shard, after: Shard, drives: Mapping[int, MovingMedium]) -> str:
        """What is wrong with what lies there, or "": a digest is proven before anything is written (rule 4)."""
        lba_bytes = self._label.lba_bytes
        assert before.extent.lba_count == after.extent.lba_count, move
        with AlignedBuffer(before.extent.lba_count * lba_bytes) as buffer:
            drives[before.extent.namespace].read_into(before.extent.lba, buffer.view)
            problem = self._checker.problem_in(move.before, before, buffer)
            if problem:
                return problem
            header_bytes = before.payload_lba_offset * lba_bytes
            header = decode_chunk_header(bytes(buffer.view[:header_bytes]))
            first = move.after.shards[0].extent
            is_alone = len(move.after.shards) == 1
            moved = replace(
                header,
                segment=after.extent.segment,
                generation=after.extent.generation,
                lba=after.extent.lba,
                first_lba=0 if is_alone else pool_lba(first.namespace, first.lba),
                first_generation=0 if is_alone else first.generation,
            )
            buffer.view[:header_bytes] = encode_chunk_header(moved, lba_bytes)
            drives[after.extent.namespace].write_from(after.extent.lba, buffer.view)
        return ""


def _is_flushed(medium: MovingMedium) -> bool:
    try:
        medium.flush()
    except MeshFusionError as error:
        logger.warning("what was written again is not durable: %s", error)
        return False
    return True
