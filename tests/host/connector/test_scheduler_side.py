"""Both halves of the connector on the real pool, around a small engine: whatever happens, bytes are right and in the
end nothing is held, neither by the engine nor by the pool."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool, create_pool
from meshfusion.host.connector.metrics import METRICS
from meshfusion.host.connector.read_failures import READ_FAILURES_MAX
from meshfusion.host.path.load_job import LoadJob, UnitFailure
from meshfusion.host.path.spans import Span
from meshfusion.host.path.staged import StagedLoader
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError, ServiceUnavailableError
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.nvme.queue_effects import QueueLostError
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
from tests.host.support.kv_memory import BLOCK_TOKENS, block_outermost, layer_outermost
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import make_request
from tests.host.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick_reattach")


@pytest.mark.parametrize("make_kv", [layer_outermost, block_outermost])
def test_what_one_engine_computed_the_next_one_loads(pool: Pool, start: EngineFactory, make_kv: Any) -> None:
    first = start()
    tokens = prompt(5 * CHUNK_TOKENS + 7)
    assert save_prompt(first, tokens).loaded_tokens == 0
    committed(pool, 5)
    settle(first, pool)
    second = start(make_kv(blocks=40))  # of another size, perhaps of another layout
    request = second.add(make_request("reader", tokens))
    second.run()
    assert request.loaded_tokens == 5 * CHUNK_TOKENS
    assert request.recomputed_tokens == 7
    assert second.is_right(request)
    assert second.side.counts().get("loaded_blocks", 0) == 10
    # The writer has three layers, each with a run of its own; five chunks are ten blocks.
    runs = {layer_outermost: 3, block_outermost: 1}[make_kv]
    wrote, read = first.side.counts(), second.side.counts()
    assert (wrote["save_descriptors_staged"], wrote["save_chunks_staged"]) == (10 * 3, 5)
    assert (read["load_descriptors_staged"], read["load_chunks_staged"]) == (10 * runs, 5)
    assert wrote.keys() | read.keys() <= METRICS.keys()
    assert settle(second, pool).committed_chunk_count == 5  # nothing was written twice


def test_several_hashes_for_each_block(pool: Pool, start: EngineFactory) -> None:
    engine = start(hashes_per_block=2)
    tokens = prompt(5 * CHUNK_TOKENS + BLOCK_TOKENS // 2)
    first = engine.add(make_request("writer", tokens, hashes_per_block=2))
    engine.run()
    committed(pool, 5)
    other = tokens[: 3 * CHUNK_TOKENS + BLOCK_TOKENS] + prompt(2 * CHUNK_TOKENS, seed=2)
    second = engine.add(make_request("reader", other, hashes_per_block=2))
    engine.run()
    assert second.loaded_tokens == 3 * CHUNK_TOKENS
    assert engine.is_right(first)
    assert engine.is_right(second)
    settle(engine, pool)


def test_a_full_prompt_hit_recomputes_one_token(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(3 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed(pool, 3)
    request = engine.add(make_request("reader", tokens))
    engine.run()
    assert (request.loaded_tokens, request.recomputed_tokens) == (3 * CHUNK_TOKENS, 1)
    assert engine.is_right(request)
    settle(engine, pool)


def test_the_pool_is_closed_and_opened_between_two_engines(tmp_path: Path, kernels: DigestKernels) -> None:
    """The embedded form: each engine owns the pool while it lives, and closing the engine closes it."""
    create_pool(tmp_path / "pool", size_bytes=16 << 20, segment_bytes=1 << 20)
    tokens = prompt(4 * CHUNK_TOKENS + 1)
    loaded = []
    for number in range(2):
        engine = MiniEngine(Pool.open(tmp_path / "pool"), layer_outermost(blocks=64), kernels)
        request = engine.add(make_request(f"r{number}", tokens))
        engine.run()
        assert engine.is_right(request)
        loaded.append(request.loaded_tokens)
        if number == 0:
            committed_by(engine, 4)
        engine.finish_all()
        engine.assert_nothing_held()
        engine.close()
    assert loaded == [0, 4 * CHUNK_TOKENS]


@pytest.mark.parametrize(
    ("admit", "local_tokens"),
    [
        ("full", BLOCK_TOKENS),
        ("full", CHUNK_TOKENS),
        ("full", 3 * BLOCK_TOKENS),
        ("trimmed", 0),
        ("trimmed", BLOCK_TOKENS),
        ("zero", 0),
    ],
)
def test_any_part_of_a_promise_may_be_taken(pool: Pool, start: EngineFactory, admit: str, local_tokens: int) -> None:
    engine = start()
    tokens = prompt(4 * CHUNK_TOKENS + 3)
    save_prompt(engine, tokens)
    committed(pool, 4)
    request = engine.add(make_request("reader", tokens))
    engine.run(admit=admit, local_tokens=local_tokens)
    promised = 4 * CHUNK_TOKENS - local_tokens
    wanted = {"full": promised, "trimmed": promised // BLOCK_TOKENS // 2 * BLOCK_TOKENS, "zero": 0}[admit]
    assert request.loaded_tokens == wanted
    assert engine.is_right(request)
    assert settle(engine, pool).committed_chunk_count == 4


@pytest.mark.parametrize("bad_chunk", [0, 2])
@pytest.mark.parametrize("bad_unit", [0, 1])
def test_a_corrupt_chunk_is_dropped_recomputed_and_saved_again(
    pool: Pool, start: EngineFactory, bad_chunk: int, bad_unit: int
) -> None:
    engine = start()
    tokens = prompt(4 * CHUNK_TOKENS + 3)
    save_prompt(engine, tokens)
    committed(pool, 4)
    chunks = {c.position_tokens: c for c in pool.list_chunks(api.ListRequest(), deadline_s=1).chunks}
    bad = chunks[bad_chunk * CHUNK_TOKENS]
    corrupt(pool, bad, bad_unit)

    request = engine.add(make_request("reader", tokens))
    engine.run()
    assert engine.is_right(request)
    assert request.loaded_tokens == bad_chunk * CHUNK_TOKENS + bad_unit * BLOCK_TOKENS
    assert engine.side.counts().get("digest_mismatches", 0) == 1
    until(lambda: pool.get_chunk(bad.key, deadline_s=1) not in (None, bad), what="for the chunk to be saved again")
    settle(engine, pool)

    again = engine.add(make_request("again", tokens))
    engine.run()
    assert again.loaded_tokens == 4 * CHUNK_TOKENS
    assert engine.is_right(again)
    settle(engine, pool)


def test_a_truncated_medium_costs_a_recompute_only(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(4 * CHUNK_TOKENS + 3)
    save_prompt(engine, tokens)
    committed(pool, 4)
    with pool._parts.taken.layout.data.open("r+b") as raw:
        raw.truncate(1 << 20)
    request = engine.add(make_request("reader", tokens))
    engine.run()
    assert engine.is_right(request)
    assert request.loaded_tokens == 0
    assert engine.side.counts().get("digest_mismatches", 0) == 0
    settle(engine, pool)


def test_never_scheduled(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(4 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed(pool, 4)
    engine.add(make_request("waits", tokens))
    engine.add(make_request("never asked about", tokens))
    for _ in range(20):
        engine.step(admit="no")
        time.sleep(0.001)
    assert engine.side.gauges()["live_leases"] == 2
    engine.add(make_request("gone at once", tokens))
    engine.abort("gone at once")
    settle(engine, pool)


def test_aborted_while_loading_and_while_saving(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(4 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed(pool, 4)
    request = engine.add(make_request("loads", tokens))
    # Admitted, and aborted before the step that would start the load has reported anything.
    until(lambda: engine.side.matched_tokens(request, 0))
    engine._try_admit(request, "full", 0)
    assert request.stage == "loading"
    engine.abort("loads")
    assert engine.side.gauges()["live_leases"] == 1
    settle(engine, pool)
    writer = engine.add(make_request("saves", prompt(4 * CHUNK_TOKENS, seed=2)))
    engine.step_until(lambda: engine.side.gauges()["pinned_saves"], tokens_max=1000)
    assert writer.request_id in engine.requests
    engine.abort("saves")
    assert settle(engine, pool).committed_chunk_count == 8  # its blocks were pinned: the saves went on


def test_preempted_and_resumed(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(6 * CHUNK_TOKENS + 9)
    request = engine.add(make_request("r", tokens))
    engine.step_until(lambda: request.num_computed_tokens >= 3 * CHUNK_TOKENS, tokens_max=CHUNK_TOKENS)
    engine.preempt("r")
    engine.step_until(lambda: engine.side.counters["chunks_committed"] >= 3, admit="no")
    engine.preempt("r") if request.stage == "running" else None
    engine.run()
    assert engine.is_right(request)
    assert settle(engine, pool).committed_chunk_count == 6


def test_a_reset_cuts_this_engine_off_from_what_was_before(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(4 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed(pool, 4)
    waiting = engine.add(make_request("waiting", tokens))
    for _ in range(5):
        engine.step(admit="no")
        time.sleep(0.002)
    former = engine.client.attachment
    engine.side.reset()
    engine.run()
    assert waiting.loaded_tokens == 0
    engine.step_until(lambda: engine.client.attachment)
    assert engine.client.attachment != former
    assert pool.status(deadline_s=1).committed_chunk_count == 4  # a request from before the reset is not saved
    settle(engine, pool)
    fresh = save_prompt(engine, tokens, "fresh")
    assert fresh.loaded_tokens == 0
    committed(pool, 8)
    again = engine.add(make_request("again", tokens))
    engine.run()
    assert again.loaded_tokens == 4 * CHUNK_TOKENS
    settle(engine, pool)
    other = start()
    request = other.add(make_request("other engine", tokens))
    other.run()
    assert request.loaded_tokens == 4 * CHUNK_TOKENS  # what it had saved before is still there for others
    settle(other, pool)


def test_two_engines_write_the_same_prompt_once(pool: Pool, start: EngineFactory) -> None:
    first, second = start(), start(block_outermost(blocks=64))
    tokens = prompt(6 * CHUNK_TOKENS)
    requests = [engine.add(make_request("r", tokens)) for engine in (first, second)]
    for _ in range(300):
        first.step(tokens_max=CHUNK_TOKENS)
        second.step(tokens_max=CHUNK_TOKENS)
    first.run()
    second.run()
    assert first.is_right(requests[0])
    assert second.is_right(requests[1])
    settle(first, pool)
    assert settle(second, pool).committed_chunk_count == 6
    counters = dict(pool.status(deadline_s=1).counters)
    assert counters["committed_chunks"] == 6


class Flaky:
    """The pool, until it is switched off: then nothing answers in time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_away:
                raise ServiceUnavailableError("away", next_step="wait")
            return getattr(self._pool, name)(*args, **kwargs)

        return call

    def close(self) -> None:
        pass


