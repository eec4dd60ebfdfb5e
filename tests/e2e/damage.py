"""Spoiling a pool on purpose, and knowing exactly what was spoilt."""

from __future__ import annotations

from pathlib import Path

from meshfusion.dpu.api.types import ChunkRecord, Shard
from meshfusion.dpu.pool import check_pool
from meshfusion.dpu.pool_inspect import open_for_reading
from meshfusion.jbof.format import LBA_BYTES


def all_chunks(pool: Path) -> list[ChunkRecord]:
    """Every chunk of every KV group in ``pool``, which may be in use."""
    with open_for_reading(pool) as (_, _, index):
        return list(index.chunks_after(b"", 10_000))


def chunks_of(pool: Path, token_count: int) -> list[ChunkRecord]:
    """The chunks of the one prompt in ``pool`` that has exactly ``token_count`` tokens in whole chunks, in order.

    The on-media index does not say which chunks belong together; neighbours on the medium do, since one request
    saves in order into one open segment.
    """
    with open_for_reading(pool) as (_, _, index):
        records = sorted(index.chunks_after(b"", 1000), key=lambda record: record.shards[0].extent.lba)
    runs: list[list[ChunkRecord]] = []
    for record in records:
        if record.position_tokens == 0:
            runs.append([])
        runs[-1].append(record)
    (run,) = [run for run in runs if sum(record.token_count for record in run) == token_count]
    assert [record.position_tokens for record in run] == [i * run[0].token_count for i in range(len(run))]
    return run


def unit_offset_bytes(shard: Shard, unit: int) -> int:
    return (shard.extent.lba + shard.payload_lba_offset + unit * shard.unit_lba_count) * LBA_BYTES


def flip(pool: Path, record: ChunkRecord, unit: int, *, count: int = 1) -> None:
    """Invert ``count`` bytes in the middle of a unit."""
    (shard,) = record.shards
    with (pool / "data").open("r+b") as data:
        at = unit_offset_bytes(shard, unit) + shard.unit_bytes // 2
        data.seek(at)
        former = data.read(count)
        data.seek(at)
        data.write(bytes(byte ^ 0xFF for byte in former))


def swap_units(pool: Path, one: ChunkRecord, other: ChunkRecord) -> None:
    """Exchange all units of two chunks: plausible KV, of other tokens."""
    (mine,), (theirs,) = one.shards, other.shards
    with (pool / "data").open("r+b") as data:
        for unit in range(len(mine.unit_digests)):
            places = [unit_offset_bytes(shard, unit) for shard in (mine, theirs)]
            contents = []
            for place in places:
                data.seek(place)
                contents.append(data.read(mine.unit_bytes))
            for place, content in zip(places, reversed(contents), strict=True):
                data.seek(place)
                data.write(content)


def damaged_chunks(pool: Path) -> int:
    """What ``mfctl pool check`` finds."""
    report = check_pool(pool, lambda done, total: None)
    assert report.index_damaged == 0
    return len(report.damaged)
