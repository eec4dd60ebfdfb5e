"""When a large index counts as fit to be read: whole at once, or while it is served, and who learns of damage."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from meshfusion.dpu import index_proof
from meshfusion.dpu.index import IndexTotals
from meshfusion.dpu.index_proof import IndexProof
from meshfusion.dpu.index_scan import IndexScan
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_inspect import inspect_pool
from meshfusion.jbof.errors import FormatError
from tests.dpu.index_cases import CAPACITY_BYTES, CHUNK_COUNT, POOL, make_index
from tests.dpu.pool_cases import DEADLINE_S, UNIT_BYTES, Holder, make_pool
from tests.host.support.waiting import until

WHOLE = IndexTotals(CHUNK_COUNT, CHUNK_COUNT * 4 * 4096, 0)
MARK = "index.unproven"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "index"
    make_index(path)
    return path


class HeldScan(IndexScan):
    """Ends when it is told to, as a scan of a large index would. ``damage``: what it finds."""

    may_end = threading.Event()
    damage: FormatError | None = None

    def wait(self, timeout_s: float | None) -> IndexTotals | None:
        if not self.may_end.wait(timeout_s):
            return None
        if self.damage is not None:
            raise self.damage
        return super().wait(None)

    def stop(self) -> None:
        super().stop()
        self.may_end.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    monkeypatch.setattr(HeldScan, "may_end", threading.Event())
    monkeypatch.setattr(index_proof, "IndexScan", HeldScan)
    return HeldScan.may_end


def scans_under_way(pool: Pool) -> int:
    return dict(pool.status(deadline_s=DEADLINE_S).counters).get("index_scans_under_way", 0)


def test_a_small_index_is_proven_before_anything_else(index: Path) -> None:
    proof = IndexProof.begun(index, POOL, CAPACITY_BYTES, first_look_s=60.0)
    assert (proof.totals, proof.payload_bytes) == (WHOLE, WHOLE.payload_bytes)
    assert not (index.parent / MARK).exists()
    proof.close()


def test_a_large_one_is_proven_later(index: Path, held: threading.Event) -> None:
    proof = IndexProof.begun(index, POOL, CAPACITY_BYTES, first_look_s=0.0)
    assert proof.totals is None
    assert (index.parent / MARK).exists()
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    proof.watch(told.put, told.put)
    held.set()
    assert told.get(timeout=DEADLINE_S) == WHOLE
    assert not (index.parent / MARK).exists()
    proof.close()
    assert told.empty()


def test_a_proper_end_leaves_no_mark_and_tells_nothing(index: Path, held: threading.Event) -> None:
    proof = IndexProof.begun(index, POOL, CAPACITY_BYTES, first_look_s=0.0)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    proof.watch(told.put, told.put)
    proof.close()
    assert told.empty()
    assert not (index.parent / MARK).exists()
    IndexProof.begun(index, POOL, CAPACITY_BYTES, first_look_s=0.0).close()
    assert not (index.parent / MARK).exists(), "nor one that nobody watched"


def test_whoever_was_killed_meanwhile_has_the_next_wait(index: Path, held: threading.Event) -> None:
    IndexProof.begun(index, POOL, CAPACITY_BYTES, first_look_s=0.0)  # and no close
    held.set()
    proof = IndexProof.begun(index, POOL, CAPACITY_BYTES, first_look_s=0.0)
    assert proof.totals == WHOLE
    assert not (index.parent / MARK).exists()


def test_a_pool_serves_while_its_index_is_looked_through(tmp_path: Path, held: threading.Event) -> None:
    make_pool(tmp_path / "p")
    with Pool.open(tmp_path / "p") as pool, Holder(pool) as holder:
        for i in range(2):
            assert holder.put(i, 3)
    told: queue.SimpleQueue[FormatError] = queue.SimpleQueue()
    with Pool.open(tmp_path / "p", damaged=told.put, first_look_s=0.0) as pool, Holder(pool) as holder:
        status = pool.status(deadline_s=DEADLINE_S)
        assert scans_under_way(pool) == 1
        assert (status.committed_chunk_count, status.committed_payload_bytes) == (2, 6 * UNIT_BYTES)
        assert len(holder.match(0, 1).chunks) == 2
        assert holder.put(2, 1)
        held.set()
        until(lambda: not scans_under_way(pool), limit_s=DEADLINE_S)
    assert told.empty()


def test_damage_found_while_serving_is_told_and_met_by_the_next(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldScan, "damage", FormatError("the index is damaged", next_step="rebuild"))
    make_pool(tmp_path / "p")
    told: queue.SimpleQueue[FormatError] = queue.SimpleQueue()
    data = PoolLayout(tmp_path / "p").index / "data.mdb"
    whole = data.read_bytes()
    with Pool.open(tmp_path / "p", damaged=told.put, first_look_s=0.0):
        held.set()
        assert told.get(timeout=DEADLINE_S) is HeldScan.damage
    assert (tmp_path / "p" / MARK).exists(), "also after a proper end"
    data.write_bytes(whole[:8192] + os.urandom(len(whole) - 8192))
    with pytest.raises(FormatError, match=r"damaged|truncated"):
        Pool.open(tmp_path / "p", damaged=told.put, first_look_s=0.0)


def test_without_anybody_to_tell_the_whole_comes_first(tmp_path: Path, held: threading.Event) -> None:
    make_pool(tmp_path / "p")
    with Pool.open(tmp_path / "p", first_look_s=0.0) as pool:
        assert not scans_under_way(pool)


def test_an_index_that_does_not_know_its_totals_is_looked_through_first(tmp_path: Path, held: threading.Event) -> None:
    make_pool(tmp_path / "p")
    with Pool.open(tmp_path / "p") as pool, Holder(pool) as holder:
        assert holder.put(0, 3)
    index = PoolLayout(tmp_path / "p").index
    with lmdb.open(str(index), max_dbs=8) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.delete(b"payload_bytes")
    with Pool.open(tmp_path / "p", damaged=lambda error: None, first_look_s=0.0) as pool:
        assert pool.status(deadline_s=1).committed_payload_bytes == 3 * UNIT_BYTES
        assert not scans_under_way(pool)
    assert not (tmp_path / "p" / MARK).exists()


def test_status_of_a_large_pool_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pool(tmp_path / "p")
    with Pool.open(tmp_path / "p") as pool, Holder(pool) as holder:
        assert holder.put(0, 3)
    assert dict(inspect_pool(tmp_path / "p").counters)["index_entries_damaged"] == 0
    monkeypatch.setattr("meshfusion.dpu.pool_inspect.FIRST_LOOK_S", 0.0)
    status = inspect_pool(tmp_path / "p")
    assert (status.committed_chunk_count, status.committed_payload_bytes) == (1, 3 * UNIT_BYTES)
    assert "index_entries_damaged" not in dict(status.counters)


def test_a_scan_ends_with_whoever_began_it(tmp_path: Path) -> None:
    """A reader that stays keeps LMDB from using again what is freed meanwhile."""
    os.mkfifo(tmp_path / "data.mdb")  # opening it takes for ever
    code = """
import sys, pathlib
from meshfusion.dpu.index_scan import IndexScan
print(IndexScan(pathlib.Path(sys.argv[1]), "pool", 1 << 26)._child.pid, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        scan = int(parent.stdout.readline())
        assert lives(scan)
        parent.kill()
    until(lambda: not lives(scan), limit_s=DEADLINE_S)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
