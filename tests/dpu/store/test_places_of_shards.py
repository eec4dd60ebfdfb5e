"""A chunk of several shards while the store allots places for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshfusion.dpu.api import types as api
from tests.dpu.store.driver import GEOMETRY, OPTIONS, Driver, item, key

GRANTED, NO_SPACE = api.ReserveOutcome.GRANTED, api.ReserveOutcome.NO_SPACE


@pytest.fixture
def pool() -> Driver:
    driver = Driver()
    driver.attach("one", rank_count=3)
    return driver


def of_ranks(i: int, *units: int) -> api.ReserveItem:
    return replace(item(i), shards=tuple(api.ShardSize(rank, 4096, n) for rank, n in enumerate(units)))


def test_a_segment_that_holds_a_shard_of_the_item_is_not_reclaimed_for_another_shard_of_it(pool: Driver) -> None:
    """Rule 2 and 3: the first shard's place must not be given away under its writer."""
    for i in range(3):  # segments 0 to 2 are full
        pool.put("one", item(i, units=9))
    pool.put("one", item(3, units=4))  # segment 3 is half full, and open
    pool.now_s = 5.0
    for i in (1, 2):  # hits, later than the opening of the fourth; nobody reads chunk 0 (the oldest) or 3
        pool.store.segments.used(i, pool.now_s)
    lease = pool.match("one", 0)  # and a reader holds segment 0 meanwhile ...
    assert lease.chunk_count == 1
    pool.match_groups("one", api.GroupKeys(0, (key(0), key(1)), (0, 0)))  # ... and 1
    # Shard 0 fits in what is left of segment 3; shard 1 takes segment 2; for shard 2 segment 3 is the oldest.
    (result,) = pool.reserve("one", of_ranks(9, 4, 9, 9))
    assert result.outcome is NO_SPACE
    assert [i for i in range(4) if pool.store.is_readable(pool.chunks[key(i)])] == [0, 1, 2, 3]


def test_an_item_that_cannot_be_placed_costs_nothing_that_is_stored(pool: Driver) -> None:
    """More shards than the pool has segments: nothing can come of it, and nothing should go for it."""
    for i in range(4):
        pool.put("one", item(i, units=9))
    ranks = GEOMETRY.segment_count + 1
    (result,) = pool.reserve("one", of_ranks(9, *([9] * ranks)))
    assert result.outcome is NO_SPACE
    readable = [i for i in range(4) if pool.store.is_readable(pool.chunks[key(i)])]
    assert readable == [0, 1, 2, 3]


def test_random_items_of_many_shards_keep_their_places(pool: Driver) -> None:
    """Whatever is reserved: places of live grants never overlap, nor go to another generation."""
    for seed in range(300):
        rng = random.Random(seed)
        driver = Driver(replace(OPTIONS, quarantine_max_fraction=1.0))
        driver.attach("one", rank_count=4)
        live: dict[str, tuple[api.Extent, ...]] = {}
        for number in range(60):
            driver.now_s += rng.random()
            if rng.random() < 0.3:
                driver.store.segments.used(rng.randrange(4), driver.now_s)
            batch = [
                of_ranks(number * 3 + n, *(rng.randint(1, 9) for _ in range(rng.randint(1, 5))))
                for n in range(rng.randint(1, 2))
            ]
            for result in driver.reserve("one", *batch):
                if result.outcome is GRANTED:
                    live[result.grant_id] = result.extents
            blocks = [lba for extents in live.values() for e in extents for lba in range(e.lba, e.lba + e.lba_count)]
            assert len(blocks) == len(set(blocks)), seed
            for extents in live.values():
                for e in extents:
                    assert driver.store.segments.is_readable(e.segment, e.generation), seed
            while live and rng.random() < 0.6:
                grant_id = rng.choice(sorted(live))
                driver.abort("one", grant_id)
                del live[grant_id]
        driver.abort("one", *live)
        assert all(driver.store.segments.pins(i) == (0, 0) for i in range(4)), seed
