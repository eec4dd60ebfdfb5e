"""What an engine's endpoint tells of a request's way through the cache, and of how long its parts take."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.metrics import FUNNEL, GAUGES, HISTOGRAMS, LATENCY_BUCKETS_S, METRIC_PREFIX, METRICS
from meshfusion.host.connector.observations import Observations
from meshfusion.host.connector.vllm.stats import MeshFusionPromMetrics, MeshFusionStats
from tests.host.support.engine_on_pool import (
    CHUNK_TOKENS,
    EngineFactory,
    committed,
    corrupt,
    prompt,
    save_prompt,
    settle,
)
from tests.host.support.kv_memory import BLOCK_TOKENS
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import make_request

pytestmark = pytest.mark.usefixtures("quick_reattach")


def funnel(engine: MiniEngine) -> list[int]:
    """In the order of the table."""
    counts = engine.side.counts()
    return [counts.get(name, 0) for name in FUNNEL]


def test_a_whole_hit_goes_all_the_way(pool: Pool, start: EngineFactory) -> None:
    writer = start()
    tokens = prompt(4 * CHUNK_TOKENS + 3)
    save_prompt(writer, tokens)
    committed(pool, 4)
    asked = 4 * CHUNK_TOKENS
    assert funnel(writer) == [asked, 0, 0, 0, 0, 0, 0]
    reader = start()
    reader.add(make_request("reader", tokens + prompt(CHUNK_TOKENS, seed=2)))
    reader.run(local_tokens=BLOCK_TOKENS)
    found = 4 * CHUNK_TOKENS
    loaded = found - BLOCK_TOKENS
    assert funnel(reader) == [5 * CHUNK_TOKENS, found, found, loaded, loaded, loaded, loaded]
    wrote, read = writer.side.counts(), reader.side.counts()
    assert wrote["save_bytes_staged"] == wrote["saved_bytes"] > 0
    assert read["load_bytes_staged"] == read["loaded_bytes"] > 0
    assert wrote.keys() | read.keys() <= METRICS.keys()
    settle(writer, pool)
    settle(reader, pool)


def test_other_bytes_are_loaded_and_not_verified(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(4 * CHUNK_TOKENS + 3)
    save_prompt(engine, tokens)
    committed(pool, 4)
    chunks = pool.list_chunks(api.ListRequest(), deadline_s=1).chunks
    corrupt(pool, next(c for c in chunks if c.position_tokens == 2 * CHUNK_TOKENS), 1)
    before = funnel(engine)
    engine.add(make_request("reader", tokens))
    engine.run()
    asked, good = 4 * CHUNK_TOKENS, 2 * CHUNK_TOKENS + BLOCK_TOKENS
    assert [now - then for now, then in zip(funnel(engine), before, strict=True)] == [
        asked, asked, asked, asked, asked, good, good,
    ]  # fmt: skip
    settle(engine, pool)


def test_what_is_not_taken_is_leased_and_not_admitted(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(2 * CHUNK_TOKENS + 3)
    save_prompt(engine, tokens)
    committed(pool, 2)
    before = funnel(engine)
    engine.add(make_request("reader", tokens))
    engine.run(admit="zero")
    asked = 2 * CHUNK_TOKENS
    assert [now - then for now, then in zip(funnel(engine), before, strict=True)] == [asked, asked, asked, 0, 0, 0, 0]
    settle(engine, pool)


def test_each_part_is_timed(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    tokens = prompt(2 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    committed(pool, 2)
    first = engine.side.take_observations()
    assert first.keys() == {"lookup_seconds", "save_seconds"}
    engine.add(make_request("reader", tokens))
    engine.run()
    second = engine.side.take_observations()
    assert {name: len(values) for name, values in second.items()} == {"lookup_seconds": 1, "load_seconds": 1}
    assert all(0.0 < value < 10.0 for values in (*first.values(), *second.values()) for value in values)
    assert first.keys() | second.keys() == HISTOGRAMS.keys()
    assert engine.side.take_observations() == {}
    settle(engine, pool)


def test_observations_nobody_collects_are_bounded() -> None:
    observations = Observations(most=3)
    for value in range(5):
        observations.add("lookup_seconds", float(value))
    assert observations.take() == {"lookup_seconds": [0.0, 1.0, 2.0]}


def test_stats_add_up_and_say_means() -> None:
    first = MeshFusionStats(data={"lookups": 2, "lookup_seconds": [0.1, 0.3]})
    second = MeshFusionStats(data={"lookups": 1, "loads_started": 1, "lookup_seconds": [0.2], "load_seconds": [1.0]})
    both = first.aggregate(second)
    assert both.data == {
        "lookups": 3, "loads_started": 1, "lookup_seconds": [0.1, 0.3, 0.2], "load_seconds": [1.0],
    }  # fmt: skip
    assert first.data["lookup_seconds"] == [0.1, 0.3], "untouched"
    assert both.reduce() == {
        "lookups": 3,
        "loads_started": 1,
        "lookup_seconds_mean": 0.2,
        "lookup_seconds_max": 0.3,
        "load_seconds_mean": 1.0,
        "load_seconds_max": 1.0,
    }


def test_the_endpoint_shows_histograms() -> None:
    registry = CollectorRegistry()
    types: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    shown = MeshFusionPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    shown.observe({"lookups": 2, "lookup_seconds": [0.0004, 0.02, 0.03, 99.0], "audit_drift_max": 0.5})
    shown.observe({"lookups": 1, "lookup_seconds": [0.02]}, engine_idx=1)
    labels = {"model_name": "m", "engine": "0"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(METRIC_PREFIX + name, {**labels, **more})

    at_most = [value("lookup_seconds_bucket", le=str(bound)) for bound in LATENCY_BUCKETS_S]
    assert at_most == [1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert value("lookup_seconds_bucket", le="+Inf") == value("lookup_seconds_count") == 4
    assert value("lookup_seconds_sum") == pytest.approx(99.0504)
    assert (value("lookups_total"), value("audit_drift_max")) == (2, 0.5)


def test_no_name_is_in_two_tables() -> None:
    names = [*METRICS, *GAUGES, *HISTOGRAMS]
    assert len(names) == len(set(names))
