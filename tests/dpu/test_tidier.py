"""Segments are given up ahead of need on a real pool, and what is worth it in them lies elsewhere then, unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from meshfusion.dpu import tidier
from meshfusion.dpu.api import types as api
from meshfusion.dpu.chunk_mover import MovingMedium
from meshfusion.dpu.pool import Pool, PoolOptions, check_pool
from meshfusion.dpu.pool_medium import FileMedium
from meshfusion.dpu.store.curator import WritesEverything
from meshfusion.dpu.store.tidying import Move
from meshfusion.dpu.tidier import Tidier
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from tests.dpu.pool_cases import DEADLINE_S, Holder, key, make_pool
from tests.host.support.waiting import until

OPTIONS = PoolOptions(free_fraction=0.5)  # three of six


class KeepsSome(WritesEverything):
    """Chunks ``kept`` are worth writing again."""

    def __init__(self, *kept: int) -> None:
        self.kept = {key(i) for i in kept}

    def worth_keeping(
        self, now_s: float, chunks: Sequence[api.ChunkRecord], allowed_bytes: int
    ) -> list[api.ChunkRecord]:
        return [chunk for chunk in chunks if chunk.key in self.kept]


def keep(patch: pytest.MonkeyPatch, *kept: int) -> KeepsSome:
    """Pools that are opened from now on have a curator to which these are worth writing again."""
    curator = KeepsSome(*kept)
    patch.setattr("meshfusion.dpu.pool_opening.make_curator", lambda policy, segments: curator)
    return curator


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_pool(tmp_path / "pool")
    monkeypatch.setattr(Tidier, "start", lambda _: None)  # a step at a time
    yield tmp_path / "pool"
    report = check_pool(tmp_path / "pool", lambda checked, total: None)
    assert (report.damaged, report.segments_damaged) == ((), ())


def fill(holder: Holder) -> None:
    """Four segments of six, in each five chunks: 0 to 4, 5 to 9 and so on; the last of them open."""
    for i in range(20):
        assert holder.put(i)


def counts(pool: Pool) -> tuple[int, int]:
    status = pool.status(deadline_s=DEADLINE_S)
    return status.segments_free, status.committed_chunk_count


def found(holder: Holder, *chunks: int) -> list[int]:
    return [i for i in chunks if holder.match_alone(i).chunk_count]


def test_what_is_worth_it_is_written_again_and_the_rest_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, 1, 2)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        fill(holder)
        before = pool.get_chunk(key(1), deadline_s=DEADLINE_S)
        assert counts(pool) == (2, 20)
        assert pool._parts.tidier.tidy_one()
        assert counts(pool) == (2, 17), "and one was opened for what was written again"
        after = pool.get_chunk(key(1), deadline_s=DEADLINE_S)
        assert before is not None
        assert after is not None
        assert after.shards[0].extent.segment != before.shards[0].extent.segment
        assert after.shards[0].unit_digests == before.shards[0].unit_digests
        assert found(holder, *range(20)) == [1, 2, *range(5, 20)]
        figures = dict(pool.status(deadline_s=DEADLINE_S).counters)
        assert figures["segments_given_up"] == 1
        assert figures["rewritten_chunks"] == 2
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        assert found(holder, *range(20)) == [1, 2, *range(5, 20)]


def test_chunks_of_several_shards_move_as_a_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, 0)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        for i in range(8):
            holder.put_shards(i)
        assert counts(pool) == (2, 8)
        assert pool._parts.tidier.tidy_one()
        record = pool.get_chunk(key(0), deadline_s=DEADLINE_S)
        assert record is not None
        assert {shard.extent.segment for shard in record.shards} == {3}, "the open one"
        assert found(holder, *range(8)) == [0, 3, 4, 5, 6, 7], "1 lay there, and 2 in part"


def test_a_segment_that_somebody_reads_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, 1)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        fill(holder)
        leases: list[api.MatchReply] = []
        plan_moves = pool._store.plan_moves

        def read_first(now_s: float, chunks: Sequence[api.ChunkRecord]) -> object:
            leases.append(pool._store.match(now_s, _request(holder), {chunk.key: chunk for chunk in chunks}))
            return plan_moves(now_s, chunks)

        pool._store.plan_moves = read_first  # type: ignore[method-assign,assignment]
        assert not pool._parts.tidier.tidy_one()
        assert leases[0].chunk_count == 1
        assert found(holder, 0, 1, 2, 3) == [0, 1, 2, 3], "a reader's chunks are where they were, or moved"
        holder.release(leases[0])


def test_rot_is_not_carried_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, 0, 1)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        fill(holder)
        record = pool.get_chunk(key(0), deadline_s=DEADLINE_S)
        assert record is not None
        with (path / "data").open("r+b") as data:
            data.seek(record.shards[0].extent.lba * 4096 + 5000)
            byte = data.read(1)
            data.seek(-1, 1)
            data.write(bytes([byte[0] ^ 1]))
        assert pool._parts.tidier.tidy_one()
        assert found(holder, 0, 1, 2, 3, 4) == [1]
        assert dict(pool.status(deadline_s=DEADLINE_S).counters)["rewrites_failed"] == 1


class Pauses:
    """Stands in for the event that ends the thread: it is waited for this often."""

    def __init__(self, count: int) -> None:
        self.taken_s: list[float] = []
        self._count = count

    def wait(self, timeout_s: float) -> bool:
        self.taken_s.append(timeout_s)
        return len(self.taken_s) > self._count

    def is_set(self) -> bool:
        return False


def test_what_fails_again_and_again_is_tried_less_often(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that a disk that is full gets two attempts a second, and the log as many lines."""
    outcomes: list[Exception | None] = [MediaError("full", next_step="make room")] * 7 + [None, ValueError("a bug")]

    def tidy_one() -> bool:
        if (error := outcomes.pop(0)) is not None:
            raise error
        return False

    with Pool.open(path, OPTIONS) as pool:
        thread, pauses = pool._parts.tidier, Pauses(9)
        with monkeypatch.context() as patch:
            patch.setattr(thread, "tidy_one", tidy_one)
            patch.setattr(thread, "_stop", pauses)
            thread._run()
    assert pauses.taken_s == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1]


