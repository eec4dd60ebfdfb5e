"""Engines with several ranks: a chunk is there with the shards of all of them or not at all, and so is a load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.estimate import LoadEstimate
from meshfusion.host.connector.path_gate import PathState
from meshfusion.host.connector.vllm.messages import RunWritten, StepReport
from meshfusion.host.kv.resume import LastWindow, ResumeRule, WholePrefix
from meshfusion.host.path.load_job import LoadJob, UnitFailure
from meshfusion.host.path.medium import WriteInDoubtError
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.spans import Span
from meshfusion.host.path.staged import StagedLoader, StagedSaver
from meshfusion.jbof.errors import MediaError
from tests.host.support.engine_on_pool import (
    CHUNK_TOKENS,
    EngineFactory,
    committed,
    committed_by,
    corrupt,
    prompt,
    raising,
    save_prompt,
    settle,
)
from tests.host.support.kv_memory import KvMemory, layer_outermost, on_one_grid
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import make_request

HYBRID: tuple[ResumeRule, ...] = (WholePrefix(), LastWindow(40))
BLOCKS = 200


def hybrid_memory() -> tuple[KvMemory, ...]:
    return on_one_grid([(2, 400), (3, 436)], blocks=BLOCKS)


def start_engine(start: EngineFactory, ranks: int = 2, **options: Any) -> MiniEngine:
    """One group of full attention, unless ``rules`` says otherwise: then as in HYBRID."""
    options["path"] = "staged"
    if "rules" in options:
        return start(hybrid_memory(), more_ranks=[hybrid_memory() for _ in range(ranks - 1)], **options)
    more = [(layer_outermost(blocks=64),) for _ in range(ranks - 1)]
    return start(layer_outermost(blocks=64), more_ranks=more, **options)


def chunks_of(pool: Pool) -> tuple[api.ChunkRecord, ...]:
    return pool.list_chunks(api.ListRequest(limit=1000), deadline_s=1).chunks


def with_shard(chunk: api.ChunkRecord, number: int) -> api.ChunkRecord:
    """The same, as if it had that one alone."""
    return replace(chunk, shards=(chunk.shards[number],))


def fail_writes(monkeypatch: pytest.MonkeyPatch, rank: int, error: Exception, count: int = 1000) -> None:
    """The first ``count`` shards of ``rank``."""
    write, failing = StagedSaver.write, iter(range(count))

    def write_or_fail(saver: StagedSaver, shard: ShardWrite) -> tuple[bytes, ...]:
        if shard.header.rank == rank and next(failing, None) is not None:
            raise error
        return write(saver, shard)

    monkeypatch.setattr(StagedSaver, "write", write_or_fail)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_all_ranks_saved_all_ranks_load(pool: Pool, start: EngineFactory, ranks: int) -> None:
    first = start_engine(start, ranks)
    tokens = prompt(3 * CHUNK_TOKENS + 5)
    save_prompt(first, tokens)
    committed_by(first, 3)
    unit_bytes = first.kvs[0].layout.unit_bytes
    counts = first.side.counts()
    assert counts["saved_bytes"] == 3 * 2 * unit_bytes * ranks
    # Of each rank: a descriptor for each of three layers of six blocks, in three chunks.
    assert (counts["save_descriptors_staged"], counts["save_chunks_staged"]) == (18 * ranks, 3 * ranks)
    settle(first, pool)
    for chunk in chunks_of(pool):
        assert [shard.rank for shard in chunk.shards] == list(range(ranks))
        assert len({shard.unit_digests for shard in chunk.shards}) == ranks, "each holds something else"
    second = start_engine(start, ranks)
    request = save_prompt(second, tokens, "reader")
    assert request.loaded_tokens == 3 * CHUNK_TOKENS
    counts = second.side.counts()
    assert (counts["loaded_blocks"], counts["loaded_bytes"]) == (6, 6 * unit_bytes * ranks)
    assert (counts["load_descriptors_staged"], counts["load_chunks_staged"]) == (18 * ranks, 3 * ranks)
    settle(second, pool)


@pytest.mark.parametrize("per_shard", [(1, 2), (2, 1), (2, 2)])
def test_ranks_that_hold_the_same_have_one_shard_that_the_first_of_them_writes(
    pool: Pool, start: EngineFactory, per_shard: tuple[int, int]
) -> None:
    first = start_engine(start, rules=HYBRID, ranks_per_shard=per_shard)
    tokens = prompt(4 * CHUNK_TOKENS + 5)
    save_prompt(first, tokens)
    settle(first, pool)
    for chunk in chunks_of(pool):
        assert [shard.rank for shard in chunk.shards] == [[0, 1], [0]][per_shard[chunk.group] - 1]
    second = start_engine(start, rules=HYBRID, ranks_per_shard=per_shard)
    assert save_prompt(second, tokens, "reader").loaded_tokens == 4 * CHUNK_TOKENS
    settle(second, pool)


def test_four_ranks_two_of_which_each_hold_the_same(pool: Pool, start: EngineFactory) -> None:
    first = start_engine(start, 4, ranks_per_shard=(2,))
    tokens = prompt(2 * CHUNK_TOKENS + 1)
    save_prompt(first, tokens)
    settle(first, pool)
    assert [[shard.rank for shard in chunk.shards] for chunk in chunks_of(pool)] == [[0, 2]] * 2
    second = start_engine(start, 4, ranks_per_shard=(2,))
    assert save_prompt(second, tokens, "reader").loaded_tokens == 2 * CHUNK_TOKENS
    settle(second, pool)


@pytest.mark.parametrize("per_shard", [(1, 3), (3, 1)])
def test_three_ranks_that_hold_the_same_of_one_group_alone(
    pool: Pool, start: EngineFactory, per_shard: tuple[int, int]
) -> None:
    first = start_engine(start, 3, rules=HYBRID, ranks_per_shard=per_shard)
    tokens = prompt(4 * CHUNK_TOKENS + 5)
    save_prompt(first, tokens)
    settle(first, pool)
    for chunk in chunks_of(pool):
        assert [shard.rank for shard in chunk.shards] == ([0, 1, 2] if per_shard[chunk.group] == 1 else [0])
    second = start_engine(start, 3, rules=HYBRID, ranks_per_shard=per_shard)
    assert save_prompt(second, tokens, "reader").loaded_tokens == 4 * CHUNK_TOKENS
    settle(second, pool)


def test_ranks_that_report_in_another_order(pool: Pool, start: EngineFactory) -> None:
    first = start_engine(start, 3)
    first.workers.reverse()
    tokens = prompt(3 * CHUNK_TOKENS + 1)
    save_prompt(first, tokens)
    settle(first, pool)
    second = start_engine(start, 3)
    second.workers.reverse()
    assert save_prompt(second, tokens, "reader").loaded_tokens == 3 * CHUNK_TOKENS
    assert second.side.counts().get("failed_blocks", 0) == 0
    settle(second, pool)


def test_a_report_of_a_run_that_comes_twice_is_our_mistake(pool: Pool, start: EngineFactory) -> None:
    engine = start_engine(start)
    pipeline = engine.side._pipeline
    told: list[RunWritten] = []
    written = pipeline.written

    def keep(now_s: float, results: tuple[RunWritten, ...]) -> None:
        told.extend(results)
        written(now_s, results)

    pipeline.written = keep  # type: ignore[method-assign]
    save_prompt(engine, prompt(CHUNK_TOKENS))
    committed_by(engine, 1)
    settle(engine, pool)
    assert sorted(result.rank for result in told) == [0, 1]
    with pytest.raises(AssertionError, match="a run that is settled"):
        written(0.0, (told[1],))
    settle(engine, pool)
    assert engine.side.counts()["chunks_committed"] == len(chunks_of(pool)) == 1


def test_engines_of_another_number_of_ranks_do_not_share(pool: Pool, start: EngineFactory) -> None:
    """Their identities differ (tensor size); if they did not, the shards would be refused all the same."""
    first = start_engine(start, 2)
    tokens = prompt(2 * CHUNK_TOKENS + 1)
    save_prompt(first, tokens)
    settle(first, pool)
    assert save_prompt(start_engine(start, 3), tokens, "reader").loaded_tokens == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_that_one_rank_did_not_write_is_not_there(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    fail_writes(monkeypatch, rank, MediaError("no", next_step="-"), count=1)
    engine = start_engine(start)
    save_prompt(engine, prompt(3 * CHUNK_TOKENS))
    engine.step_until(lambda: engine.side.counters["chunks_committed"] == 2)
    assert engine.side.counts()["saves_failed"] == 1
    assert len(chunks_of(pool)) == 2
    assert all(len(chunk.shards) == 2 for chunk in chunks_of(pool))
    settle(engine, pool)


def test_with_several_groups_all_of_a_boundary_is_withheld(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(monkeypatch, 1, MediaError("no", next_step="-"), count=1)
    engine = start_engine(start, rules=HYBRID)
    save_prompt(engine, prompt(2 * CHUNK_TOKENS + 1))
    settle(engine, pool)
    assert {chunk.position_tokens for chunk in chunks_of(pool)} == {CHUNK_TOKENS}


def test_what_one_rank_cannot_tell_the_fate_of_keeps_all_its_places(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch, quick_reattach: None
) -> None:
    fail_writes(monkeypatch, 1, WriteInDoubtError("the connection broke", next_step="-"), count=1)
    engine = start_engine(start)
    tokens = prompt(2 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed_by(engine, 2)
    counts = engine.side.counts()
    assert (counts["saves_in_doubt"], counts["saves_repeated"]) == (1, 1)
    assert dict(pool.status(deadline_s=1).counters)["grants_in_doubt"] == 1
    engine.finish_all()
    engine.run()
    engine.assert_nothing_held()


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_bytes_on_one_rank_cost_the_load_on_all(pool: Pool, start: EngineFactory, rank: int) -> None:
    first = start_engine(start)
    tokens = prompt(3 * CHUNK_TOKENS + 1)
    save_prompt(first, tokens)
    settle(first, pool)
    bad = next(chunk for chunk in chunks_of(pool) if chunk.position_tokens == CHUNK_TOKENS)
    corrupt(pool, with_shard(bad, rank), 0)
    second = start_engine(start)
    request = save_prompt(second, tokens, "reader")
    assert request.loaded_tokens == CHUNK_TOKENS
    counts = second.side.counts()
    assert (counts["digest_mismatches"], counts["failed_blocks"], counts["loads_failed"]) == (1, 1, 1)
    committed(pool, 3)
    settle(second, pool)
    assert save_prompt(start_engine(start), tokens, "again").loaded_tokens == 3 * CHUNK_TOKENS, "saved once more"


def test_wrong_bytes_on_one_rank_of_several_groups(pool: Pool, start: EngineFactory) -> None:
    """There a load is whole or nothing, on every rank."""
    first = start_engine(start, rules=HYBRID)
    tokens = prompt(3 * CHUNK_TOKENS + 1)
    save_prompt(first, tokens)
    settle(first, pool)
    bad = next(c for c in chunks_of(pool) if c.group == 1 and c.position_tokens == 2 * CHUNK_TOKENS)
    corrupt(pool, with_shard(bad, 1), -1 + len(bad.shards[1].unit_digests))
    second = start_engine(start, rules=HYBRID)
    assert save_prompt(second, tokens, "reader").loaded_tokens == 0
    settle(second, pool)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened in the end, so that nothing waits for it for ever."""
    made = threading.Event()
    yield made
    made.set()


