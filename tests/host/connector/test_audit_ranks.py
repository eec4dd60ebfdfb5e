"""Audits of engines with several ranks: every rank compares its own, and one verdict comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.vllm.messages import AuditReport
from tests.host.connector.test_audit_engine import ALL, TOKENS, ask, saved_by
from tests.host.connector.test_ranks import HYBRID, chunks_of, start_engine, with_shard
from tests.host.support.engine_on_pool import CHUNK_TOKENS, EngineFactory, committed, corrupt, save_prompt, settle
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.waiting import until


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"ranks": 2}, 2 * 8),
        ({"ranks": 3}, 3 * 8),
        # Eight blocks of the prefix, and three of the window; the shards that ranks share are compared by all.
        ({"ranks": 2, "rules": HYBRID, "ranks_per_shard": (1, 2)}, 2 * (8 + 3)),
    ],
)
def test_every_rank_compares(pool: Pool, start: EngineFactory, options: dict[str, Any], blocks: int) -> None:
    save_prompt(start_engine(start, **options), [*TOKENS, 1])
    until(lambda: not pool.status(deadline_s=1).grant_count, what="for the commits")
    engine = start_engine(start, **options, **ALL)
    assert ask(engine, "a", [*TOKENS, 1]) == 0
    counts = engine.side.counts()
    assert (counts["audits_started"], counts["audited_blocks"]) == (1, blocks)
    assert counts.get("audit_alarms", 0) == counts.get("audits_without_verdict", 0) == 0
    settle(engine, pool)


def drifting_on(engine: MiniEngine, drifting_rank: int) -> MiniEngine:
    """There one number of the second layer is another than its identity promises."""
    write = engine.model.write

    def write_other(rank: int, group: int, block: Any, tokens: list[int]) -> None:
        write(rank, group, block, tokens)
        if rank == drifting_rank:
            kv = engine.ranks[rank][group]
            kv.memory[kv.byte_places[block.block_id][1236 + 1]] ^= 0x40

    engine.model.write = write_other  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_finds_is_an_alarm_that_names_it(
    pool: Pool, start: EngineFactory, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    saved_by(drifting_on(start_engine(start), rank), pool, TOKENS)
    engine = start_engine(start, **ALL)
    assert ask(engine, "a") == 0
    assert engine.side.counts()["audit_alarms"] == 1
    (alarm,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f" in layer layer.1 on rank {rank} differ by 1 of the largest number there" in alarm
    assert "(8 of 8 blocks; " in alarm
    until(lambda: not chunks_of(pool), what="for the chunks to be dropped")
    settle(engine, pool)


def test_one_rank_that_cannot_read_costs_the_verdict(pool: Pool, start: EngineFactory) -> None:
    """Also if the other one has found something: it compared a chunk that is not whole."""
    saved_by(drifting_on(start_engine(start), 0), pool, TOKENS)
    bad = next(chunk for chunk in chunks_of(pool) if chunk.position_tokens == CHUNK_TOKENS)
    corrupt(pool, with_shard(bad, 1), 0)
    engine = start_engine(start, **ALL)
    assert ask(engine, "a") == 0
    counts = engine.side.counts()
    assert (counts["audits_without_verdict"], counts.get("audit_alarms", 0)) == (1, 0)
    assert len(chunks_of(pool)) == 4
    settle(engine, pool)


def test_a_report_that_comes_twice_is_our_mistake(pool: Pool, start: EngineFactory) -> None:
    save_prompt(start_engine(start), TOKENS)
    committed(pool, 4)
    engine = start_engine(start, **ALL)
    pipeline = engine.side._audit_pipeline
    former: list[AuditReport] = []
    reported = pipeline.reported

    def keep(reports: tuple[AuditReport, ...], identity: bytes) -> None:
        former.extend(reports)
        reported(reports, identity)

    pipeline.reported = keep  # type: ignore[method-assign, assignment]
    ask(engine, "a")
    assert [report.rank for report in sorted(former, key=lambda report: report.rank)] == [0, 1]
    with pytest.raises(AssertionError, match="has ended"):
        reported(former[:1], engine.side._identity)
    settle(engine, pool)
