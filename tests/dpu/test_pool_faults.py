"""Full disks, read-only directories, and kill -9 at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.pool import Pool, check_pool
from meshfusion.jbof.errors import MediaError
from tests.dpu.pool_cases import (
    DEADLINE_S,
    FULL_SEGMENT_UNITS,
    SEGMENT_COUNT,
    SIZE_BYTES,
    Holder,
    make_pool,
)

ROOT = Path(__file__).parents[2]
KILLS = 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a filesystem of so many bytes."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        at = tmp_path / f"disk-{len(mounted)}"
        at.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(at)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs hardware: a machine where this user may mount a tmpfs")
        mounted.append(at)
        return at

    yield mount
    for at in mounted:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@pytest.mark.parametrize("spare_bytes", [-(1 << 20), 0, 4096, 64 << 10, 80 << 10])
def test_creating_on_a_full_disk_leaves_nothing(small_disk: Callable[[int], Path], spare_bytes: int) -> None:
    """In a child, because LMDB on a full disk is known to kill its process."""
    disk = small_disk(SIZE_BYTES + spare_bytes)
    code = """
import pathlib, sys
from meshfusion.jbof.errors import MediaError
from tests.dpu.pool_cases import make_pool
try:
    make_pool(pathlib.Path(sys.argv[1]) / "pool")
except MediaError as error:
    print(error)
"""
    child = subprocess.run(
        [sys.executable, "-c", code, str(disk)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert child.returncode == 0, child.stderr
    assert "No space left" in child.stdout
    assert "next step" in child.stdout
    assert list(disk.iterdir()) == []


def test_a_pool_on_a_disk_that_fills_up_keeps_answering(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(SIZE_BYTES + (1 << 20))
    make_pool(disk / "pool")
    with Pool.open(disk / "pool") as pool, Holder(pool) as holder:
        assert holder.put(0)
        _fill_disk(disk / "filler")
        for i in range(1, 30):
            with contextlib.suppress(MediaError):
                holder.put(i, 1)
        assert len(holder.match(0).chunks) == 1
        (disk / "filler").unlink()
        with pool._mutex:
            pool._store.saves._refused_until_s = 0.0
        assert holder.put(100, 1)
    with Pool.open(disk / "pool") as pool:
        assert pool.status(deadline_s=1).committed_chunk_count > 0


def test_a_read_only_disk(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(SIZE_BYTES + (1 << 20))
    make_pool(disk / "pool")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(MediaError, match="Read-only"):
        make_pool(disk / "other")
    with pytest.raises(MediaError, match="locked"):
        Pool.open(disk / "pool")


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What is offered afterwards is right, counts add up, and no space is lost."""
    path = tmp_path / "pool"
    make_pool(path)
    rng = random.Random(7)
    for kill in range(KILLS):
        commit_and_kill(path, kill, after_s=rng.uniform(0.0, 0.25))
        if kill % 2:  # each takes two interpreters to start
            report = check_pool(path, lambda checked, total: None)
            assert report.damaged == ()
            assert report.index_damaged == 0
    with Pool.open(path) as pool:
        assert pool.status(deadline_s=1).committed_chunk_count == report.chunks_checked > 0
        fill_completely(pool)


def _fill_disk(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def commit_and_kill(path: Path, seed: int, *, after_s: float) -> None:
    command = [sys.executable, "-m", "tests.dpu.pool_cases", str(path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL


def fill_completely(pool: Pool) -> None:
    """Every segment can be had at once, so nothing of the killed holders is left."""
    with Holder(pool) as holder:
        results = [holder.reserve(1000 + i, FULL_SEGMENT_UNITS) for i in range(SEGMENT_COUNT)]
        assert [result.outcome for result in results] == [ReserveOutcome.GRANTED] * SEGMENT_COUNT
        assert len({result.extents[0].segment for result in results}) == SEGMENT_COUNT
        assert holder.reserve(2000).outcome is ReserveOutcome.NO_SPACE
        assert holder.commit(results[0], holder.write(1000, results[0]))
    status: api.PoolStatus = pool.status(deadline_s=DEADLINE_S)
    assert (status.grant_count, status.lease_count, status.committed_chunk_count) == (0, 0, 1)
    assert status.segments_free + status.segments_open + status.segments_sealed == SEGMENT_COUNT
