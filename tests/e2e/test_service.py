"""Engines on a shared service that dies, freezes, comes back; and two engines with the same prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api.types import PoolStatus
from tests.e2e.conftest import Prompts
from tests.e2e.daemon import Daemon
from tests.e2e.harness import Answer, EngineProcess, Reference, assert_same, engines_in, make_prompt

Pair = tuple[EngineProcess, EngineProcess]
DEADLINE_MS = 1000.0
"""Of a lookup: above what a busy machine needs, below what would look like waiting."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("service"))
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture(scope="module")
def pair(model: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines on one service; tests run in order and leave both usable."""
    with engines_in(tmp_path_factory.mktemp("pair")) as engines:
        connector = {**daemon.connector, "lookup_deadline_ms": DEADLINE_MS}
        yield engines.start(model, connector), engines.start(model, connector)


def attach_again(engine: EngineProcess, timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not engine.call("is_attached"):
        assert time.monotonic() < end_s, "the engine did not attach again"
        time.sleep(0.1)


def settle(pair: Pair, daemon: Daemon) -> PoolStatus:
    """All attached, nothing held by either, nothing leased or granted in the pool."""
    for engine in pair:
        attach_again(engine)
        engine.settle(pool=False, timeout_s=40.0)
    return daemon.wait_idle(holders=2)


def test_two_engines_at_once_write_each_chunk_once(
    pair: Pair, daemon: Daemon, prompts: Prompts, reference: Reference
) -> None:
    right = reference.answer(prompts.aligned)
    # Slow writes, so that the grants of one stand while the other asks for the same chunks.
    for engine in pair:
        engine.call("medium", writes="slow", delay_s=0.3)
        engine.send("generate", prompts=[prompts.aligned], max_tokens=8)
    for engine in pair:
        (reply,) = engine.receive("generate")["value"]
        assert_same(Answer.from_json(reply), right)
        engine.call("medium")
    status = settle(pair, daemon)
    counts = [engine.call("counts") for engine in pair]
    total = {name: sum(count.get(name, 0) for count in counts) for name in counts[0].keys() | counts[1].keys()}
    assert status.committed_chunk_count == 8, (status.counters, counts)
    assert total["saves_granted"] == total["chunks_committed"] == 8
    # What one did not write it was told at once to leave: it waited for nothing.
    passed_over = total.get("saves_busy", 0) + total.get("saves_existing", 0)
    hit_chunks = total.get("loaded_blocks", 0) // 4
    assert passed_over + hit_chunks == 8
    for engine in pair:
        assert engine.call("reset")
        answer = engine.answer(prompts.aligned)
        assert answer.cached == 1024
        assert_same(answer, right)
    settle(pair, daemon)


def test_a_frozen_service_costs_a_lookup_its_deadline(
    pair: Pair, daemon: Daemon, prompts: Prompts, reference: Reference
) -> None:
    engine, _ = pair
    assert engine.call("reset")
    before = engine.call("counts").get("lookups_timed_out", 0)
    with daemon.frozen():
        began_s = time.monotonic()
        answer = engine.answer(prompts.aligned)
        assert time.monotonic() - began_s < 20
        assert answer.cached == 0
        assert_same(answer, reference.answer(prompts.aligned))
    counts = engine.call("counts")
    assert counts.get("lookups_timed_out", 0) >= before
    settle(pair, daemon)


def test_a_killed_service_costs_hits_until_it_is_back(
    pair: Pair, daemon: Daemon, prompts: Prompts, reference: Reference
) -> None:
    engine, other = pair
    daemon.kill()
    for _ in range(2):
        assert engine.call("reset")
        answer = engine.answer(prompts.aligned)
        assert answer.cached == 0
        assert_same(answer, reference.answer(prompts.aligned))
    fresh = make_prompt(52, 512)
    assert_same(engine.answer(fresh), reference.answer(fresh))
    engine.settle(pool=False)
    daemon.start()
    settle(pair, daemon)
    assert engine.call("reset")
    answer = engine.answer(prompts.aligned)
    assert answer.cached == 1024
    assert_same(answer, reference.answer(prompts.aligned))
    # What could not be saved meanwhile is saved now, and the other engine has it.
    assert_same(engine.answer(fresh), reference.answer(fresh))
    settle(pair, daemon)
    assert other.answer(fresh).cached == 512
    settle(pair, daemon)


def test_a_service_killed_during_a_load(pair: Pair, daemon: Daemon, prompts: Prompts, reference: Reference) -> None:
    """The data path does not go through the service: the load ends well or is recomputed."""
    engine, _ = pair
    assert engine.call("reset")
    engine.call("medium", reads="slow", delay_s=1.0)
    engine.add("loads", prompts.aligned)
    engine.call("step", until="loads_under_way")
    daemon.kill()
    assert_same(engine.finish()["loads"], reference.answer(prompts.aligned))
    engine.call("medium")
    engine.settle(pool=False)
    daemon.start()
    settle(pair, daemon)


def test_a_service_killed_during_a_save(pair: Pair, daemon: Daemon, reference: Reference) -> None:
    engine, other = pair
    prompt = make_prompt(53, 1024)
    engine.call("medium", writes="slow", delay_s=0.5)
    engine.add("saves", prompt)
    engine.call("step", until="pinned_saves")
    engine.call("wait_for", counter="saves_granted", at_least=engine.call("counts").get("saves_granted", 0) + 1)
    daemon.kill()
    daemon.start()
    assert_same(engine.finish()["saves"], reference.answer(prompt))
    engine.call("medium")
    settle(pair, daemon)
    # Nothing of the torn save is offered wrongly; later the whole prompt is saved and served.
    assert_same(other.answer(prompt), reference.answer(prompt))
    settle(pair, daemon)
    assert engine.call("reset")
    assert_same(engine.answer(prompt), reference.answer(prompt))
    status = settle(pair, daemon)
    assert status.segments_quarantined == 0
    for process in pair:
        assert process.call("reset")
        answer = process.answer(prompt)
        assert answer.cached == 1024
        assert_same(answer, reference.answer(prompt))
    settle(pair, daemon)


def test_engines_leave_in_order(pair: Pair, daemon: Daemon) -> None:
    """The last test of this file: one engine leaves, the other is killed; the service forgets both."""
    one, other = pair
    one.close()
    daemon.wait_idle(holders=1)
    other.kill()
    status = daemon.wait_idle(holders=0)
    assert status.segments_quarantined == 0
    daemon.stop()
