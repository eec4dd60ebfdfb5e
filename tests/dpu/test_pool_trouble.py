"""A pool whose medium or index cannot be written while it is served: it says so, refuses saves, serves what it has, and
goes on by itself when the cause is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from meshfusion.dpu import pool_ticker
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.drives_keeper import DrivesKeeper
from meshfusion.dpu.index_errors import index_error
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_holders import PoolHolders
from meshfusion.dpu.pool_inspect import check_pool
from meshfusion.dpu.pool_tending import Policy
from meshfusion.dpu.pool_ticker import Ticker
from meshfusion.dpu.tidier import Tidier
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from tests.dpu.pool_cases import DEADLINE_S, FULL_SEGMENT_UNITS, SIZE_BYTES, Holder, make_pool
from tests.host.support.waiting import until
from tests.jbof.loop_devices import loop_device_of, privileged

KEPT = 2  # full segments, saved before there is trouble


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_pool(tmp_path / "pool")
    return tmp_path / "pool"


def reason(pool: Pool) -> str:
    return pool.status(deadline_s=DEADLINE_S).saves_stopped_reason


def pause_is_over(pool: Pool) -> None:
    """As if its seconds had passed."""
    with pool._mutex:
        pool._store.saves._refused_until_s = 0.0


def fill(holder: Holder) -> None:
    for i in range(KEPT):
        assert holder.put(i, FULL_SEGMENT_UNITS)


def put_many(holder: Holder) -> None:
    """More than LMDB has pages for, and fewer than would reclaim what is to be kept."""
    for i in range(10, 40):
        assert holder.put(i, 1)


def fill_disk(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def assert_stopped(pool: Pool, holder: Holder, *words: str) -> None:
    """And what was there is served."""
    for word in (*words, "(for ", "failed"):
        assert word in reason(pool), (word, reason(pool))
    pause_s = pool._store.saves._refused_until_s - pool._clock()
    assert 0 < pause_s <= 10.0
    assert holder.reserve(90, 1).outcome is ReserveOutcome.NO_SPACE
    assert len(holder.match(*range(KEPT)).chunks) == KEPT
    assert dict(pool.status(deadline_s=DEADLINE_S).counters)["saves_stopped_ms"] > 0


def assert_recovers(pool: Pool, holder: Holder) -> None:
    pause_is_over(pool)
    assert "the next one is tried" in reason(pool), "nobody knows yet"
    assert holder.put(50, FULL_SEGMENT_UNITS)
    assert reason(pool) == ""
    assert "saves_stopped_ms" not in dict(pool.status(deadline_s=DEADLINE_S).counters)
    assert len(holder.match(*range(KEPT)).chunks) == KEPT


@pytest.mark.parametrize("operation", ["write_from", "flush"])
@pytest.mark.parametrize(
    ("code", "fault", "what_to_do"),
    [
        (errno.EIO, MediaFault.IO, "dmesg"),
        (errno.ENOSPC, MediaFault.FULL, "Free space"),
        (errno.EROFS, MediaFault.READ_ONLY, "writable"),
    ],
)
def test_a_medium_that_takes_no_header(
    path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, code: int, fault: MediaFault, what_to_do: str
) -> None:
    def fail(*_: object) -> None:
        raise DataFileError(fault, "writing failed", Path("data"), errno_=code)

    with Pool.open(path) as pool, Holder(pool) as holder:
        fill(holder)
        with monkeypatch.context() as patch:
            patch.setattr(pool._drives._open[0].file._data, operation, fail)
            for _ in range(2):
                pause_is_over(pool)
                with pytest.raises(MediaError, match=errno.errorcode[code]):
                    holder.reserve(10, FULL_SEGMENT_UNITS)
            assert_stopped(pool, holder, errno.errorcode[code], what_to_do, "2 failed")
            pause_is_over(pool)
            Holder(pool).leave()
            assert errno.errorcode[code] in reason(pool), "that the index works says nothing of the medium"
        assert_recovers(pool, holder)
    assert check_pool(path, lambda checked, total: None).damaged == ()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_what_the_system_says_of_the_index_is_not_damage(code: int) -> None:
    """LMDB has no types for these."""
    error = index_error("index", lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}"))
    assert isinstance(error, MediaError)
    assert "rebuild" not in error.next_step
    damage = index_error("index", lmdb.Error("mdb_get: MDB_BAD_TXN"))
    assert isinstance(damage, FormatError)


def test_an_index_that_is_full(path: Path) -> None:
    with Pool.open(path) as pool, Holder(pool) as holder:
        fill(holder)
        whole = pool._index._env.info()["map_size"]
        used = (pool._index._env.info()["last_pgno"] + 1) * 4096
        pool._index._env.set_mapsize(used)
        with pool._index._env.begin():  # so that LMDB cannot use again what it frees
            with pytest.raises(MediaError, match="is full"):
                put_many(holder)
            assert_stopped(pool, holder, "is full", "more capacity")
        pool._index._env.set_mapsize(whole)
        assert_recovers(pool, holder)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A small filesystem of its own on a loop device: where it is mounted, and the device."""
    image, at = tmp_path / "image", tmp_path / "mounted"
    image.touch()
    os.truncate(image, SIZE_BYTES + (24 << 20))
    at.mkdir()
    privileged("mkfs.ext4", "-q", "-O", "^has_journal", str(image))
    with loop_device_of(image) as device:
        privileged("mount", "-o", "errors=remount-ro", str(device), str(at))
        try:
            yield at, device
        finally:
            subprocess.run(["umount", str(at)], check=True)