def test_a_medium_that_fails_costs_nothing_that_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DataFileError(MediaFault.IO, "writing failed", Path("data"))

    keep(monkeypatch, 0, 1)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        fill(holder)
        with monkeypatch.context() as patch:
            patch.setattr(pool._drives._open[0].file._data, "write_from", fail)
            with pytest.raises(MediaError):
                pool._parts.tidier.tidy_one()
        assert not pool._store.own_pins()
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        assert found(holder, *range(20)) == list(range(20)), "nothing was given up"


def _request(holder: Holder) -> api.MatchRequest:
    return api.MatchRequest(holder.id, "reader", 16, (api.GroupKeys(0, (key(0),), (0,)),))


def test_a_defect_over_one_segment_does_not_end_the_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now_s: float, chunks: Sequence[api.ChunkRecord], allowed_bytes: int) -> list[api.ChunkRecord]:
        raise OverflowError("as of a bug")

    monkeypatch.setattr(tidier, "INTERVAL_S", 0.01)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        fill(holder)
        with monkeypatch.context() as patch:
            patch.setattr(pool._store._curator, "worth_keeping", fail)
            pool._parts.tidier._thread.start()
            until(lambda: "as of a bug" in caplog.text, what="for the defect")
        until(lambda: counts(pool)[0] == 3, what="for what is free")


def test_a_file_that_is_closed_while_chunks_move_is_a_drive_that_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, 0, 1)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        fill(holder)
        former = FileMedium.open(path / "data")
        former.close()
        pool._parts.tidier._drives = lambda: {1: former}
        assert pool._parts.tidier.tidy_one()
        assert found(holder, *range(20)) == list(range(5, 20))


def test_what_was_moved_to_a_drive_that_went_meanwhile_has_not_moved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curator = keep(monkeypatch, 0, 1)
    with Pool.open(path, OPTIONS) as pool, Holder(pool) as holder:
        fill(holder)
        carry_out = pool._parts.tidier._mover.carry_out

        def lose(moves: Sequence[Move], drives: Mapping[int, MovingMedium]) -> frozenset[bytes]:
            written = carry_out(moves, drives)
            with pool._mutex:
                pool._store.drive_is_gone(0)  # and it is back at once: what was not flushed is lost
            return written

        with monkeypatch.context() as patch:
            patch.setattr(pool._parts.tidier._mover, "carry_out", lose)
            assert pool._parts.tidier.tidy_one()
        assert found(holder, *range(20)) == list(range(5, 20))
        assert not pool._store.own_pins()
        figures = dict(pool.status(deadline_s=DEADLINE_S).counters)
        assert (figures["rewrites_failed"], figures.get("rewritten_chunks", 0)) == (2, 0)
        curator.kept = {key(5)}
        assert pool._parts.tidier.tidy_one(), "and what moves later, does"
        assert found(holder, *range(5, 10)) == [5]
