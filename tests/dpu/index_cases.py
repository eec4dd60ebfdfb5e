"""Index entries for tests, and the worker that opens damaged copies of an index: a crash there is a failed test."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from meshfusion.dpu.api.types import ChunkRecord, Extent, Shard
from meshfusion.dpu.index import Index
from meshfusion.dpu.index_files import create_index, open_index
from meshfusion.dpu.index_scan import scan_in_child
from meshfusion.dpu.store.effects import HolderRecord, OpenSegment, PutChunk, PutHolder
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.jbof.segments import SegmentRecord

POOL = "3f0c9a4e-0000-4000-8000-000000000001"
CAPACITY_BYTES = 1 << 26
CHUNK_COUNT = 150


def chunk(i: int, *, generation: int = 1, per_segment: int = 25) -> ChunkRecord:
    """Chunk ``i``: four units of 4096 bytes behind one header block."""
    extent = Extent(1, i // per_segment, 256 + 5 * i, 5, generation)
    digests = tuple(bytes([i % 256, unit]) * 4 for unit in range(4))
    shard = Shard(0, extent, 1, 1, 4096, digests)
    return ChunkRecord(i.to_bytes(4, "big") * 8, b"I" * 32, "default", 0, 16 * i, 16, (shard,))


def holder(holder_id: str, *, fenced: bool = False) -> HolderRecord:
    return HolderRecord(holder_id, "vllm", "1", "h", 7, b"I" * 32, fenced)


def make_index(path: Path) -> None:
    create_index(path, POOL, CAPACITY_BYTES)
    with open_index(path, POOL, CAPACITY_BYTES) as index:
        index.next_epoch()
        index.apply([PutHolder(holder("one"))])
        for i in range(CHUNK_COUNT):
            opening = [OpenSegment(SegmentRecord(i // 25, 1, i // 25 + 1))] if i % 25 == 0 else []
            index.apply([*opening, PutChunk(chunk(i))])


def all_chunks(index: Index) -> dict[bytes, ChunkRecord]:
    return {record.key: record for record in index.chunks_after(b"", CHUNK_COUNT * 2)}


def _open_like_the_pool(path: Path) -> str:
    scan_in_child(path, POOL, CAPACITY_BYTES, deadline_s=60)
    with open_index(path, POOL, CAPACITY_BYTES) as index:
        assert index.next_epoch() in (1, 2), "an epoch nobody wrote"
        assert {h.holder_id for h in index.holder_records()} <= {"one"}
        assert {s.segment: s.generation for s in index.segment_records()}.items() <= dict.fromkeys(range(6), 1).items()
        true = {chunk(i).key: chunk(i) for i in range(CHUNK_COUNT)}
        found = index.get_many(true)
        assert all(true.get(key) == record for key, record in found.items()), "a wrong record"
        assert all(true.get(key) == record for key, record in all_chunks(index).items()), "a wrong record"
        index.apply([OpenSegment(SegmentRecord(0, 2, 9)), PutChunk(chunk(3, generation=2)), PutHolder(holder("two"))])
        assert index.get_many([chunk(3).key]) == {chunk(3).key: chunk(3, generation=2)}
    return "whole" if len(found) == CHUNK_COUNT else "misses"


def _damaged_copies(source: Path, work: Path, seed: int, count: int) -> Iterator[tuple[int, Path]]:
    rng = random.Random(seed)
    for case in range(count):
        copy = work / f"case-{case}"
        shutil.copytree(source, copy)
        raw = bytearray((copy / "data.mdb").read_bytes())
        at = rng.randrange(64) if case % 4 == 0 else rng.randrange(len(raw))  # page headers, or anywhere
        at += rng.randrange(len(raw) // 4096) * 4096 if case % 4 == 0 else 0
        raw[at] ^= rng.randint(1, 255)
        (copy / "data.mdb").write_bytes(raw)
        yield at, copy
        shutil.rmtree(copy)


def _main(source: str, work: str, seed: str, count: str) -> None:
    for at, copy in _damaged_copies(Path(source), Path(work), int(seed), int(count)):
        print(f"byte {at}:", end=" ", flush=True)
        try:
            print(_open_like_the_pool(copy), flush=True)
        except (FormatError, MediaError) as error:
            print(f"refused: {error.message}; next step: {error.next_step}", flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
