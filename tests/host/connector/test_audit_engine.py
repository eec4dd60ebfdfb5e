"""Audits through both halves of the connector, the real path and a real pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.vllm import auditor as auditor_module
from meshfusion.host.kv.drift import drift_of
from meshfusion.host.kv.resume import LastWindow, StateAtBoundary, WholePrefix
from tests.host.support.engine_on_pool import (
    CHUNK_TOKENS,
    EngineFactory,
    committed,
    corrupt,
    prompt,
    raising,
    save_prompt,
    settle,
)
from tests.host.support.kv_memory import layer_outermost, of_blocks, on_one_grid
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import make_request
from tests.host.support.waiting import until

TOKENS = prompt(4 * CHUNK_TOKENS)
ALL: dict[str, Any] = {"audit": {"share": 1.0, "alarms_max": 2}}


def drifting(engine: MiniEngine) -> MiniEngine:
    """It computes other KV than its identity promises: what it saves has right digests."""
    write = engine.model.write

    def write_other(rank: int, group: int, block: Any, tokens: list[int]) -> None:
        write(rank, group, block, tokens)
        kv = engine.ranks[rank][group]
        kv.memory[kv.byte_places[block.block_id][2 * 1236 + 1]] ^= 0x40  # one number of the third layer becomes huge

    engine.model.write = write_other  # type: ignore[method-assign]
    return engine


def saved_wrongly(start: EngineFactory, pool: Pool, *prompts: list[int]) -> None:
    saved_by(drifting(start()), pool, *prompts)


def saved_by(writer: MiniEngine, pool: Pool, *prompts: list[int]) -> None:
    for number, tokens in enumerate(prompts):
        writer.add(make_request(f"w{number}", tokens))
        writer.run(tokens_max=len(TOKENS))  # in one step: nothing of it is read
        committed(pool, 4 * (number + 1))
        writer.finish_all()
    writer.run()


def ask(engine: MiniEngine, request_id: str, tokens: list[int] = TOKENS, **options: Any) -> int:
    """Tokens that were loaded. All that was under way has then ended."""
    request = engine.add(make_request(request_id, tokens))
    engine.run(**options)
    assert engine.is_right(request)
    return request.loaded_tokens


def test_an_audited_hit_is_computed_and_found_right(pool: Pool, start: EngineFactory) -> None:
    save_prompt(start(), TOKENS)
    committed(pool, 4)
    engine = start(**ALL)
    assert ask(engine, "a") == 0
    counts = engine.side.counts()
    assert (counts["audits_started"], counts["audited_blocks"]) == (1, 8)
    assert counts.get("audit_alarms", 0) == counts.get("loads_started", 0) == counts.get("saves_granted", 0) == 0
    assert engine.side.measures() == {"audit_drift_max": 0.0, "audit_variation_max": 0.0}
    settle(engine, pool)


def test_what_is_not_chosen_is_loaded(pool: Pool, start: EngineFactory) -> None:
    save_prompt(start(), TOKENS)
    committed(pool, 4)
    draws = iter([0.5, 0.0])
    engine = start(audit={"share": 0.25}, draw=lambda: next(draws))
    assert ask(engine, "a") == len(TOKENS)
    assert ask(engine, "b") == 0
    settle(engine, pool)


def test_stored_kv_that_is_not_what_is_computed_raises_alarms_until_nothing_is_served(
    pool: Pool, start: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    others = [prompt(len(TOKENS), seed) for seed in (2, 3)]
    saved_wrongly(start, pool, TOKENS, *others)
    engine = start(**ALL)
    assert ask(engine, "a") == 0
    assert engine.side.counts()["audit_alarms"] == 1
    assert engine.side.measures()["audit_drift_max"] > 0.0625
    (first, *_) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert first.getMessage().startswith("audit: tokens ")
    assert " in layer layer.2 differ by 1 of the largest number there" in first.getMessage()
    assert "(8 of 8 blocks; KV group 0, request a, " in first.getMessage()
    assert engine.side._identity.hex() in first.getMessage()
    until(lambda: pool.status(deadline_s=1).committed_chunk_count == 8, what="for the chunks to be dropped")
    ask(engine, "b", others[0])
    assert any("serves nothing from the pool any more" in record.getMessage() for record in caplog.records)
    # Nothing is looked for, loaded or saved from now on, though it is stored or is not.
    before = engine.side.counts()
    assert ask(engine, "c", others[1]) == 0
    assert ask(engine, "d", prompt(len(TOKENS), seed=4)) == 0
    after = engine.side.counts()
    assert after["lookups_distrusted"] == 2
    assert {**after, "lookups_distrusted": 0} == {**before, "lookups_distrusted": 0}
    settle(engine, pool)


def test_an_engine_that_varies_learns_by_how_much(pool: Pool, start: EngineFactory) -> None:
    save_prompt(start(), TOKENS)
    committed(pool, 4)
    engine = start(**ALL)
    ask(engine, "a")
    write = engine.model.write

    def write_a_little_else(rank: int, group: int, block: Any, tokens: list[int]) -> None:
        write(rank, group, block, tokens)
        kv = engine.ranks[rank][group]
        kv.memory[kv.byte_places[block.block_id][0]] ^= 1  # the last bit of one number

    engine.model.write = write_a_little_else  # type: ignore[method-assign]
    engine.add(make_request("b", TOKENS))
    engine.run(tokens_max=len(TOKENS))
    measures = engine.side.measures()
    assert measures["audit_variation_max"] == measures["audit_drift_max"] > 0
    assert engine.side.counts().get("audit_alarms", 0) == 0
    settle(engine, pool)


def test_groups_of_all_kinds_are_compared(pool: Pool, start: EngineFactory) -> None:
    def model() -> dict[str, Any]:
        groups = on_one_grid([(2, 400), (3, 436), (2, 472)], blocks=300)
        kv = tuple(of_blocks(group, size) for group, size in zip(groups, (16, 32, 64), strict=True))
        return {"kv": kv, "rules": (LastWindow(40), WholePrefix(), StateAtBoundary()), "blocks_per_chunk": 1}

    save_prompt(start(**model()), [*TOKENS, 1])
    engine = start(**model(), **ALL)
    assert ask(engine, "a", [*TOKENS, 1]) == 0
    # Of 128 tokens the window needs its last 3 blocks of 16, the prefix has 4 of 32, and there is one state.
    assert engine.side.counts()["audited_blocks"] == 3 + 4 + 1
    assert engine.side.counts().get("audit_alarms", 0) == 0
    settle(engine, pool)


def test_blocks_of_the_engines_own_cache_prove_nothing_and_are_left_out(pool: Pool, start: EngineFactory) -> None:
    save_prompt(start(), TOKENS)
    committed(pool, 4)
    engine = start(**ALL)
    ask(engine, "a", local_tokens=3 * CHUNK_TOKENS)
    assert engine.side.counts()["audited_blocks"] == 2
    settle(engine, pool)


def test_bytes_that_do_not_match_their_digest_are_another_matter(pool: Pool, start: EngineFactory) -> None:
    save_prompt(start(), TOKENS)
    committed(pool, 4)
    corrupt(pool, pool.list_chunks(api.ListRequest(limit=1), deadline_s=1).chunks[0], 0)
    engine = start(**ALL)
    ask(engine, "a")
    assert engine.side.counts()["audits_without_verdict"] == 1
    assert engine.side.counts().get("audit_alarms", 0) == 0
    settle(engine, pool)


@pytest.mark.parametrize("how", ["abort", "few blocks", "bug"])
def test_an_audit_that_comes_to_nothing_holds_nothing(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    save_prompt(start(), TOKENS)
    committed(pool, 4)
    # Eight blocks for the request, and fewer than four times eight beside them.
    engine = start(layer_outermost(blocks=30 if how == "few blocks" else 64), **ALL)
    if how == "bug":
        monkeypatch.setattr(auditor_module, "drift_of", raising(ZeroDivisionError("a bug")))
    engine.add(make_request("a", TOKENS))
    if how == "abort":
        engine.step_until(lambda: engine.requests["a"].stage == "running", tokens_max=16)
        assert engine.side.gauges()["audits"] == 1
        engine.abort("a")
    engine.run()
    assert engine.side.counts()["audits_without_verdict"] == 1
    settle(engine, pool)


def test_preempted_then_computed_after_all(pool: Pool, start: EngineFactory) -> None:
    save_prompt(start(), TOKENS)
    committed(pool, 4)
    engine = start(**ALL)
    engine.add(make_request("a", TOKENS))
    engine.step_until(lambda: engine.requests["a"].num_computed_tokens == 48, tokens_max=16)
    engine.preempt("a")
    engine.run()
    assert engine.side.counts()["audited_blocks"] == 8
    settle(engine, pool)


@pytest.mark.parametrize("then", ["abort", "reset", "close"])
def test_trouble_while_blocks_are_compared(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The blocks stay until the thread is done with them; after a reset nothing follows from it."""
    saved_wrongly(start, pool, TOKENS)
    go_on = threading.Event()
    compare = drift_of

    def slow(*arguments: Any) -> Any:
        go_on.wait(10)
        return compare(*arguments)

    monkeypatch.setattr(auditor_module, "drift_of", slow)
    engine = start(audit={"share": 1.0, "alarms_max": 1})
    engine.add(make_request("a", TOKENS))
    engine.step_until(lambda: engine.worker.parts.auditor._thread is not None)
    assert engine.side.has_work
    actions: dict[str, Callable[[], None]] = {
        "abort": lambda: engine.abort("a"), "reset": engine.side.reset, "close": lambda: None,
    }  # fmt: skip
    actions[then]()
    engine.step()
    held = [block for block in engine.manager.block_pool.blocks if block.ref_cnt]
    assert len(held) >= 16, "computed and lent ones"
    assert engine.side.gauges()["live_leases"] == 1
    go_on.set()
    if then == "close":
        return  # the fixture closes the engine, which waits for the thread
    engine.run()
    assert engine.side._audits.is_distrusted is (then == "abort")
    settle(engine, pool)
