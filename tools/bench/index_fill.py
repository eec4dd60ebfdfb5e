"""A pool whose index holds very many chunks, made fast: real records by the index's own code, and no data behind them.

Only the syncs are left out while it is filled. Prompts of :data:`PROMPT_CHUNKS` chunks lie one after another in the
pool's segments, as an engine saves them; their keys are digests, so the index meets them in no order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import lmdb

from meshfusion.dpu.api.types import ChunkRecord, Extent, GroupKeys, Shard, ShardSize
from meshfusion.dpu.index import Index
from meshfusion.dpu.index_files import map_size_bytes
from meshfusion.dpu.pool_create import create_pool
from meshfusion.dpu.pool_dir import PoolLayout, geometry_of, read_label
from meshfusion.dpu.store.effects import Effect, OpenSegment, PutChunk
from meshfusion.jbof.format import DATA_START_LBA, LBA_BYTES, header_lba_count, shard_lba_count
from meshfusion.jbof.segment_format import SEGMENT_HEADER_LBAS, summary_lba_count
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord

PROMPT_CHUNKS: Final = 400
UNIT_BYTES: Final = 256 << 10
UNIT_COUNT: Final = 4
CHUNK_TOKENS: Final = 64
IDENTITY: Final = b"I" * 32
_SEGMENT_BYTES: Final = 64 << 20
SHARD: Final = ShardSize(0, UNIT_BYTES, UNIT_COUNT)
_CHUNK_LBAS: Final = shard_lba_count(UNIT_BYTES, UNIT_COUNT)
_SEGMENT_CHUNKS: Final = (_SEGMENT_BYTES // LBA_BYTES - SEGMENT_HEADER_LBAS) // _CHUNK_LBAS
# More than a service keeps free by itself: it gives segments up for that, and each that it empties takes its room on
# the filesystem, which no chunk of such a pool has taken.
_FREE_SHARE: Final = 0.07
_FREE_SEGMENTS: Final = 256
_GROUP_EFFECTS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Filled:
    path: Path
    chunk_count: int

    @property
    def prompt_count(self) -> int:
        """Of whole prompts."""
        return self.chunk_count // PROMPT_CHUNKS


def key_of(prompt: int, chunk: int) -> bytes:
    return hashlib.blake2b(f"{prompt}/{chunk}".encode(), digest_size=32).digest()


def prompt_keys(prompt: int) -> GroupKeys:
    return GroupKeys(0, tuple(key_of(prompt, i) for i in range(PROMPT_CHUNKS)), (0,) * PROMPT_CHUNKS)


def fill_pool(path: Path, chunk_count: int, progress: Callable[[str], None]) -> Filled:
    """A new pool at ``path``; its data is a sparse file beside it."""
    used_count = -(-chunk_count // _SEGMENT_CHUNKS)
    segment_count = used_count + max(_FREE_SEGMENTS, int(_FREE_SHARE * used_count))
    size_bytes = DATA_START_LBA * LBA_BYTES + segment_count * _SEGMENT_BYTES
    data = path.with_suffix(".data")
    data.touch()
    os.truncate(data, size_bytes)
    create_pool(path, size_bytes=size_bytes, segment_bytes=_SEGMENT_BYTES, data_path=data)
    layout = PoolLayout(path)
    geometry = geometry_of(read_label(layout))
    assert _SEGMENT_CHUNKS * _CHUNK_LBAS + summary_lba_count(_SEGMENT_CHUNKS) < geometry.segment_lba_count
    effects = _effects(geometry, chunk_count)
    map_size = map_size_bytes(geometry.capacity_bytes)
    with lmdb.open(str(layout.index), map_size=map_size, max_dbs=8, create=False, sync=False) as env:
        index, done = Index(env), 0
        while batch := list(islice(effects, _GROUP_EFFECTS)):
            index.apply(batch)
            done += len(batch)
            if done % 1_000_000 < _GROUP_EFFECTS:
                progress(f"{done} entries of the index")
        env.sync(True)
    return Filled(path, chunk_count)


def _effects(geometry: SegmentGeometry, chunk_count: int) -> Iterator[Effect]:
    for number in range(chunk_count):
        segment, place = divmod(number, _SEGMENT_CHUNKS)
        if place == 0:
            yield OpenSegment(SegmentRecord(segment, 1, segment + 1, is_summarized=True))
        prompt, chunk = divmod(number, PROMPT_CHUNKS)
        lba = geometry.first_lba(segment) + SEGMENT_HEADER_LBAS + place * _CHUNK_LBAS
        yield PutChunk(_record(key_of(prompt, chunk), chunk, Extent(1, segment, lba, _CHUNK_LBAS, 1)))


def _record(key: bytes, chunk: int, extent: Extent) -> ChunkRecord:
    digests = tuple(key[8 * unit : 8 * unit + 8] for unit in range(UNIT_COUNT))
    shard = Shard(0, extent, header_lba_count(UNIT_COUNT), UNIT_BYTES // LBA_BYTES, UNIT_BYTES, digests)
    return ChunkRecord(key, IDENTITY, "default", 0, chunk * CHUNK_TOKENS, CHUNK_TOKENS, (shard,))
