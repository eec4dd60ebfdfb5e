"""What a new life of the service tells its curator: chunks of all drives, also of those that come back later."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from meshfusion.dpu import pool_ticker
from meshfusion.dpu.api.drive_types import RemoveDriveRequest
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_tending import Policy
from meshfusion.dpu.store.learning_curator import LearningCurator
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu.pool_cases import FULL_SEGMENT_UNITS, SEGMENT_BYTES, SIZE_BYTES, Holder
from tests.host.support.waiting import until

FAST = DriveOptions(check_interval_s=0.02, probation_s=0.05)
CHUNKS = 9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three drives, with a full segment for each chunk."""
    pool = tmp_path / "pool"
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, None, None])
    with Pool.open(pool, PoolOptions(policy=Policy.EVERYTHING)) as opened, Holder(opened) as holder:
        for i in range(CHUNKS):
            assert holder.put(i, FULL_SEGMENT_UNITS)
    return pool


def on_drives(pool: Pool) -> Counter[int]:
    """Chunks by drive, as the index has them."""
    chunks = pool._index.chunks_after(b"", CHUNKS + 1)
    return Counter(drive_of_segment(chunk.shards[0].extent.segment) for chunk in chunks)


def known(pool: Pool) -> Counter[int]:
    """Chunks by drive, as the curator has them."""
    curator = pool._store._curator
    assert isinstance(curator, LearningCurator)
    with pool._mutex:
        found: Counter[int] = Counter()
        for segment in curator._members:
            found[drive_of_segment(segment)] += curator._members.count_in(segment)
        return +found


@pytest.mark.parametrize("goes_again", [False, True])
def test_chunks_of_a_drive_that_was_away_are_adopted_when_it_is_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, goes_again: bool
) -> None:
    monkeypatch.setattr(pool_ticker, "TICK_S", 0.01)
    away, elsewhere = path / "data.1", path / "elsewhere"
    away.rename(elsewhere)
    with Pool.open(path, drive_options=FAST) as pool:
        stored = on_drives(pool)
        assert stored.total() == CHUNKS
        assert stored[1] > 0
        others = +(stored - Counter({1: CHUNKS}))
        until(lambda: known(pool) == others, what="for what is here")
        elsewhere.rename(away)
        until(lambda: known(pool) == stored, what="for what was away")
        if goes_again:
            away.rename(elsewhere)
            until(lambda: not pool._drives.shelf.is_offered(1), what="for its loss")
            elsewhere.rename(away)
            until(lambda: pool._drives.shelf.is_offered(1), what="for its return")
            until(lambda: not pool._parts.ticker._adoption._waiting, what="for nothing more")
            assert known(pool) == stored, "once"


def test_a_drive_that_is_removed_while_it_is_away_is_not_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments are the pool's no more; what is left of them must not stop the adoption of others."""
    monkeypatch.setattr(pool_ticker, "TICK_S", 0.01)
    (path / "data.1").unlink()
    with Pool.open(path, drive_options=FAST) as pool:
        others = +(on_drives(pool) - Counter({1: CHUNKS}))
        until(lambda: known(pool) == others, what="for what is here")
        pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=5)
        until(lambda: on_drives(pool) == others, what="for its removal")
        assert known(pool) == others
