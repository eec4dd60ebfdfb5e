"""The index on LMDB: chunks, segments, holders. One writer, many readers.

LMDB readers see a transaction only after it is committed, and a commit is synced to the medium first: that is how
*visible* comes to mean *complete* (rule 1) without any bookkeeping of ours.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import lmdb

from meshfusion.dpu.api.types import KEY_BYTES, ChunkRecord
from meshfusion.dpu.index_errors import REBUILD, index_error
from meshfusion.dpu.index_tables import META_BUDGET, META_EPOCH, META_PAYLOAD, POSITION, Tables, segment_key
from meshfusion.dpu.index_transaction import IndexTransaction
from meshfusion.dpu.store import records
from meshfusion.dpu.store.effects import Effect, HolderRecord
from meshfusion.dpu.store.stored_chunks import StoredChunks
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.segments import SegmentRecord


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
        self.tables = Tables.of(env)
        noted = self._noted_payload_bytes()
        self.has_totals = noted is not None or payload_bytes is not None  # indexes of earlier services note none
        # Of all committed chunks. Noted in each transaction that changes it, so that no restart has to add it up.
        self.payload_bytes = (noted or 0) if payload_bytes is None else payload_bytes

    # ---- reading -------------------------------------------------------------------------------------------------

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, ChunkRecord]:
        """The records of those keys that are stored and intact."""
        found: dict[bytes, ChunkRecord] = {}
        with self._reading(self.tables.chunks) as txn:
            for key in keys:
                value = txn.get(key)
                if value is None:
                    continue
                try:
                    found[key] = records.decode_chunk(bytes(value))
                except FormatError:
                    continue  # a damaged entry is a miss; `check` counts it
        return found

    def stored(self, keys: Iterable[bytes]) -> StoredChunks:
        """The same as it is stored: for lookups, which ask for hundreds."""
        with self._reading(self.tables.chunks) as txn, txn.cursor() as cursor:
            found = cast("list[tuple[bytes, bytes]]", cursor.getmulti(keys))  # bytes, since no buffers were asked for
            return StoredChunks(dict(found))

    def chunks_after(self, after_key: bytes, limit: int) -> list[ChunkRecord]:
        """Up to ``limit`` intact chunks in key order, after ``after_key``."""
        found: list[ChunkRecord] = []
        with self._reading(self.tables.chunks) as txn, txn.cursor() as cursor:
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
        with self._reading(self.tables.segments) as txn, txn.cursor() as cursor:
            found = {bytes(key): records.decode_segment(bytes(value)) for key, value in cursor}
        if any(key != segment_key(record) for key, record in found.items()):
            raise FormatError(f"the index {self._path} is damaged: segments are mixed up", next_step=REBUILD)
        return tuple(found.values())

    def chunks_in(self, record: SegmentRecord) -> list[ChunkRecord] | None:
        """The intact chunks with a shard in this segment; None when it is not of this generation (any more)."""
        with self._reading(self.tables.chunks) as txn:
            transaction = IndexTransaction(txn, self.tables)
            if transaction.generation_of(record.segment) != record.generation:
                return None
            # A chunk may have several shards here.
            keys = dict.fromkeys(key for _, key in transaction.positions_in(record.segment))
            values = [txn.get(key) for key in keys]
        found = []
        for value in values:
            with contextlib.suppress(FormatError):
                found.append(records.decode_chunk(bytes(value or b"")))
        return found

    def budgets_left(self) -> dict[int, int]:
        """By drive number: see :class:`~meshfusion.dpu.store.effects.NoteBudget`."""
        with self._reading(self.tables.meta) as txn, txn.cursor() as cursor:
            cursor.set_range(META_BUDGET)
            found = {bytes(key): bytes(value) for key, value in cursor if bytes(key).startswith(META_BUDGET)}
        notes = {key.removeprefix(META_BUDGET): value for key, value in found.items()}
        if not all(number.isdigit() and left.isdigit() for number, left in notes.items()):
            raise FormatError(f"the index {self._path} is damaged: its budgets are {notes}", next_step=REBUILD)
        return {int(number): int(left) for number, left in notes.items()}

    @property
    def room_bytes(self) -> int:
        """How large it can become while it is open."""
        return int(self._env.info()["map_size"])

    def holder_records(self) -> tuple[HolderRecord, ...]:
        with self._reading(self.tables.holders) as txn, txn.cursor() as cursor:
            return tuple(records.decode_holder(bytes(value)) for _, value in cursor)

    def _noted_payload_bytes(self) -> int | None:
        with self._reading(self.tables.meta) as txn:
            value = txn.get(META_PAYLOAD)
        if value is not None and not bytes(value).isdigit():
            raise FormatError(f"the index {self._path} is damaged: it holds {value!r} bytes", next_step=REBUILD)
        return None if value is None else int(bytes(value))

    def chunk_count(self) -> int:
        with self._reading(self.tables.chunks) as txn:
            return int(txn.stat(self.tables.chunks)["entries"])

    def scan(self) -> IndexTotals:
        """Read every chunk entry and check that it and its position entry agree."""
        count = payload_bytes = damaged = 0
        with self._reading(self.tables.chunks) as txn, txn.cursor() as cursor:
            transaction = IndexTransaction(txn, self.tables)
            for key, value in cursor:
                record = transaction.sound(bytes(key), bytes(value))
                if record is None:
                    damaged += 1
                    continue
                count += 1
                payload_bytes += sum(shard.payload_bytes for shard in record.shards)
        return IndexTotals(count, payload_bytes, damaged)

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
            self.tables.chunks, lambda key, value: len(key) == KEY_BYTES and records.chunk_has_its_length(value)
        )
        self._check_entries(
            self.tables.positions, lambda key, value: len(key) == POSITION.size and len(value) == KEY_BYTES
        )
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
                    transaction = IndexTransaction(txn, self.tables)
                    for effect in effects:
                        payload_bytes += transaction.apply(effect)
                    transaction.note_payload(payload_bytes)
            except lmdb.Error as error:
                raise index_error(self._path, error) from error
            self.payload_bytes = payload_bytes

    def drop_damaged(self) -> int:
        """Forget the entries that :meth:`scan` calls damaged, and which it has not added up; how many. Their places go
        with their segment."""
        try:
            with self._env.begin(write=True) as txn:
                transaction = IndexTransaction(txn, self.tables)
                count = transaction.drop_damaged()
                transaction.note_payload(self.payload_bytes)
        except lmdb.Error as error:
            raise index_error(self._path, error) from error
        return count

    def forget_drive(self, segments: range) -> int:
        """Forget these segments, in one transaction, and every chunk that has a shard in one of them; how many."""
        with self._counting:
            try:
                with self._env.begin(write=True) as txn:
                    transaction = IndexTransaction(txn, self.tables)
                    count, removed_bytes = transaction.forget_segments(segments)
                    transaction.note_payload(self.payload_bytes - removed_bytes)
            except lmdb.Error as error:
                raise index_error(self._path, error) from error
            self.payload_bytes -= removed_bytes
        return count

    def next_epoch(self) -> int:
        """Begin a new owner epoch, durably."""
        try:
            with self._env.begin(write=True, db=self.tables.meta) as txn:
                epoch = _epoch_of(txn, self._path) + 1
                txn.put(META_EPOCH, str(epoch).encode())
        except lmdb.Error as error:
            raise index_error(self._path, error) from error
        return epoch

    def begin_epoch(self, epoch: int) -> None:
        """That one, durably: of a new index."""
        try:
            with self._env.begin(write=True, db=self.tables.meta) as txn:
                txn.put(META_EPOCH, str(epoch).encode())
        except lmdb.Error as error:
            raise index_error(self._path, error) from error

    def epoch(self) -> int:
        with self._reading(self.tables.meta) as txn:
            return _epoch_of(txn, self._path)

    @contextlib.contextmanager
    def _reading(self, db: Any) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(db=db) as txn:
                yield txn
        except lmdb.Error as error:
            raise index_error(self._path, error) from error

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _epoch_of(txn: lmdb.Transaction, path: str) -> int:
    value = bytes(txn.get(META_EPOCH, b"0"))
    if not value.isdigit():
        raise FormatError(f"the index {path} is damaged: its epoch is {value!r}", next_step=REBUILD)
    return int(value)
