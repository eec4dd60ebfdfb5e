"""What the index holds for the keys of a lookup, as it is stored. No I/O, no clock.

A mapping from keys to chunks like any other; what is damaged is not in it. Besides, :meth:`StoredChunks.sure_prefix`
looks at all chunks of a prompt at once, without taking them apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from meshfusion.dpu.api.packed_chunk import (
    CHUNK,
    CRC,
    INTACT_CRC,
    SHARD,
    PackedChunkError,
    PackedChunks,
    pack_chunk,
    unpack_chunk,
)
from meshfusion.dpu.api.types import IDENTITY_BYTES, KEY_BYTES, UNIT_DIGEST_BYTES, ChunkRecord

_Bytes = npt.NDArray[np.uint8]
_GROUP: Final = KEY_BYTES + IDENTITY_BYTES
_POSITION: Final = slice(_GROUP + 4, _GROUP + 12)
# Of a shard's fields, those that are other ones in each chunk: segment, LBA and generation. Digests are behind it.
_SEGMENT: Final = slice(8, 12)
_LBA: Final = slice(12, 20)
_GENERATION: Final = slice(24, 32)


class Wanted(NamedTuple):
    """``keys``: of chunks that follow one another from token 0 on. ``is_readable``: asked of a segment and the
    generation under which something was written to it."""

    keys: Sequence[bytes]
    group: int
    identity: bytes
    tenant: str
    chunk_tokens: int
    is_readable: Callable[[int, int], bool]


class StoredChunks(Mapping[bytes, ChunkRecord]):
    """``values``: by key, as they are stored, intact or not."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values

    @classmethod
    def of(cls, chunks: Mapping[bytes, ChunkRecord]) -> StoredChunks:
        return cls({key: pack_chunk(chunk) for key, chunk in chunks.items()})

    def __getitem__(self, key: bytes) -> ChunkRecord:
        try:
            return unpack_chunk(self._values[key])
        except PackedChunkError as error:
            raise KeyError(key) from error

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in self._values if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def packed(self, keys: Iterable[bytes]) -> PackedChunks:
        """Of chunks that are in it."""
        return PackedChunks(map(self._values.__getitem__, keys))

    def sure_prefix(self, wanted: Wanted) -> list[tuple[int, ...]]:
        """The segments of each of the leading chunks that are, for sure, what is wanted: intact, under its key, of that
        identity, tenant and group, at its position, so long, and readable. The next one may be, too: only what is made
        like the first one is looked at here."""
        values = _until_missing(list(map(self._values.get, wanted.keys)))
        first = self.get(wanted.keys[0]) if values else None
        if first is None or not _is_wanted(first, wanted):
            return []
        length = len(values[0])
        end = min(_leading(length, map(len, values)), _leading(INTACT_CRC, map(zlib.crc32, values)))
        rows = np.frombuffer(b"".join(values[:end]), np.uint8).reshape(end, length)
        shards = _shard_offsets(first)
        due = np.repeat(rows[:1], end, axis=0)
        due[:, :KEY_BYTES] = np.frombuffer(b"".join(wanted.keys[:end]), np.uint8).reshape(end, KEY_BYTES)
        positions = np.arange(end, dtype="<u8") * np.uint64(wanted.chunk_tokens)
        due[:, _POSITION] = positions.view(np.uint8).reshape(end, positions.itemsize)
        is_wrong = ((rows != due) & _compared(first, shards, length)).any(axis=1)
        return _readable(rows[: _leading(False, is_wrong.tolist())], shards, wanted.is_readable)


def _is_wanted(record: ChunkRecord, wanted: Wanted) -> bool:
    """Of the first one. Its key and position are compared with those of all."""
    return (
        record.identity == wanted.identity
        and record.tenant == wanted.tenant
        and record.group == wanted.group
        and record.token_count == wanted.chunk_tokens
    )


def _until_missing(values: list[bytes | None]) -> list[bytes]:
    end = values.index(None) if None in values else len(values)
    return values[:end]  # type: ignore[return-value]  # none of them is None


def _leading(wanted: int, found: Iterable[int]) -> int:
    """How many of the first ones are ``wanted``."""
    values = list(found)
    return len(values) if values.count(wanted) == len(values) else next(i for i, v in enumerate(values) if v != wanted)


def _shard_offsets(record: ChunkRecord) -> list[int]:
    offsets, at = [], CHUNK.size + len(record.tenant.encode())
    for shard in record.shards:
        offsets.append(at)
        at += SHARD.size + UNIT_DIGEST_BYTES * len(shard.unit_digests)
    return offsets


def _compared(first: ChunkRecord, shards: Sequence[int], length: int) -> npt.NDArray[np.bool_]:
    """The bytes that are known beforehand of chunks which are made alike and belong to one prompt."""
    compared = np.ones(length, np.bool_)
    compared[-CRC.size :] = False
    for at, shard in zip(shards, first.shards, strict=True):
        for field in (_SEGMENT, _LBA, _GENERATION):
            compared[at + field.start : at + field.stop] = False
        digests = at + SHARD.size
        compared[digests : digests + UNIT_DIGEST_BYTES * len(shard.unit_digests)] = False
    return compared


def _numbers(rows: _Bytes, at: int, field: slice, kind: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(rows[:, at + field.start : at + field.stop]).view(kind)[:, 0]


def _readable(rows: _Bytes, shards: Sequence[int], is_readable: Callable[[int, int], bool]) -> list[tuple[int, ...]]:
    """Of the leading ones of these, the segments of each."""
    end = len(rows)
    columns = []
    for at in shards:
        segments = _numbers(rows, at, _SEGMENT, "<u4").tolist()
        places = list(zip(segments, _numbers(rows, at, _GENERATION, "<u8").tolist(), strict=True))
        unreadable = {place for place in set(places) if not is_readable(*place)}
        if unreadable:
            end = min(end, _leading(True, [place not in unreadable for place in places]))
        columns.append(segments)
    return list(zip(*columns, strict=True))[:end]
