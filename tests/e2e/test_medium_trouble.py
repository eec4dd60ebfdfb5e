"""The medium fails, hangs, shrinks or fills up under a serving engine: hits are lost, answers are not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import FilledPool, Prompts
from tests.e2e.harness import EngineProcess, Reference, assert_same, embedded, engines_in, make_prompt

ABANDON_S = 2.0  # the floor below which no load is abandoned
BLOCKS = 200


@pytest.fixture(scope="module")
def engine(model: Path, filled_pool: FilledPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine for the whole file: after each trouble it must be as good as new."""
    folder = tmp_path_factory.mktemp("trouble")
    with engines_in(folder) as engines:
        yield engines.start(model, embedded(filled_pool.copy(folder / "pool")), num_gpu_blocks_override=BLOCKS)


@pytest.fixture(autouse=True)
def _as_good_as_new(engine: EngineProcess, prompts: Prompts, reference: Reference) -> Iterator[None]:
    assert engine.call("reset")
    before = engine.call("free_blocks")
    yield
    engine.call("medium")
    engine.settle()
    assert engine.call("free_blocks") == before == BLOCKS - 1  # one block is the engine's null block


def risen(engine: EngineProcess, before: dict[str, int]) -> dict[str, int]:
    """What settling counted since ``before``."""
    counts = engine.settle()["counts"]
    return {name: value - before.get(name, 0) for name, value in counts.items() if value != before.get(name, 0)}


def test_reads_that_fail(engine: EngineProcess, prompts: Prompts, reference: Reference) -> None:
    before = engine.call("counts")
    engine.call("medium", reads="failing")
    assert_same(engine.answer(prompts.aligned), reference.answer(prompts.aligned))
    counts = risen(engine, before)
    assert counts["failed_blocks"] == 32
    assert counts["loads_failed"] == counts["loads_started"] == 1
    assert "digest_mismatches" not in counts, "a medium that does not answer says nothing about the bytes on it"
    assert "chunks_committed" not in counts, "one bad moment of the medium is no reason to drop what it holds"
    engine.call("medium")
    assert engine.call("reset")
    answer = engine.answer(prompts.aligned)
    assert answer.cached == 1024, "the chunks are still there"
    assert_same(answer, reference.answer(prompts.aligned))


def test_a_load_that_hangs_is_abandoned_and_its_late_bytes_land_nowhere(
    engine: EngineProcess, prompts: Prompts, reference: Reference
) -> None:
    before = engine.call("counts")
    engine.call("medium", reads="blocked")
    began_s = time.monotonic()
    answer = engine.answer(prompts.aligned)
    took_s = time.monotonic() - began_s
    assert_same(answer, reference.answer(prompts.aligned))
    assert ABANDON_S <= took_s < ABANDON_S + 20
    counts = risen(engine, before)
    assert counts["failed_blocks"] == 32
    assert counts["loads_failed"] == 1
    # Other prompts go on while the reads still hang, and their blocks are the very ones that the reads were for.
    other = make_prompt(11, 900)
    assert engine.call("reset")
    engine.add("other", other)
    engine.call("step", count=2)
    engine.call("medium")  # now the late reads return
    assert_same(engine.finish()["other"], reference.answer(other))
    engine.settle()
    assert engine.call("reset")
    assert engine.answer(prompts.aligned).cached == 1024


def test_other_requests_run_while_a_load_hangs(engine: EngineProcess, prompts: Prompts, reference: Reference) -> None:
    engine.call("medium", reads="blocked")
    engine.add("hangs", prompts.aligned)
    engine.call("step", until="loads_under_way")
    other = make_prompt(12, 300)
    engine.add("runs", other)
    engine.call("step", until="running", timeout_s=ABANDON_S)
    assert engine.call("gauges")["loads_under_way"] == 1
    done = engine.finish()
    assert_same(done["runs"], reference.answer(other))
    assert_same(done["hangs"], reference.answer(prompts.aligned))


@pytest.mark.parametrize("trouble", ["writes", "index"])
def test_saves_that_fail_are_counted_and_tried_again_later(
    engine: EngineProcess, reference: Reference, trouble: str
) -> None:
    before = engine.call("counts")
    prompt = make_prompt(20 if trouble == "writes" else 21, 512)
    if trouble == "writes":
        engine.call("medium", writes="failing")
    else:
        engine.call("fail_index", failing=True)
    assert_same(engine.answer(prompt), reference.answer(prompt))
    counts = risen(engine, before)
    lost = counts.get("saves_failed", 0) + counts.get("saves_dropped_service", 0) + counts.get("commits_refused", 0)
    assert lost + counts.get("saves_no_space", 0) == 4
    assert "chunks_committed" not in counts
    # Hits go on meanwhile; afterwards the chunks can be saved.
    engine.call("medium")
    engine.call("fail_index", failing=False)
    assert engine.call("reset")
    deadline_s = time.monotonic() + 30  # a service whose index failed refuses saves for a while
    while engine.call("counts").get("chunks_committed", 0) < before.get("chunks_committed", 0) + 4:
        assert time.monotonic() < deadline_s, engine.call("counts")
        assert_same(engine.answer(prompt), reference.answer(prompt))
        engine.settle()
        assert engine.call("reset")
        time.sleep(1)
    assert engine.answer(prompt).cached == 512


def test_writes_that_hang_pin_no_more_than_their_bound(engine: EngineProcess, reference: Reference) -> None:
    before = engine.call("counts")
    engine.call("medium", writes="blocked")
    for seed in range(30, 34):  # 4 x 8 chunks of 4 blocks; a quarter of the engine's 200 blocks may be pinned
        prompt = make_prompt(seed, 1024)
        assert_same(engine.answer(prompt), reference.answer(prompt))
    gauges = engine.call("gauges")
    assert 0 < gauges["pinned_saves"] <= BLOCKS // 4 // 4
    counts = engine.call("counts")
    assert counts["saves_dropped_queue_full"] - before.get("saves_dropped_queue_full", 0) >= 20
    engine.call("medium")
    engine.settle()


def test_a_data_file_truncated_under_the_engine(
    engine: EngineProcess, prompts: Prompts, reference: Reference, tmp_path: Path
) -> None:
    """The last test of this file: the pool does not recover from this."""
    data = Path(engine.call("pool_status")["path"]) / "data"
    os.truncate(data, 1 << 20)
    before = engine.call("counts")
    assert_same(engine.answer(prompts.aligned), reference.answer(prompts.aligned))
    assert_same(engine.answer(prompts.unaligned), reference.answer(prompts.unaligned))
    assert risen(engine, before)["failed_blocks"] > 0