def test_a_filesystem_that_turns_read_only(ext4: tuple[Path, Path]) -> None:
    """As the kernel makes it when it meets an error there; it lasts until it is mounted anew."""
    at, device = ext4
    make_pool(at / "pool")
    trigger = Path("/sys/fs/ext4", device.name, "trigger_fs_error")
    if not trigger.exists():
        pytest.skip("needs hardware: a kernel whose ext4 has trigger_fs_error")
    with Pool.open(at / "pool") as pool:
        holder = Holder(pool)
        fill(holder)
        trigger.write_text("a test")
        with pytest.raises(MediaError, match="Read-only"):
            holder.reserve(10, FULL_SEGMENT_UNITS)
        assert_stopped(pool, holder, "Read-only", "dmesg", "mount it writable")
        os.close(holder.lock)
    assert check_pool(at / "pool", lambda checked, total: None).damaged == ()
    subprocess.run(["umount", str(at)], check=True)
    subprocess.run(["e2fsck", "-fy", str(device)], check=False, capture_output=True)
    privileged("mount", str(device), str(at))
    with Pool.open(at / "pool") as pool, Holder(pool) as holder:
        assert len(holder.match(*range(KEPT)).chunks) == KEPT
        assert holder.put(10, FULL_SEGMENT_UNITS)


def test_a_filesystem_that_fills_up(ext4: tuple[Path, Path]) -> None:
    """The index lies on it; the data has its space already."""
    at, _ = ext4
    make_pool(at / "pool")
    with Pool.open(at / "pool") as pool, Holder(pool) as holder:
        fill(holder)
        fill_disk(at / "filler")
        with pool._index._env.begin():  # so that LMDB cannot use again what it frees
            with pytest.raises(MediaError, match="No space"):
                put_many(holder)
            assert_stopped(pool, holder, "No space", "free space on its filesystem")
        (at / "filler").unlink()
        assert_recovers(pool, holder)
    assert check_pool(at / "pool", lambda checked, total: None).damaged == ()


def test_a_device_that_turns_read_only_and_back(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(SIZE_BYTES))
    with loop_device_of(tmp_path / "data") as device:
        make_pool(tmp_path / "pool", device)
        with Pool.open(tmp_path / "pool") as pool, Holder(pool) as holder:
            fill(holder)
            privileged("blockdev", "--setro", str(device))
            try:
                with pytest.raises(MediaError, match="EPERM"):
                    holder.reserve(10, FULL_SEGMENT_UNITS)
                assert_stopped(pool, holder, "EPERM", "writable")
            finally:
                privileged("blockdev", "--setrw", str(device))
            assert_recovers(pool, holder)


def test_a_sparse_file_whose_disk_fills_up(tmp_path: Path) -> None:
    """Where a filesystem cannot set space aside, an opening finds the disk full."""
    data = tmp_path / "small"
    data.mkdir()
    privileged("mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES // 2}", "tmpfs", str(data))
    try:
        (data / "data").touch()
        os.truncate(data / "data", SIZE_BYTES)
        make_pool(tmp_path / "pool", data / "data")
        with Pool.open(tmp_path / "pool") as pool, Holder(pool) as holder:
            fill(holder)
            fill_disk(data / "filler")
            with pytest.raises(MediaError, match="ENOSPC"):
                holder.reserve(10, FULL_SEGMENT_UNITS)
            assert_stopped(pool, holder, "ENOSPC", "Free space")
            (data / "filler").unlink()
            assert_recovers(pool, holder)
        assert check_pool(tmp_path / "pool", lambda checked, total: None).damaged == ()
    finally:
        subprocess.run(["umount", "--lazy", str(data)], check=True)


def test_a_tick_that_fails_is_told_and_the_next_one_comes(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks: list[float] = []

    def fail(now_s: float) -> None:
        ticks.append(now_s)
        raise KeyError("as of a bug")

    monkeypatch.setattr(pool_ticker, "TICK_S", 0.01)
    with Pool.open(path) as pool:
        monkeypatch.setattr(pool._store, "tend", fail)
        until(lambda: len(ticks) > 2, what="for ticks")
    assert "a part of the pool's tick failed" in caplog.text


def test_spent_budgets_are_told_and_pass(path: Path) -> None:
    """A quarter of four pools' worth a day is a pool's six segments, and the rest comes back in 24 hours."""
    now_s = [0.0]
    options = PoolOptions(drive_writes_per_day=4.0, policy=Policy.EVERYTHING)
    with Pool.open(path, options, clock=lambda: now_s[0]) as pool, Holder(pool) as holder:
        for i in range(6):
            assert holder.put(i, FULL_SEGMENT_UNITS)
        assert "drive_writes_per_day" in reason(pool)
        assert "in 80 min" in reason(pool), "18 segments come back in 24 hours"
        assert holder.reserve(6, FULL_SEGMENT_UNITS).outcome is ReserveOutcome.NO_SPACE
    with Pool.open(path, options, clock=lambda: now_s[0]) as pool, Holder(pool) as holder:
        assert "in 80 min" in reason(pool), "a restart forgets nothing"
        now_s[0] += 4801.0
        assert reason(pool) == ""
        assert holder.put(6, FULL_SEGMENT_UNITS)


@pytest.mark.parametrize("begin", [Ticker, Tidier, DrivesKeeper, PoolHolders])
def test_what_fails_to_begin_leaves_nothing_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: type[object]
) -> None:
    """A thread that goes on, of a pool that was given back, would write beside its next owner."""
    make_pool(tmp_path / "p")

    def fail(self: object) -> None:
        raise RuntimeError("can't start new thread")

    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(begin, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            Pool.open(tmp_path / "p")
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()
    with Pool.open(tmp_path / "p") as pool, Holder(pool) as holder:
        assert holder.put(1)
