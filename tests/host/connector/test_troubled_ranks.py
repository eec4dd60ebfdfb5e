"""Several ranks: what one of them does must not cost what is stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.pool import Pool, PoolOptions, create_pool
from meshfusion.host.connector.estimate import LoadEstimate
from meshfusion.host.connector.read_failures import ReadFailures
from meshfusion.host.connector.vllm.save_pipeline import FAILED_RUNS_MAX
from meshfusion.host.path.load_job import LoadJob, UnitFailure
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.spans import Span
from meshfusion.host.path.staged import StagedLoader, StagedSaver
from meshfusion.jbof.errors import MediaError
from tests.host.connector.test_ranks import chunks_of, saved, start_engine
from tests.host.support.engine_on_pool import (
    CHUNK_TOKENS,
    EngineFactory,
    committed_by,
    prompt,
    raising,
    save_prompt,
    settle,
)
from tests.host.support.mini_engine import KeepOpen
from tests.host.support.mini_request import make_request


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


@pytest.mark.parametrize(("ranks", "bad"), [(1, 0), (2, 0), (2, 1)])
def test_an_engine_that_cannot_write_does_not_use_up_the_pool(
    pool: Pool, start: EngineFactory, ranks: int, bad: int
) -> None:
    """One rank has no path: nothing can be saved, and what others have stored stays."""
    first = start_engine(start, ranks)
    tokens = prompt(3 * CHUNK_TOKENS + 1)
    save_prompt(first, tokens)
    settle(first, pool)
    before = chunks_of(pool)
    engine = start_engine(start, ranks)
    engine.workers[bad].parts.slot._open_path = raising(MediaError("no way", next_step="-"))
    for i in range(120):
        engine.add(make_request(f"r{i}", prompt(30 * CHUNK_TOKENS, seed=100 + i)[: 26 * 16]))
        engine.run()
        engine.finish_all()
        engine.run()
        if chunks_of(pool) != before:
            break
    assert chunks_of(pool) == before, f"gone after {i + 1} requests"
    settle(engine, pool)


def test_a_rank_that_is_slow_does_not_cost_chunks_that_are_well(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a load does not come in time, three times over. That is no damage."""
    tokens = saved(start, pool)
    monkeypatch.setattr(LoadEstimate, "abandon_after_s", lambda self, load_bytes: 0.15)
    engine = start_engine(start)
    load, memory = StagedLoader.load, engine.workers[1].parts.memory

    def load_then(loader: StagedLoader, job: LoadJob, span: Span) -> list[UnitFailure | None]:
        if loader._medium.memory is memory and span.first >= 4:  # the last chunk
            time.sleep(0.3)
        return load(loader, job, span)

    monkeypatch.setattr(StagedLoader, "load", load_then)
    for i in range(4):
        engine.add(make_request(f"reader{i}", tokens))
        engine.run()
        engine.finish_all()
        engine.run()
    assert dict(pool.status(deadline_s=1).counters).get("dropped_chunks", 0) == 0
    settle(engine, pool)


def test_what_is_remembered_of_failures_is_bounded() -> None:
    failures = ReadFailures()
    for i in range(300_000):
        failures.were_read([b"good"])
        failures.is_lost(i.to_bytes(32, "little"))
    assert len(failures._failures) <= 100_000


def test_an_engine_one_rank_of_which_fails_to_write_does_not_use_up_the_pool(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is open, and every write of it fails: nothing that is written by the others can ever be seen."""
    saved(start, pool)
    before = chunks_of(pool)
    write = StagedSaver.write

    def write_or_fail(saver: StagedSaver, shard: ShardWrite) -> tuple[bytes, ...]:
        if shard.header.rank == 1:
            raise MediaError("read-only", next_step="-")
        return write(saver, shard)

    monkeypatch.setattr(StagedSaver, "write", write_or_fail)
    engine = start_engine(start)
    for i in range(120):
        engine.add(make_request(f"r{i}", prompt(26 * 16, seed=100 + i)))
        engine.run()
        engine.finish_all()
        engine.run()
        if chunks_of(pool) != before:
            break
    assert chunks_of(pool) == before, f"gone after {i + 1} requests"
    assert engine.side.counts()["save_pauses"] > 0
    settle(engine, pool)


def test_saves_go_on_after_a_pause(pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine(start)
    with monkeypatch.context() as broken:
        broken.setattr(StagedSaver, "write", raising(MediaError("read-only", next_step="-")))
        for i in range(FAILED_RUNS_MAX):
            save_prompt(engine, prompt(CHUNK_TOKENS, seed=i), f"broken{i}")
    assert engine.side.counts()["save_pauses"] == 1
    save_prompt(engine, prompt(CHUNK_TOKENS, seed=50), "paused")
    assert chunks_of(pool) == ()
    time.sleep(1.1)  # the first pause is of a second
    save_prompt(engine, prompt(CHUNK_TOKENS, seed=51), "works")
    committed_by(engine, 1)
    assert len(chunks_of(pool)) == 1
    settle(engine, pool)


class Switch:
    """A service that is another pool's from a moment on."""

    def __init__(self, first: Pool, second: Pool) -> None:
        self._now: Any = first
        self._second = second
        self._mine: set[str] = set()
        self.is_switched = False

    def switch(self) -> None:
        self.is_switched = True

    def __getattr__(self, name: str) -> Any:
        pool = self._second if self.is_switched else self._now
        return getattr(pool, name)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_still_writes_to_the_former_pool_does_not_judge_the_next(
    pool: Pool,
    start: EngineFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_reattach: None,
    gate: threading.Event,
    ranks: int,
) -> None:
    create_pool(tmp_path / "other", size_bytes=16 << 20, segment_bytes=1 << 20)
    with Pool.open(tmp_path / "other", PoolOptions(heartbeat_s=0.2)) as other:
        filler = start_engine(start, ranks, service=KeepOpen(other))
        save_prompt(filler, prompt(2 * CHUNK_TOKENS, seed=9), "x")  # so that places differ
        tokens = prompt(3 * CHUNK_TOKENS + 1)
        save_prompt(filler, tokens)
        settle(filler, other)
        before = len(chunks_of(other))
        service = Switch(pool, other)
        engine = start_engine(start, ranks, service=service)
        write, memory = StagedSaver.write, engine.workers[ranks - 1].parts.memory

        def write_then(saver: StagedSaver, shard: ShardWrite) -> tuple[bytes, ...]:
            if saver._medium.memory is memory:
                gate.wait(20.0)
            return write(saver, shard)

        monkeypatch.setattr(StagedSaver, "write", write_then)
        engine.add(make_request("w", prompt(CHUNK_TOKENS, seed=5)))
        engine.step_until(lambda: engine.workers[ranks - 1].parts.saves.is_writing)
        former = engine.client.attachment
        assert former is not None
        service.switch()
        engine.step_until(
            lambda: engine.client.attachment is not None and engine.client.attachment.holder_id != former.holder_id
        )
        for _ in range(20):
            engine.step()
            time.sleep(0.01)
        request = engine.add(make_request("reader", tokens))
        engine.step_until(lambda: request.stage == "done")
        assert engine.is_right(request)
        assert len(chunks_of(other)) >= before
        assert engine.side.counts().get("digest_mismatches", 0) == 0
        assert dict(other.status(deadline_s=1).counters).get("dropped_chunks", 0) == 0
        gate.set()
        engine.finish_all()
        engine.run()
        engine.assert_nothing_held()