def test_the_service_goes_away_in_the_middle(pool: Pool, start: EngineFactory) -> None:
    service = Flaky(pool)
    engine = start(service=service)
    save_prompt(engine, prompt(3 * CHUNK_TOKENS))
    committed(pool, 3)
    request = engine.add(make_request("r", prompt(3 * CHUNK_TOKENS)))
    until(lambda: engine.side.matched_tokens(request, 0))
    service.is_away = True
    other = engine.add(make_request("other", prompt(5 * CHUNK_TOKENS, seed=2)))
    engine.run()
    assert request.loaded_tokens == 3 * CHUNK_TOKENS  # it was promised, and the medium is still there
    assert engine.is_right(request)
    assert engine.is_right(other)
    assert other.loaded_tokens == 0
    engine.finish_all()
    engine.run()
    engine.assert_nothing_held()
    service.is_away = False
    engine.step_until(lambda: engine.client.attachment)
    save_prompt(engine, prompt(5 * CHUNK_TOKENS, seed=2), "later")
    committed(pool, 8)


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_hour(pool: Pool, start: EngineFactory, seed: int) -> None:
    """Requests with shared beginnings come, go, are preempted and trimmed; chunks rot; the cache is small."""
    rng = random.Random(seed)
    engine = start(layer_outermost(blocks=90), blocks_per_chunk=rng.choice([1, 2, 3]), save_queue=1 << 20)
    stems = [prompt(rng.randrange(100, 400), seed=i) for i in range(4)]
    for number in range(3000):
        if number >= 150 and engine.side.counts().get("loaded_blocks", 0):
            break  # on a slow machine the first chunks are committed late
        if len(engine.requests) < 5:
            stem = rng.choice(stems)
            tokens = stem[: rng.randrange(20, len(stem))] + prompt(rng.randrange(60), seed=number)
            engine.add(make_request(f"r{number}", tokens))
        engine.step(
            admit=rng.choice(["full", "full", "full", "trimmed", "zero", "no"]),
            tokens_max=rng.choice([16, 48, 200]),
            local_tokens=0,
        )
        for request in list(engine.requests.values()):
            dice = rng.random()
            if request.stage == "done":
                assert engine.is_right(request)
                engine.abort(request.request_id)
            elif dice < 0.03:
                engine.abort(request.request_id)
            elif dice < 0.10 and request.stage == "running":
                engine.preempt(request.request_id)
        if rng.random() < 0.05:
            chunks = pool.list_chunks(api.ListRequest(), deadline_s=1).chunks
            if chunks:
                corrupt(pool, rng.choice(chunks), 0)
        time.sleep(0.0005)
    engine.run()
    for request in engine.requests.values():
        assert engine.is_right(request)
    settle(engine, pool)
    assert engine.side.counts().get("loaded_blocks", 0) > 0


