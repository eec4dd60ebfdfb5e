"""Writes of unknown fate: their places are withheld, and what they held is written once more elsewhere (rule 3)."""

from __future__ import annotations

import pytest

from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.vllm import save_pipeline
from meshfusion.host.path.medium import WriteInDoubtError
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.staged import StagedSaver
from meshfusion.jbof.errors import ServiceUnavailableError
from tests.host.support.engine_on_pool import CHUNK_TOKENS, EngineFactory, committed_by, prompt, raising, save_prompt
from tests.host.support.mini_request import make_request

pytestmark = pytest.mark.usefixtures("quick_reattach")


def doubt_writes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The first ``count`` shards are written, and nobody can say so."""
    write, doubtful = StagedSaver.write, iter(range(count))

    def write_or_doubt(saver: StagedSaver, shard: ShardWrite) -> tuple[bytes, ...]:
        digests = write(saver, shard)
        if next(doubtful, None) is not None:
            raise WriteInDoubtError("the connection broke", next_step="-")
        return digests

    monkeypatch.setattr(StagedSaver, "write", write_or_doubt)


def test_a_write_in_doubt_keeps_its_place_and_is_written_once_more_by_the_next_incarnation(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt_writes(monkeypatch, 2)
    engine = start()
    (holder,) = [status.holder_id for status in pool.status(deadline_s=1).holders]
    tokens = prompt(2 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed_by(engine, 2)
    counts = engine.side.counts()
    assert (counts["saves_in_doubt"], counts["saves_repeated"], counts["chunks_committed"]) == (2, 2, 2)
    status = pool.status(deadline_s=1)
    assert dict(status.counters)["grants_in_doubt"] == 2
    assert status.segments_quarantined == 1
    assert {other.holder_id for other in status.holders} > {holder}, "the former one is to be fenced yet"
    request = engine.add(make_request("reader", [*tokens, 1]))
    engine.run()
    assert request.loaded_tokens == 2 * CHUNK_TOKENS
    assert engine.is_right(request)
    engine.finish_all()
    engine.run()
    engine.assert_nothing_held()


def test_a_second_doubt_is_the_last(pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt_writes(monkeypatch, 3)
    engine = start()
    save_prompt(engine, prompt(2 * CHUNK_TOKENS))
    committed_by(engine, 1)
    counts = engine.side.counts()
    assert (counts["saves_in_doubt"], counts["saves_repeated"]) == (3, 2)
    engine.finish_all()
    engine.run()
    engine.assert_nothing_held()


def test_blocks_of_writes_in_doubt_are_not_kept_for_a_service_that_is_gone(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_pipeline, "REPEAT_PATIENCE_S", 0.3)
    doubt_writes(monkeypatch, 2)
    engine = start()
    monkeypatch.setattr(pool, "attach", raising(ServiceUnavailableError("away", next_step="-")))
    save_prompt(engine, prompt(3 * CHUNK_TOKENS))
    engine.step_until(lambda: engine.side.counts().get("saves_dropped_service", 0) == 2)
    engine.finish_all()
    engine.run()
    engine.assert_nothing_held()
