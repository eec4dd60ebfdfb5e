"""The index on LMDB: chunks, segments, holders. One writer, many readers.

LMDB readers see a transaction only after it is committed, and a commit is synced to the medium first: that is how
*visible* comes to mean *complete* (rule 1) without any bookkeeping of ours.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import lmdb

from meshfusion.dpu.api.types import KEY_BYTES, ChunkRecord, Extent
from meshfusion.dpu.index_errors import REBUILD, index_error
from meshfusion.dpu.store import records
from meshfusion.dpu.store.effects import (
    DeleteChunk,
    DeleteHolder,
    Effect,
    HolderRecord,
    MoveChunk,
    NoteBudget,
    OpenSegment,
    PutChunk,
    PutHolder,
    SummarizeSegment,
)
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.segments import SegmentRecord

_POSITION = struct.Struct(">IQ")  # segment, lba: big-endian so that keys sort by position
META_VERSION = b"index_version"
META_POOL = b"pool_uuid"
META_PAYLOAD = b"payload_bytes"
_META_EPOCH = b"epoch"
_BUDGET = b"budget_left_bytes/"  # and the drive's number
_FENCED_KEPT = 4096


@dataclass(frozen=True, slots=True)
class IndexTotals:
    """What a full scan of the index found."""

    chunk_count: int
    payload_bytes: int
    damaged_count: int


class Index:
    """An open index. All methods raise :class:`FormatError` on damage and :class:`MediaError` on I/O trouble."""

    def __init__(self, env: lmdb.Environment, payload_bytes: int | None = None) -> None:
        self._env = env
        self._path = env.path()
        self._counting = threading.Lock()  # held by whoever writes, since each notes the payload of all
        self.meta = env.open_db(b"meta", create=False)
        noted = self._noted_payload_bytes()
        self.has_totals = noted is not None or payload_bytes is not None  # indexes of earlier services note none
        # Of all committed chunks. Noted in each transaction that changes it, so that no restart has to add it up.
        self.payload_bytes = (noted or 0) if payload_bytes is None else payload_bytes
        self._chunks = env.open_db(b"chunks", create=False)
        self._positions = env.open_db(b"positions", create=False)
        self._segments = env.open_db(b"segments", create=False)
        self._holders = env.open_db(b"holders", create=False)

    # ---- reading -------------------------------------------------------------------------------------------------

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, ChunkRecord]:
        """The records of those keys that are stored and intact."""
        found: dict[bytes, ChunkRecord] = {}
        with self._reading(self._chunks) as txn:
            for key in keys:
                value = txn.get(key)
                if value is None:
                    continue
                try:
                    found[key] = records.decode_chunk(bytes(value))
                except FormatError:
                    continue  # a damaged entry is a miss; `check` counts it
        return found

    def chunks_after(self, after_key: bytes, limit: int) -> list[ChunkRecord]:
        """Up to ``limit`` intact chunks in key order, after ``after_key``."""
        found: list[ChunkRecord] = []
        with self._reading(self._chunks) as txn, txn.cursor() as cursor:
            if not (cursor.set_range(after_key) if after_key else cursor.first()):
                return found
            for key, value in cursor:
                if key == after_key:
                    continue
                if len(found) >= limit:
                    break
                try:
                    found.append(records.decode_chunk(bytes(value)))
                except FormatError:
                    continue
        return found

    def segment_records(self) -> tuple[SegmentRecord, ...]:
        with self._reading(self._segments) as txn, txn.cursor() as cursor:
            found = {bytes(key): records.decode_segment(bytes(value)) for key, value in cursor}
        if any(key != _segment_key(record) for key, record in found.items()):
            raise FormatError(f"the index {self._path} is damaged: segments are mixed up", next_step=REBUILD)
        return tuple(found.values())

    def chunks_in(self, record: SegmentRecord) -> list[ChunkRecord] | None:
        """The intact chunks with a shard in this segment; None when it is not of this generation (any more)."""
        with self._reading(self._chunks) as txn:
            if self._generation_of(txn, record.segment) != record.generation:
                return None
            # A chunk may have several shards here.
            keys = dict.fromkeys(key for _, key in self._positions_in(txn, record.segment))
            values = [txn.get(key) for key in keys]
        found = []
        for value in values:
            with contextlib.suppress(FormatError):
                found.append(records.decode_chunk(bytes(value or b"")))
        return found

    def budgets_left(self) -> dict[int, int]:
        """By drive number: see :class:`~meshfusion.dpu.store.effects.NoteBudget`."""
        with self._reading(self.meta) as txn, txn.cursor() as cursor:
            cursor.set_range(_BUDGET)
            found = {bytes(key): bytes(value) for key, value in cursor if bytes(key).startswith(_BUDGET)}
        notes = {key.removeprefix(_BUDGET): value for key, value in found.items()}
        if not all(number.isdigit() and left.isdigit() for number, left in notes.items()):
            raise FormatError(f"the index {self._path} is damaged: its budgets are {notes}", next_step=REBUILD)
        return {int(number): int(left) for number, left in notes.items()}

    @property
    def room_bytes(self) -> int:
        """How large it can become while it is open."""
        return int(self._env.info()["map_size"])

    def holder_records(self) -> tuple[HolderRecord, ...]:
        with self._reading(self._holders) as txn, txn.cursor() as cursor:
            return tuple(records.decode_holder(bytes(value)) for _, value in cursor)

    def _noted_payload_bytes(self) -> int | None:
        with self._reading(self.meta) as txn:
            value = txn.get(META_PAYLOAD)
        if value is not None and not bytes(value).isdigit():
            raise FormatError(f"the index {self._path} is damaged: it holds {value!r} bytes", next_step=REBUILD)
        return None if value is None else int(bytes(value))

    def chunk_count(self) -> int:
        with self._reading(self._chunks) as txn:
            return int(txn.stat(self._chunks)["entries"])

    def scan(self) -> IndexTotals:
        """Read every chunk entry and check that it and its position entry agree."""
        count = payload_bytes = damaged = 0
        with self._reading(self._chunks) as txn, txn.cursor() as cursor:
            for key, value in cursor:
                record = self._sound(txn, bytes(key), bytes(value))
                if record is None:
                    damaged += 1
                    continue
                count += 1
                payload_bytes += sum(shard.payload_bytes for shard in record.shards)
        return IndexTotals(count, payload_bytes, damaged)

    def _sound(self, txn: lmdb.Transaction, key: bytes, value: bytes) -> ChunkRecord | None:
        """The record of a chunk entry; None when it, or its place, is not as it was written."""
        try:
            record = records.decode_chunk(bytes(value))
        except FormatError:
            return None
        placed = all(
            txn.get(_POSITION.pack(s.extent.segment, s.extent.lba), db=self._positions) == key for s in record.shards
        )
        return record if record.key == key and placed else None

    def check_structure(self) -> None:
        """Touch every page that is in use and every entry's bounds: LMDB trusts them, and would crash over wrong ones.

        Raises :class:`FormatError`. Damage inside an entry is for :meth:`scan`. (LMDB's list of free pages cannot be
        read from here: damage there is met when it is used.)
        """
        descriptor = os.open(os.devnull, os.O_WRONLY)
        try:
            self._env.copyfd(descriptor, compact=True)
        except lmdb.Error as error:
            raise index_error(self._path, error) from error
        finally:
            os.close(descriptor)
        self._check_entries(
            self._chunks, lambda key, value: len(key) == KEY_BYTES and records.chunk_has_its_length(value)
        )
        self._check_entries(self._positions, lambda key, value: len(key) == _POSITION.size and len(value) == KEY_BYTES)
        self.segment_records()
        self.holder_records()

    def _check_entries(self, db: Any, is_plausible: Callable[[bytes, bytes], bool]) -> None:
        count, last_key = 0, b""
        with self._reading(db) as txn, txn.cursor() as cursor:
            for key, value in ((bytes(key), bytes(value)) for key, value in cursor):
                if key <= last_key or not is_plausible(key, value):
                    raise FormatError(f"the index {self._path} is damaged: its entries are mixed up", next_step=REBUILD)
                count, last_key = count + 1, key
            if count != txn.stat(db)["entries"]:
                raise FormatError(f"the index {self._path} is damaged: entries are missing", next_step=REBUILD)

    # ---- writing -------------------------------------------------------------------------------------------------

    def apply(self, effects: Iterable[Effect]) -> None:
        """All effects in one transaction; on the medium when this returns."""
        with self._counting:
            payload_bytes = self.payload_bytes
            try:
                with self._env.begin(write=True) as txn:
                    for effect in effects:
                        payload_bytes += self._apply_one(txn, effect)
                    self._note(txn, payload_bytes)
            except lmdb.Error as error:
                raise index_error(self._path, error) from error
            self.payload_bytes = payload_bytes

    def drop_damaged(self) -> int:
        """Forget the entries that :meth:`scan` calls damaged, and which it has not added up; how many. Their places go
        with their segment."""
        try:
            with self._env.begin(write=True) as txn:
                with txn.cursor(db=self._chunks) as cursor:
                    found = [bytes(key) for key, value in cursor if not self._sound(txn, bytes(key), bytes(value))]
                for key in found:
                    txn.delete(key, db=self._chunks)
                self._note(txn, self.payload_bytes)
        except lmdb.Error as error:
            raise index_error(self._path, error) from error
        return len(found)

    def forget_drive(self, segments: range) -> int:
        """Forget these segments, in one transaction, and every chunk that has a shard in one of them; how many."""
        with self._counting:
            count, payload_bytes = 0, self.payload_bytes
            try:
                with self._env.begin(write=True) as txn:
                    with txn.cursor(db=self._positions) as cursor:
                        found = _entries_in(cursor, _POSITION.pack(segments.start, 0), segments)
                    for position, key in found:
                        before = txn.stat(self._chunks)["entries"]
                        payload_bytes -= self._delete_chunk(txn, key)
                        count += before - txn.stat(self._chunks)["entries"]
                        txn.delete(position, db=self._positions)
                    with txn.cursor(db=self._segments) as cursor:
                        known = _entries_in(cursor, segments.start.to_bytes(4, "big"), segments)
                    for key, _ in known:
                        txn.delete(key, db=self._segments)
                    self._note(txn, payload_bytes)
            except lmdb.Error as error:
                raise index_error(self._path, error) from error
            self.payload_bytes = payload_bytes
        return count

    def next_epoch(self) -> int:
        """Begin a new owner epoch, durably."""
        try:
            with self._env.begin(write=True, db=self.meta) as txn:
                epoch = _epoch_of(txn, self._path) + 1
                txn.put(_META_EPOCH, str(epoch).encode())
        except lmdb.Error as error:
            raise index_error(self._path, error) from error
        return epoch

    def begin_epoch(self, epoch: int) -> None:
        """That one, durably: of a new index."""
        try:
            with self._env.begin(write=True, db=self.meta) as txn:
                txn.put(_META_EPOCH, str(epoch).encode())
        except lmdb.Error as error:
            raise index_error(self._path, error) from error

    def epoch(self) -> int:
        with self._reading(self.meta) as txn:
            return _epoch_of(txn, self._path)

    @contextlib.contextmanager
    def _reading(self, db: Any) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(db=db) as txn:
                yield txn
        except lmdb.Error as error:
            raise index_error(self._path, error) from error

    def _note(self, txn: lmdb.Transaction, payload_bytes: int) -> None:
        """In the transaction that makes it so."""
        txn.put(META_PAYLOAD, str(max(0, payload_bytes)).encode(), db=self.meta)

    def _apply_one(self, txn: lmdb.Transaction, effect: Effect) -> int:
        """Returns by how much the payload of all committed chunks grows."""
        match effect:
            case PutChunk(record):
                return self._put_chunk(txn, record)
            case MoveChunk(before, after):
                if txn.get(before.key, db=self._chunks) == records.encode_chunk(before):
                    return self._put_chunk(txn, after)
            case DeleteChunk(key, extent):
                if self._lies_at(txn, key, extent):
                    return -self._delete_chunk(txn, key)
            case OpenSegment(segment):
                removed_bytes = 0
                for position, key in self._positions_in(txn, segment.segment):
                    removed_bytes += self._delete_chunk(txn, key)
                    txn.delete(position, db=self._positions)
                txn.put(_segment_key(segment), records.encode_segment(segment), db=self._segments)
                return -removed_bytes
            case SummarizeSegment(segment):
                if self._generation_of(txn, segment.segment) == segment.generation:
                    txn.put(_segment_key(segment), records.encode_segment(segment), db=self._segments)
            case NoteBudget(drive_number, left_bytes):
                txn.put(_BUDGET + str(drive_number).encode(), str(left_bytes).encode(), db=self.meta)
            case PutHolder(holder):
                txn.put(holder.holder_id.encode(), records.encode_holder(holder), db=self._holders)
                self._prune_fenced(txn)
            case DeleteHolder(holder_id):
                txn.delete(holder_id.encode(), db=self._holders)
        return 0

    def _put_chunk(self, txn: lmdb.Transaction, record: ChunkRecord) -> int:
        """Returns by how much the payload grows."""
        removed_bytes = self._delete_chunk(txn, record.key)
        txn.put(record.key, records.encode_chunk(record), db=self._chunks)
        for shard in record.shards:
            position = _POSITION.pack(shard.extent.segment, shard.extent.lba)
            txn.put(position, record.key, db=self._positions)
        return sum(shard.payload_bytes for shard in record.shards) - removed_bytes

    def _delete_chunk(self, txn: lmdb.Transaction, key: bytes) -> int:
        """Remove a chunk and its positions; returns the payload bytes it had (0 for a damaged entry)."""
        value = txn.get(key, db=self._chunks)
        if value is None:
            return 0
        txn.delete(key, db=self._chunks)
        try:
            record = records.decode_chunk(bytes(value))
        except FormatError:
            return 0  # its positions go when their segment is opened again
        for shard in record.shards:
            position = _POSITION.pack(shard.extent.segment, shard.extent.lba)
            if txn.get(position, db=self._positions) == key:
                txn.delete(position, db=self._positions)
        return sum(shard.payload_bytes for shard in record.shards)

    def _lies_at(self, txn: lmdb.Transaction, key: bytes, extent: Extent) -> bool:
        value = txn.get(key, db=self._chunks)
        if value is None:
            return False
        try:
            return any(shard.extent == extent for shard in records.decode_chunk(bytes(value)).shards)
        except FormatError:
            return True  # damaged: of no use to anybody

    def _positions_in(self, txn: lmdb.Transaction, segment: int) -> list[tuple[bytes, bytes]]:
        found = []
        with txn.cursor(db=self._positions) as cursor:
            if cursor.set_range(_POSITION.pack(segment, 0)):
                for position, key in cursor:
                    if _POSITION.unpack(position)[0] != segment:
                        break
                    found.append((bytes(position), bytes(key)))
        return found

    def _generation_of(self, txn: lmdb.Transaction, segment: int) -> int | None:
        value = txn.get(segment.to_bytes(4, "big"), db=self._segments)
        return None if value is None else records.decode_segment(bytes(value)).generation

    def _prune_fenced(self, txn: lmdb.Transaction) -> None:
        """Keep the memory of fenced incarnations bounded; their liveness files are gone in any case."""
        if txn.stat(self._holders)["entries"] <= _FENCED_KEPT:
            return
        with txn.cursor(db=self._holders) as cursor:
            fenced = [bytes(key) for key, value in cursor if records.decode_holder(bytes(value)).fenced]
        for key in fenced[: len(fenced) // 2]:
            txn.delete(key, db=self._holders)

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _segment_key(record: SegmentRecord) -> bytes:
    return record.segment.to_bytes(4, "big")


def _entries_in(cursor: Any, first_key: bytes, segments: range) -> list[tuple[bytes, bytes]]:
    """From ``first_key`` on, those whose key begins with the number of one of ``segments``."""
    found: list[tuple[bytes, bytes]] = []
    if cursor.set_range(first_key):
        for key, value in cursor:
            if int.from_bytes(key[:4], "big") not in segments:
                break
            found.append((bytes(key), bytes(value)))
    return found


def _epoch_of(txn: lmdb.Transaction, path: str) -> int:
    value = bytes(txn.get(_META_EPOCH, b"0"))
    if not value.isdigit():
        raise FormatError(f"the index {path} is damaged: its epoch is {value!r}", next_step=REBUILD)
    return int(value)