def hold_reads(monkeypatch: pytest.MonkeyPatch, engine: MiniEngine, rank: int, gate: threading.Event) -> None:
    """Of one rank, until ``gate`` is open."""
    load, memory = StagedLoader.load, engine.workers[rank].parts.memory

    def load_then(loader: StagedLoader, job: LoadJob, span: Span) -> list[UnitFailure | None]:
        if loader._medium.memory is memory:
            gate.wait(20.0)
        return load(loader, job, span)

    monkeypatch.setattr(StagedLoader, "load", load_then)


def saved(start: EngineFactory, pool: Pool) -> list[int]:
    """Three chunks and a token more."""
    tokens = prompt(3 * CHUNK_TOKENS + 1)
    engine = start_engine(start)
    save_prompt(engine, tokens)
    settle(engine, pool)
    return tokens


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_is_waited_for(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, rank: int
) -> None:
    tokens = saved(start, pool)
    engine = start_engine(start)
    hold_reads(monkeypatch, engine, rank, gate)
    request = engine.add(make_request("reader", tokens))
    engine.step_until(lambda: engine.side._loads._reports)
    for _ in range(20):
        engine.step()
    assert request.stage == "loading", "one rank has it and that is not enough"
    assert pool.status(deadline_s=1).lease_count == 1
    gate.set()
    engine.run()
    assert (request.loaded_tokens, engine.is_right(request)) == (3 * CHUNK_TOKENS, True)
    settle(engine, pool)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_too_late_is_abandoned_and_all_is_recomputed(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, rank: int
) -> None:
    tokens = saved(start, pool)
    monkeypatch.setattr(LoadEstimate, "abandon_after_s", lambda self, load_bytes: 0.2)
    engine = start_engine(start)
    hold_reads(monkeypatch, engine, rank, gate)
    request = engine.add(make_request("reader", tokens))
    engine.run()
    assert (request.loaded_tokens, engine.is_right(request)) == (0, True)
    assert engine.side.counts()["loads_failed"] == 1
    assert "digest_mismatches" not in engine.side.counts()
    settle(engine, pool)
    gate.set()
    assert len(chunks_of(pool)) == 3, "they are well"


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_asked_or_saved_while_one_rank_has_no_path(pool: Pool, start: EngineFactory, rank: int) -> None:
    tokens = saved(start, pool)
    engine = start_engine(start)
    engine.workers[rank].parts.slot._open_path = raising(MediaError("no way", next_step="-"))
    request = engine.add(make_request("reader", tokens))
    other = engine.add(make_request("writer", prompt(2 * CHUNK_TOKENS, seed=2)))
    engine.run()
    assert request.loaded_tokens == other.loaded_tokens == 0
    assert len(chunks_of(pool)) == 3
    settle(engine, pool)


def test_reports_of_one_step_keep_their_ranks() -> None:
    report = StepReport((RunWritten(1, ((b"d" * 8,),), rank=1),), paths=(PathState("h", rank=1),))
    both = StepReport((RunWritten(1, ((b"e" * 8,),)),), paths=(PathState("h"),)).aggregate(report)
    assert isinstance(both, StepReport)
    assert [written.rank for written in both.written] == [0, 1]
    assert [path.rank for path in both.paths] == [0, 1]
