"""The index on LMDB: what a transaction does, and that damage is refused, missed, or harmless, but never believed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from meshfusion.dpu import index_transaction
from meshfusion.dpu.api.types import Extent
from meshfusion.dpu.index import Index, IndexTotals
from meshfusion.dpu.index_files import create_index, open_index
from meshfusion.dpu.index_scan import scan_in_child
from meshfusion.dpu.store.effects import DeleteChunk, DeleteHolder, Effect, OpenSegment, PutChunk, PutHolder
from meshfusion.jbof.errors import FormatError, MediaError, ServiceUnavailableError
from meshfusion.jbof.segments import SegmentRecord
from tests.dpu.index_cases import CAPACITY_BYTES, CHUNK_COUNT, POOL, all_chunks, chunk, holder, make_index

OTHER_POOL = "3f0c9a4e-0000-4000-8000-000000000002"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "index"
    make_index(path)
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "index"))


def reopen(path: Path) -> Index:
    return open_index(path, POOL, CAPACITY_BYTES)


def scan(path: Path) -> IndexTotals:
    return scan_in_child(path, POOL, CAPACITY_BYTES, deadline_s=60)


def test_everything_is_there_after_opening_again(path: Path) -> None:
    with reopen(path) as index:
        assert all_chunks(index) == {chunk(i).key: chunk(i) for i in range(CHUNK_COUNT)}
        assert index.get_many([chunk(3).key, b"x" * 32]) == {chunk(3).key: chunk(3)}
        assert index.segment_records() == tuple(SegmentRecord(i, 1, i + 1) for i in range(6))
        assert index.holder_records() == (holder("one"),)
        assert (index.chunk_count(), index.epoch()) == (CHUNK_COUNT, 1)
        assert (index.next_epoch(), index.epoch()) == (2, 2)
    assert scan(path) == IndexTotals(CHUNK_COUNT, CHUNK_COUNT * 4 * 4096, 0)


def test_pages_of_chunks(path: Path) -> None:
    with reopen(path) as index:
        first = index.chunks_after(b"", 2)
        assert first == [chunk(0), chunk(1)]
        assert index.chunks_after(first[-1].key, 1) == [chunk(2)]
        assert index.chunks_after(chunk(CHUNK_COUNT - 1).key, 5) == []


def test_payload_bytes_follow_every_change(path: Path) -> None:
    changes: list[tuple[list[Effect], int]] = [  # and how many chunks there are then
        ([], CHUNK_COUNT),
        ([PutChunk(chunk(200)), PutChunk(chunk(0))], CHUNK_COUNT + 1),  # the other was there
        ([DeleteChunk(chunk(1).key, chunk(1).shards[0].extent)], CHUNK_COUNT),
        ([OpenSegment(SegmentRecord(0, 2, 7))], CHUNK_COUNT - 24),
    ]
    for effects, count in changes:
        with reopen(path) as index:
            index.apply(effects)
            assert index.payload_bytes == count * 4 * 4096
            assert index.chunk_count() == count
        with reopen(path) as index:
            assert index.payload_bytes == count * 4 * 4096, "known without adding it up"
    assert scan(path) == IndexTotals(CHUNK_COUNT - 24, (CHUNK_COUNT - 24) * 4 * 4096, 0)


def test_payload_bytes_follow_what_is_forgotten(path: Path) -> None:
    with reopen(path) as index:
        assert index.forget_drive(range(4, 1 << 24)) == 50
    with reopen(path) as index:
        assert index.payload_bytes == (CHUNK_COUNT - 50) * 4 * 4096
        damage_value(index, chunk(7).key)
    totals = scan(path)
    assert totals == IndexTotals(CHUNK_COUNT - 51, (CHUNK_COUNT - 51) * 4 * 4096, 1)
    with open_index(path, POOL, CAPACITY_BYTES, payload_bytes=totals.payload_bytes) as index:
        assert index.drop_damaged() == 1
    with reopen(path) as index:
        assert index.payload_bytes == totals.payload_bytes


def test_an_index_without_totals_says_so(path: Path) -> None:
    """Of a service that did not note them."""
    with reopen(path) as index, index._env.begin(write=True) as txn:
        txn.delete(b"payload_bytes", db=index.tables.meta)
    with reopen(path) as index:
        assert not index.has_totals
    with open_index(path, POOL, CAPACITY_BYTES, payload_bytes=7) as index:
        assert index.has_totals
        index.apply([])
    with reopen(path) as index:
        assert (index.has_totals, index.payload_bytes) == (True, 7)


def damage_value(index: Index, key: bytes) -> None:
    with index._env.begin(write=True) as txn:
        value = bytes(txn.get(key, b"", db=index.tables.chunks))
        txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=index.tables.chunks)


def test_delete_means_one_extent_of_one_generation(path: Path) -> None:
    extent = chunk(5).shards[0].extent
    with reopen(path) as index:
        index.apply([DeleteChunk(chunk(5).key, Extent(1, 0, extent.lba, extent.lba_count, generation=2))])
        index.apply([DeleteChunk(chunk(5).key, chunk(6).shards[0].extent), DeleteChunk(b"x" * 32, extent)])
        assert index.chunk_count() == CHUNK_COUNT
        index.apply([DeleteChunk(chunk(5).key, extent)])
        assert index.get_many([chunk(5).key]) == {}


def test_opening_a_segment_forgets_its_chunks_and_no_others(path: Path) -> None:
    with reopen(path) as index:
        index.apply([PutChunk(chunk(30, per_segment=10))])  # moved from segment 1 to segment 3
        index.apply([OpenSegment(SegmentRecord(1, 2, 7))])
        left = all_chunks(index)
        assert left.keys() == {chunk(i).key for i in range(CHUNK_COUNT) if not 25 <= i < 50 or i == 30}
        assert SegmentRecord(1, 2, 7) in index.segment_records()
    assert scan(path).damaged_count == 0


def test_a_chunk_with_two_shards_in_a_segment_is_in_it_once(path: Path) -> None:
    """Its segment's summary would name every one of them twice."""
    one = chunk(0)
    second = replace(one.shards[0], rank=1, extent=replace(one.shards[0].extent, lba=one.shards[0].extent.lba + 900))
    both = replace(one, shards=(one.shards[0], second))
    with reopen(path) as index:
        index.apply([PutChunk(both)])
        found = index.chunks_in(SegmentRecord(0, 1, 1))
        assert found is not None
        assert sorted(record.key for record in found) == sorted(chunk(i).key for i in range(25))
        assert both in found
        index.apply([OpenSegment(SegmentRecord(0, 2, 9))])
        assert index.chunks_in(SegmentRecord(0, 2, 9)) == []


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    impossible = holder("x" * 600)  # longer than LMDB allows a key to be
    with reopen(path) as index:
        with pytest.raises((FormatError, MediaError)):
            index.apply([PutChunk(chunk(200)), PutHolder(impossible)])
        assert (index.chunk_count(), index.payload_bytes) == (CHUNK_COUNT, CHUNK_COUNT * 4 * 4096)


