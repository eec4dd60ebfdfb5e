"""A service that is killed while chunks are moved loses none of them: neither for its next life, nor for an index that
is made anew from the medium, where a moved chunk lies twice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool, check_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.dpu.tidier import Tidier
from tests.dpu.pool_cases import DEADLINE_S, SEGMENT_BYTES, SIZE_BYTES, Holder, key
from tests.dpu.tidy_until_killed import CHUNKS, KEPT, OPTIONS


@pytest.fixture(params=[1, 2], ids=["one shard", "two shards"])
def shards(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def path(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As many drives as shards."""
    outside = [tmp_path / f"drive{number}" for number in range(1, shards)]
    for file in outside:
        file.touch()
        os.truncate(file, SIZE_BYTES)
    pool = tmp_path / "pool"
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, *outside])
    monkeypatch.setattr(Tidier, "start", lambda _: None)
    return pool


@pytest.mark.parametrize("point", ["part", "copied", "moved", "given up"])
def test_a_kill_while_chunks_move_costs_none(path: Path, shards: int, point: str) -> None:
    command = [sys.executable, "-m", "tests.dpu.tidy_until_killed", str(path), point, str(shards)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    stayed = found(path)
    assert set(KEPT) <= stayed, "what is moved is somewhere at any time"
    assert (stayed == set(CHUNKS)) == (point != "given up")
    shutil.rmtree(path / "index")
    rebuild_index(path)
    assert found(path) == stayed


def found(path: Path) -> set[int]:
    """Whole and as they were written."""
    report = check_pool(path, lambda checked, total: None)
    assert (report.damaged, report.segments_damaged) == ((), ())
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        there = {i for i in CHUNKS if holder.match_alone(i).chunks}
        assert report.chunks_checked == len(there)
        assert all(pool.get_chunk(key(i), deadline_s=DEADLINE_S) is not None for i in there)
    return there
