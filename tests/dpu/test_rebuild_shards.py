"""Chunks are put together from shards of one write, all of them, in whatever order they are found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api.types import ChunkRecord, Extent
from meshfusion.dpu.rebuild_shards import ShardGatherer
from meshfusion.jbof.format import ChunkHeader

DRIVE = 1 << 24  # in a segment's number
LBA_OF_DRIVE = 1 << 40  # in a pool LBA


def shard(rank: int, *, count: int = 3, drive: int = 0, lba: int = 300, generation: int = 5) -> ChunkHeader:
    """Of the write whose first shard lies on drive 0 at block 300, in generation 5."""
    return ChunkHeader(
        pool_uuid=b"p" * 16,
        identity=b"i" * 32,
        key=b"k" * 32,
        tenant="default",
        group=1,
        rank=rank,
        shard_count=count,
        position_tokens=32,
        token_count=16,
        segment=drive * DRIVE + 2,
        generation=generation,
        lba=lba,
        unit_bytes=5000,
        unit_digests=(bytes([rank]) * 8,) * 2,
        first_lba=300,
        first_generation=5,
    )


SHARDS = (shard(0), shard(2, drive=1, lba=300, generation=9), shard(4, drive=2, lba=700, generation=1))
ALONE = replace(shard(0, count=1), first_lba=0, first_generation=0)


def gathered(*headers: ChunkHeader) -> tuple[list[ChunkRecord], ShardGatherer]:
    gatherer = ShardGatherer()
    return [record for header in headers if (record := gatherer.add(header)) is not None], gatherer


@pytest.mark.parametrize("order", [*itertools.permutations(SHARDS)])
def test_all_shards_of_a_write_are_a_chunk(order: tuple[ChunkHeader, ...]) -> None:
    (record,), gatherer = gathered(*order)
    assert (record.key, record.identity, record.tenant) == (b"k" * 32, b"i" * 32, "default")
    assert (record.group, record.position_tokens, record.token_count) == (1, 32, 16)
    assert [one.rank for one in record.shards] == [0, 2, 4]
    # A header block, two units of two blocks each.
    assert [one.extent for one in record.shards] == [
        Extent(1, 2, 300, 5, 5),
        Extent(2, DRIVE + 2, 300, 5, 9),
        Extent(3, 2 * DRIVE + 2, 700, 5, 1),
    ]
    assert all((one.payload_lba_offset, one.unit_lba_count, one.unit_bytes) == (1, 2, 5000) for one in record.shards)
    assert [one.unit_digests[0][0] for one in record.shards] == [0, 2, 4]
    assert (gatherer.waiting, gatherer.left_out) == (0, 0)


def test_one_shard_alone_is_a_chunk_where_it_has_one() -> None:
    (record,), _ = gathered(ALONE)
    assert [one.extent for one in record.shards] == [Extent(1, 2, 300, 5, 5)]


@pytest.mark.parametrize("missing", range(3))
def test_without_one_there_is_no_chunk(missing: int) -> None:
    records, gatherer = gathered(*(one for i, one in enumerate(SHARDS) if i != missing))
    assert (records, gatherer.waiting) == ([], 2)


@pytest.mark.parametrize(
    "other",
    [
        {"first_lba": 301},
        {"first_lba": 300 + LBA_OF_DRIVE},
        {"first_generation": 4},
        {"identity": b"j" * 32},
        {"key": b"l" * 32},
        {"tenant": "other"},
        {"group": 0},
        {"position_tokens": 0},
        {"token_count": 17},
        {"shard_count": 4},
    ],
)
def test_a_shard_of_another_write_does_not_fill_in(other: dict[str, object]) -> None:
    strange = replace(SHARDS[2], **other)  # type: ignore[arg-type]
    records, gatherer = gathered(*SHARDS[:2], strange)
    assert (records, gatherer.waiting, gatherer.left_out) == ([], 3, 0)
    assert gatherer.add(SHARDS[2]) is not None, "and does not stand in the way"


@pytest.mark.parametrize(
    "told",
    [
        replace(SHARDS[1], first_lba=0, first_generation=0),  # from before headers said it
        replace(SHARDS[0], first_lba=0, first_generation=0),
        replace(SHARDS[0], lba=301),  # the first, and not where the first is
        replace(SHARDS[1], segment=2, generation=5),  # not the first, and where the first is
        replace(ALONE, rank=1),
    ],
)
def test_a_shard_that_cannot_be_of_the_write_it_names_stands_for_nothing(told: ChunkHeader) -> None:
    records, gatherer = gathered(told)
    assert (records, gatherer.waiting, gatherer.left_out) == ([], 0, 1)


def test_a_rank_that_comes_twice_is_left_out() -> None:
    again = replace(SHARDS[1], lba=999)
    records, gatherer = gathered(SHARDS[1], again, SHARDS[0])
    assert (records, gatherer.waiting, gatherer.left_out) == ([], 2, 1)


@given(
    st.permutations([(write, rank) for write in range(3) for rank in range(2)]),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1))),
)
def test_writes_are_never_mixed(order: list[tuple[int, int]], lost: set[tuple[int, int]]) -> None:
    """Three writes of one chunk, some of whose shards are gone: write w lies at blocks 1000 * (w + 1) + rank * 10."""
    headers = [
        replace(shard(rank, count=2, drive=rank, lba=1000 * (write + 1) + rank * 10), first_lba=1000 * (write + 1))
        for write, rank in order
        if (write, rank) not in lost
    ]
    records, gatherer = gathered(*headers)
    whole = {write for write in range(3) if not {(write, 0), (write, 1)} & lost}
    found = [tuple(one.extent.lba for one in record.shards) for record in records]
    assert sorted(found) == [(1000 * (write + 1), 1000 * (write + 1) + 10) for write in sorted(whole)]
    assert gatherer.waiting == len(headers) - 2 * len(whole)
