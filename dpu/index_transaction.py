"""What one transaction of the index reads and writes, so that its tables agree at its end."""

from __future__ import annotations

from typing import Any

import lmdb

from meshfusion.dpu.api.types import ChunkRecord, Extent
from meshfusion.dpu.index_tables import META_BUDGET, META_PAYLOAD, POSITION, Tables, position_key, segment_key
from meshfusion.dpu.store import records
from meshfusion.dpu.store.effects import (
    DeleteChunk,
    DeleteHolder,
    Effect,
    MoveChunk,
    NoteBudget,
    OpenSegment,
    PutChunk,
    PutHolder,
    SummarizeSegment,
)
from meshfusion.jbof.errors import FormatError

_FENCED_KEPT = 4096


class IndexTransaction:
    """Within ``txn``, which its maker commits. All methods raise :class:`lmdb.Error`."""

    def __init__(self, txn: lmdb.Transaction, tables: Tables) -> None:
        self._txn = txn
        self._tables = tables

    # ---- reading -------------------------------------------------------------------------------------------------

    def sound(self, key: bytes, value: bytes) -> ChunkRecord | None:
        """The record of a chunk entry; None when it, or its place, is not as it was written."""
        try:
            record = records.decode_chunk(value)
        except FormatError:
            return None
        placed = all(
            self._txn.get(position_key(shard.extent), db=self._tables.positions) == key for shard in record.shards
        )
        return record if record.key == key and placed else None

    def positions_in(self, segment: int) -> list[tuple[bytes, bytes]]:
        """Of each shard in this segment, its position and its chunk's key."""
        with self._txn.cursor(db=self._tables.positions) as cursor:
            return _entries_in(cursor, POSITION.pack(segment, 0), range(segment, segment + 1))

    def generation_of(self, segment: int) -> int | None:
        value = self._txn.get(segment.to_bytes(4, "big"), db=self._tables.segments)
        return None if value is None else records.decode_segment(bytes(value)).generation

    # ---- writing -------------------------------------------------------------------------------------------------

    def note_payload(self, payload_bytes: int) -> None:
        """Of all committed chunks, in the transaction that makes it so."""
        self._txn.put(META_PAYLOAD, str(max(0, payload_bytes)).encode(), db=self._tables.meta)

    def apply(self, effect: Effect) -> int:
        """Returns by how much the payload of all committed chunks grows."""
        match effect:
            case PutChunk(record):
                return self._put_chunk(record)
            case MoveChunk(before, after):
                if self._txn.get(before.key, db=self._tables.chunks) == records.encode_chunk(before):
                    return self._put_chunk(after)
            case DeleteChunk(key, extent):
                if self._lies_at(key, extent):
                    return -self._delete_chunk(key)
            case OpenSegment(segment):
                removed_bytes = 0
                for position, key in self.positions_in(segment.segment):
                    removed_bytes += self._delete_chunk(key)
                    self._txn.delete(position, db=self._tables.positions)
                self._txn.put(segment_key(segment), records.encode_segment(segment), db=self._tables.segments)
                return -removed_bytes
            case SummarizeSegment(segment):
                if self.generation_of(segment.segment) == segment.generation:
                    self._txn.put(segment_key(segment), records.encode_segment(segment), db=self._tables.segments)
            case NoteBudget(drive_number, left_bytes):
                name = META_BUDGET + str(drive_number).encode()
                self._txn.put(name, str(left_bytes).encode(), db=self._tables.meta)
            case PutHolder(holder):
                self._txn.put(holder.holder_id.encode(), records.encode_holder(holder), db=self._tables.holders)
                self._prune_fenced()
            case DeleteHolder(holder_id):
                self._txn.delete(holder_id.encode(), db=self._tables.holders)
        return 0

    def drop_damaged(self) -> int:
        """Forget the chunk entries that are not :meth:`sound`; how many. Their places go with their segment."""
        with self._txn.cursor(db=self._tables.chunks) as cursor:
            found = [bytes(key) for key, value in cursor if not self.sound(bytes(key), bytes(value))]
        for key in found:
            self._txn.delete(key, db=self._tables.chunks)
        return len(found)

    def forget_segments(self, segments: range) -> tuple[int, int]:
        """And every chunk that has a shard in one of them: how many, and by how much the payload shrinks."""
        before = self._chunk_count()
        removed_bytes = 0
        with self._txn.cursor(db=self._tables.positions) as cursor:
            found = _entries_in(cursor, POSITION.pack(segments.start, 0), segments)
        for position, key in found:
            removed_bytes += self._delete_chunk(key)
            self._txn.delete(position, db=self._tables.positions)
        with self._txn.cursor(db=self._tables.segments) as cursor:
            known = _entries_in(cursor, segments.start.to_bytes(4, "big"), segments)
        for key, _ in known:
            self._txn.delete(key, db=self._tables.segments)
        return before - self._chunk_count(), removed_bytes

    def _chunk_count(self) -> int:
        return int(self._txn.stat(self._tables.chunks)["entries"])

    def _put_chunk(self, record: ChunkRecord) -> int:
        """Returns by how much the payload grows."""
        removed_bytes = self._delete_chunk(record.key)
        self._txn.put(record.key, records.encode_chunk(record), db=self._tables.chunks)
        for shard in record.shards:
            self._txn.put(position_key(shard.extent), record.key, db=self._tables.positions)
        return sum(shard.payload_bytes for shard in record.shards) - removed_bytes

    def _delete_chunk(self, key: bytes) -> int:
        """Remove a chunk and its positions; returns the payload bytes it had (0 for a damaged entry)."""
        value = self._txn.get(key, db=self._tables.chunks)
        if value is None:
            return 0
        self._txn.delete(key, db=self._tables.chunks)
        try:
            record = records.decode_chunk(bytes(value))
        except FormatError:
            return 0  # its positions go when their segment is opened again
        for shard in record.shards:
            position = position_key(shard.extent)
            if self._txn.get(position, db=self._tables.positions) == key:
                self._txn.delete(position, db=self._tables.positions)
        return sum(shard.payload_bytes for shard in record.shards)

    def _lies_at(self, key: bytes, extent: Extent) -> bool:
        value = self._txn.get(key, db=self._tables.chunks)
        if value is None:
            return False
        try:
            return any(shard.extent == extent for shard in records.decode_chunk(bytes(value)).shards)
        except FormatError:
            return True  # damaged: of no use to anybody

    def _prune_fenced(self) -> None:
        """Keep the memory of fenced incarnations bounded; their liveness files are gone in any case."""
        if self._txn.stat(self._tables.holders)["entries"] <= _FENCED_KEPT:
            return
        with self._txn.cursor(db=self._tables.holders) as cursor:
            fenced = [bytes(key) for key, value in cursor if records.decode_holder(bytes(value)).fenced]
        for key in fenced[: len(fenced) // 2]:
            self._txn.delete(key, db=self._tables.holders)


def _entries_in(cursor: Any, first_key: bytes, segments: range) -> list[tuple[bytes, bytes]]:
    """From ``first_key`` on, those whose key begins with the number of one of ``segments``."""
    found: list[tuple[bytes, bytes]] = []
    if cursor.set_range(first_key):
        for key, value in cursor:
            if int.from_bytes(key[:4], "big") not in segments:
                break
            found.append((bytes(key), bytes(value)))
    return found
