"""A pool of three drives that is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool, PoolOptions, check_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_tending import Policy
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES, Holder
from tests.dpu.running_drives.cases import FAST, blank


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three drives: 0 in the pool's directory, 1 and 2 outside."""
    outside = [tmp_path / "one", tmp_path / "two"]
    for file in outside:
        blank(file)
    pool = tmp_path / "pool"
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, *outside])
    return pool


@pytest.fixture
def sound(path: Path) -> Iterator[None]:
    """All chunks are what they were written as, in the end; to be asked for before the pool."""
    yield
    assert check_pool(path, lambda done, total: None).damaged == ()


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    everything = PoolOptions(policy=Policy.EVERYTHING)  # what is worth it does not matter here
    with Pool.open(path, everything, drive_options=FAST) as opened:
        yield opened


@pytest.fixture
def holder(pool: Pool) -> Iterator[Holder]:
    with Holder(pool) as attached:
        yield attached