def test_a_path_that_reads_nothing_is_no_reason_to_drop_what_others_can_read(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose way to the data is broken would empty the pool for all, chunk by chunk."""
    engine = start()
    tokens = prompt(3 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed_by(engine, 3)
    with monkeypatch.context() as broken:
        broken.setattr(StagedLoader, "load", raising(MediaError("no path to the target", next_step="-")))
        for i in range(2 * READ_FAILURES_MAX):
            request = engine.add(make_request(f"broken-{i}", tokens))
            engine.run()
            assert engine.is_right(request)
    assert engine.side.counts()["failed_blocks"] >= 3 * 2 * 2 * READ_FAILURES_MAX
    assert dict(pool.status(deadline_s=1).counters).get("dropped_chunks", 0) == 0
    request = engine.add(make_request("again", tokens))
    engine.run()
    assert request.loaded_tokens == 3 * CHUNK_TOKENS
    settle(engine, pool)


def test_a_chunk_that_cannot_be_read_while_others_can_is_dropped(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    good, bad = prompt(2 * CHUNK_TOKENS, 1), prompt(2 * CHUNK_TOKENS, 2)
    for tokens in (good, bad):
        engine.add(make_request(f"save-{len(engine.requests)}", tokens))
    committed_by(engine, 4)
    chunks = {chunk.shards[0].extent.lba: chunk for chunk in pool.list_chunks(api.ListRequest(), deadline_s=1).chunks}
    held_by_bad = sorted(chunks)[2:]
    load = StagedLoader.load

    def load_or_fail(loader: StagedLoader, job: LoadJob, span: Span) -> Sequence[UnitFailure | None]:
        if job.units[span.first].lba > held_by_bad[0]:
            raise errors[0]
        return load(loader, job, span)

    monkeypatch.setattr(StagedLoader, "load", load_or_fail)

    numbers = itertools.count()

    def read_both(count: int) -> None:
        for _ in range(count):
            for tokens in (good, bad):
                engine.add(make_request(f"read-{next(numbers)}", tokens))
                engine.run()
                engine.finish_all()
                engine.run()

    errors: list[MediaError] = [QueueLostError("the way there broke", next_step="-")]
    read_both(2 * READ_FAILURES_MAX)
    assert dict(pool.status(deadline_s=1).counters).get("dropped_chunks", 0) == 0, "that says nothing of the medium"
    errors = [DataFileError(MediaFault.IO, "reading failed", Path("data"))]
    read_both(READ_FAILURES_MAX)
    until(lambda: dict(pool.status(deadline_s=1).counters).get("dropped_chunks", 0) == 2)
    settle(engine, pool)
