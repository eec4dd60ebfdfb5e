"""Every way in which a lookup comes to nothing gives back what it held: aborts, waiting, preemption."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import FilledPool, Prompts
from tests.e2e.harness import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    EngineProcess,
    Reference,
    assert_same,
    embedded,
    engines_in,
    make_prompt,
    whole_chunks,
)

BLOCKS = 60  # of 32 tokens: two requests of some 1000 tokens do not fit


@pytest.fixture(scope="module")
def engine(model: Path, filled_pool: FilledPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("rollback")
    with engines_in(folder) as engines:
        engine = engines.start(
            model,
            embedded(filled_pool.copy(folder / "pool")),
            num_gpu_blocks_override=BLOCKS,
            max_model_len=1600,
        )
        engine.call("record_questions")
        yield engine


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: EngineProcess, prompts: Prompts, reference: Reference) -> Iterator[None]:
    """Before and after: nothing held, all blocks free, and the pool still serves a whole hit."""
    assert engine.call("reset")
    yield
    engine.call("medium")
    engine.settle()
    assert engine.call("free_blocks") == BLOCKS - 1
    assert engine.call("reset")
    answer = engine.answer(prompts.aligned)
    assert answer.cached == 1024
    assert_same(answer, reference.answer(prompts.aligned))
    engine.settle()


def await_lookup(engine: EngineProcess) -> None:
    """Let the client's threads work: steps without a pause leave them little of Python's lock."""
    engine.call("step")
    time.sleep(0.5)


def test_abort_before_any_step(engine: EngineProcess, prompts: Prompts) -> None:
    engine.add("gone", prompts.aligned)
    engine.call("abort", request_ids=["gone"])
    assert engine.finish() == {}


def test_abort_while_loading(engine: EngineProcess, prompts: Prompts) -> None:
    engine.call("medium", reads="slow", delay_s=1.0)
    engine.add("gone", prompts.aligned)
    engine.call("step", until="loads_under_way")
    engine.call("abort", request_ids=["gone"])
    assert engine.finish() == {}
    assert engine.settle()["pool"]["pinned_bytes"] == 0


def test_abort_while_loading_hangs(engine: EngineProcess, prompts: Prompts) -> None:
    engine.call("medium", reads="blocked")
    engine.add("gone", prompts.aligned)
    engine.call("step", until="loads_under_way")
    engine.call("abort", request_ids=["gone"])
    assert engine.finish() == {}
    engine.settle()  # at the load's deadline, though the read still hangs


def test_abort_while_decoding_and_saving(engine: EngineProcess) -> None:
    engine.call("medium", writes="slow", delay_s=0.5)
    engine.add("gone", make_prompt(40, 512), max_tokens=200)
    engine.call("step", until="pinned_saves")
    engine.call("step", count=3)
    engine.call("abort", request_ids=["gone"])
    assert engine.finish() == {}


def test_a_request_that_waits_is_promised_the_same_from_one_lookup(
    engine: EngineProcess, prompts: Prompts, reference: Reference
) -> None:
    hog = make_prompt(41, 960)
    before = engine.call("counts")
    asked_before = len(engine.call("questions"))
    engine.add("hog", hog, max_tokens=60)
    engine.call("step", until="running")
    engine.add("waits", prompts.aligned)  # 32 blocks: there is no room beside the hog's 30
    await_lookup(engine)
    engine.call("step", count=40)
    gauges = engine.call("gauges")
    assert gauges["waiting"] == 1, (gauges, engine.call("counts"), engine.call("questions")[asked_before:][-6:])
    leases = engine.call("pool_status")["lease_count"]
    assert leases == 1
    done = engine.finish()
    assert_same(done["hog"], reference.answer(hog, max_tokens=60))
    assert_same(done["waits"], reference.answer(prompts.aligned))
    assert done["waits"].cached == 1024
    asked = [entry for entry in engine.call("questions")[asked_before:] if entry[0].startswith("waits")]
    assert len(asked) >= 30, "the scheduler was expected to ask at every pass"
    assert {tuple(entry[1:3]) for entry in asked} - {(0, None)} == {(0, 1024)}
    counts = engine.settle()["counts"]
    assert counts["lookups"] - before.get("lookups", 0) == 2, "one a request"


def test_abort_while_waiting_with_a_promise(engine: EngineProcess, prompts: Prompts, reference: Reference) -> None:
    hog = make_prompt(42, 960)
    engine.add("hog", hog, max_tokens=60)
    engine.call("step", until="running")
    engine.add("gone", prompts.aligned)
    await_lookup(engine)
    engine.call("step", count=20)
    assert engine.call("pool_status")["lease_count"] == 1
    engine.call("abort", request_ids=["gone"])
    done = engine.finish()
    assert done.keys() == {"hog"}
    assert_same(done["hog"], reference.answer(hog, max_tokens=60))


def test_preemption(engine: EngineProcess, reference: Reference) -> None:
    """Two requests that together outgrow the cache: one is put off, and goes on where it was."""
    # 28 of 59 blocks each; 48 decoded tokens later each wants 30.
    long = {"first": make_prompt(43, 880), "second": make_prompt(44, 880)}
    for name, prompt in long.items():
        engine.add(name, prompt, max_tokens=64)
    done = engine.finish()
    for name, prompt in long.items():
        assert_same(done[name], reference.answer(prompt, max_tokens=64))
    assert max(entry[3] for entry in engine.call("questions") if entry[0].startswith("second")) >= 1


def test_preempted_requests_come_back_from_the_pool(engine: EngineProcess, reference: Reference) -> None:
    """The engine's own cache is emptied under two requests that run: both go on with what they had saved."""
    running = {"first": make_prompt(45, 640), "second": make_prompt(46, 400)}
    before = engine.call("counts")
    for name, prompt in running.items():
        engine.add(name, prompt, max_tokens=40)
    committed = before.get("chunks_committed", 0)
    engine.call("wait_for", counter="chunks_committed", at_least=committed + 640 // CHUNK_TOKENS + 400 // CHUNK_TOKENS)
    assert engine.call("gauges")["running"] == 2
    assert engine.call("reset", running=True)
    done = engine.finish()
    for name, prompt in running.items():
        assert_same(done[name], reference.answer(prompt, max_tokens=40))
    counts = engine.settle()["counts"]
    assert counts["loads_started"] - before.get("loads_started", 0) == 2
    loaded_tokens = (counts["loaded_blocks"] - before.get("loaded_blocks", 0)) * BLOCK_TOKENS
    assert loaded_tokens >= whole_chunks(640) + whole_chunks(400)
    assert counts.get("failed_blocks", 0) == before.get("failed_blocks", 0)