def test_fenced_holders_are_kept_but_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_transaction, "_FENCED_KEPT", 10)
    with reopen(path) as index:
        for i in range(20):
            index.apply([PutHolder(holder(f"gone-{i:02}", fenced=True))])
        kept = index.holder_records()
        assert holder("one") in kept
        assert 5 <= len(kept) <= 11
        index.apply([DeleteHolder("one"), DeleteHolder("never seen")])
        assert holder("one") not in index.holder_records()


def test_a_full_index_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reopen(path) as index:
        index._env.set_mapsize(200 << 10)
        with pytest.raises(MediaError, match="full") as error:
            index.apply([PutChunk(chunk(i)) for i in range(1000, 3000)])
        assert "more capacity" in error.value.next_step
        assert index.chunk_count() == CHUNK_COUNT


def test_a_closed_index_is_an_error_not_a_crash(path: Path) -> None:
    index = reopen(path)
    index.close()
    with pytest.raises(ServiceUnavailableError, match="closed"):
        index.get_many([chunk(0).key])


def test_missing(path: Path) -> None:
    (path / "data.mdb").unlink()
    with pytest.raises(FormatError, match="missing"):
        reopen(path)
    with pytest.raises(FormatError, match="missing"):
        scan(path)


def test_of_another_pool(path: Path) -> None:
    with pytest.raises(FormatError, match=f"belongs to pool {POOL}, not to {OTHER_POOL}"):
        open_index(path, OTHER_POOL, CAPACITY_BYTES)
    with reopen(path) as index:
        assert index.chunk_count() == CHUNK_COUNT


def test_of_another_version(path: Path) -> None:
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"index_version", b"99")
    with pytest.raises(FormatError, match="version 99, this is version 2"):
        reopen(path)


def test_of_something_else(path: Path) -> None:
    (path / "data.mdb").write_bytes(os.urandom(1 << 16))
    with pytest.raises(FormatError, match="damaged"):
        scan(path)


@pytest.mark.parametrize("kept", [0, 100, 4096, 8192, 0.3, 0.7, 0.95])
def test_truncated(path: Path, kept: float) -> None:
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", int(size * kept) if kept < 1 else int(kept))
    with pytest.raises(FormatError, match=r"truncated|damaged") as error:
        scan(path)
    assert "mfctl pool rebuild-index" in error.value.next_step


def test_a_file_that_ends_before_lmdbs_last_page_is_whole(tmp_path: Path) -> None:
    """Pages that a transaction took and gave back are never written: LMDB counts them, the file lacks them."""
    path = tmp_path / "index"
    create_index(path, POOL, CAPACITY_BYTES)
    with reopen(path) as index:
        for batch in range(0, 400, 100):
            index.apply([PutChunk(chunk(i)) for i in range(batch, batch + 100)])
            gone = [DeleteChunk(chunk(i).key, chunk(i).shards[0].extent) for i in range(1000, 1100)]
            index.apply([*(PutChunk(chunk(i)) for i in range(1000, 1100)), *gone])
    assert scan(path).chunk_count == 400


def test_flipped_bytes_never_crash_or_lie(path: Path, tmp_path: Path) -> None:
    _open_damaged_copies(path, tmp_path / "copies", seed=1, count=12)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_flipped_bytes_never_crash_or_lie(path: Path, tmp_path: Path) -> None:
    _open_damaged_copies(path, tmp_path / "copies", seed=2, count=500)


def _open_damaged_copies(path: Path, copies: Path, *, seed: int, count: int) -> None:
    copies.mkdir()
    command = [sys.executable, "-m", "tests.dpu.index_cases", str(path), str(copies), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-300:]}\n{done.stderr[-2000:]}"
    assert len(done.stdout.splitlines()) == count
