"""What is exposed is what the table has, as another reader of Prometheus' text understands it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from meshfusion.dpu.api import types as t
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.collector import Metrics
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.pool_watch import PoolWatch
from meshfusion.dpu.telemetry.probe_result import ProbeState, ProbeView
from meshfusion.dpu.telemetry.snapshot import Limits
from meshfusion.dpu.telemetry.table import COUNTERS_TOLD_OTHERWISE, LABEL_VALUES, METRICS, Kind
from meshfusion.dpu.telemetry.watched_pool import WatchedPool
from meshfusion.jbof.drives.life_words import State
from meshfusion.jbof.policy.medium_policy import Refusal
from tests.dpu.api.fake_service import make_status
from tests.dpu.telemetry.fakes import FakePool, make_drive, wait_until

DPU = Path(__file__).resolve().parents[3] / "dpu"
SOURCES = {source for metric in METRICS.values() for _, source in metric.source}


class Scraped:
    """A pool and what is scraped of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.pool = FakePool()
        self.events = EventLog()
        self.calls = CallWatch(slow_call_s=1.0)
        self.calls.watch("Match", lambda raw, context: raw)
        self.watch = PoolWatch(self.pool, self.pool, self.events, version="9.8.7", index_directory=tmp_path)
        self.view = ProbeView(ProbeState.OK, (), 0.25, 3.0, 60.0)
        limits = Limits(quarantine_max_fraction=0.25, max_pinned_fraction=0.5, drive_writes_per_day=1.0)
        pool = WatchedPool("", self.watch, lambda: self.view, lambda: limits)
        self.metrics = Metrics([pool], self.calls, self.events, version="9.8.7")
        self.watch.start()

    def families(self) -> dict[str, Family]:
        """By the name of the table."""
        found = list(text_string_to_metric_families(self.metrics.text().decode()))
        names = [f"{f.name}_total" if f.type == "counter" else f.name for f in found]
        assert len(set(names)) == len(names)
        return dict(zip(names, found, strict=True))

    def values(self) -> dict[tuple[str, ...], float]:
        """By name and labels' values, in the order of the labels' names; an empty label is none, as to Prometheus."""
        return {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels) if sample.labels[name])): sample.value
            for family in self.families().values()
            for sample in family.samples
        }


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Scraped]:
    (tmp_path / "data.mdb").write_bytes(b"x" * 8192)
    it = Scraped(tmp_path)
    yield it
    it.pool.hold.set()
    it.watch.close()


def test_exposed_is_what_the_table_has_and_the_reverse(scraped: Scraped) -> None:
    scraped.calls._ended("Match", 0.003, "OK", "r")
    families = scraped.families()
    assert families.keys() == METRICS.keys()
    for name, family in families.items():
        metric = METRICS[name]
        assert family.type == metric.kind.value, name
        assert family.documentation == metric.help or name.startswith("process_")
        assert family.samples, f"{name} has no value"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), name


def test_every_known_value_of_a_label_is_exposed(scraped: Scraped) -> None:
    families = scraped.families()
    known = dict(LABEL_VALUES)
    for metric in METRICS.values():
        if metric.labels[-1:] not in ((), ("pool",)) and metric.source:
            known[metric.name, metric.labels[-1]] = tuple(label for label, _ in metric.source)
    for (name, label), values in known.items():
        assert {sample.labels[label] for sample in families[name].samples} == set(values), name


def test_no_label_can_grow_without_end() -> None:
    bounded = {
        "call",
        "code",
        "drive",
        "version",
        "pool",
        "pool_uuid",
        "format_version",
    }  # of this program, or few by nature
    for metric in METRICS.values():
        for label in metric.labels:
            is_listed = (metric.name, label) in LABEL_VALUES or bool(metric.source)
            assert is_listed or label in bounded, f"{metric.name}{{{label}}}"


def test_names_say_their_kind_and_unit() -> None:
    for metric in METRICS.values():
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        stem = metric.name.removesuffix("_total").removesuffix("_max")
        for unit in ("bytes", "seconds"):
            assert stem.endswith(f"_{unit}") == (metric.unit == unit), metric.name


def counter_names() -> set[str]:
    """Every name under which the service's code counts."""
    words = {
        "{result.outcome.value}": [outcome.value for outcome in t.ReserveOutcome],
        "{reason.name.lower()}": [reason.name.lower() for reason in Refusal if reason],
    }
    found = set()
    pattern = re.compile(r'\bcount(?:er)?s\[f?"([^"]+)"\]|(?<!pb\.)Counter\((\w+)=|^ {12}"(drive\w*)": ', re.MULTILINE)
    for path in DPU.rglob("*.py"):
        if "telemetry" in path.parts:
            continue
        for groups in pattern.findall(path.read_text()):
            name = next(filter(None, groups))
            place = next((place for place in words if place in name), None)
            found |= {name} if place is None else {name.replace(place, word) for word in words[place]}
    return found


def test_the_table_has_every_counter_of_the_code() -> None:
    assert counter_names() == SOURCES | COUNTERS_TOLD_OTHERWISE


def test_values(scraped: Scraped, tmp_path: Path) -> None:
    holders = tuple(
        t.HolderStatus(f"h-{i}", "vllm", "1", "box", i, 0, 0, 1.5 * i, state)
        for i, state in enumerate(("live", "live", "silent"))
    )
    scraped.pool.current_status = make_status(
        segment_count=100,
        segments_free=60,
        segments_open=10,
        segments_sealed=30,
        segments_quarantined=7,
        pinned_bytes=5 << 20,
        holders=holders,
        saves_stopped_reason="full",
        exports_problem="gone",
        counters=(
            *(("match_keys", 50), ("matched_chunks", 20), ("reserve_no_space", 3), ("declined_budget", 4)),
            *(("saves_stopped_ms", 2500), ("index_scans_under_way", 1)),
        ),
    )
    scraped.pool.current_drives = (
        make_drive(0),
        make_drive(1, state=State.FAILING.value, percentage_used=-1, months_left=float("inf"), problem="errors"),
    )
    scraped.calls._ended("Match", 0.003, "OK", "r")
    scraped.calls._ended("Match", 0.3, "UNAVAILABLE", "r")
    scraped.events.tell("saves_stopped", "full")
    values = scraped.values()
    expected: dict[tuple[str, ...], float] = {
        ("meshfusion_match_keys_total",): 50,
        ("meshfusion_match_chunks_total",): 20,
        ("meshfusion_reserve_items_total", "no_space"): 3,
        ("meshfusion_reserve_items_total", "granted"): 0,
        ("meshfusion_reserve_declined_total", "budget"): 4,
        ("meshfusion_segments", "free"): 60,
        ("meshfusion_segments", "open"): 10,
        ("meshfusion_segments", "sealed"): 30,
        ("meshfusion_segments_quarantined",): 7,
        ("meshfusion_segments_quarantined_limit",): 25,
        ("meshfusion_pinned_bytes",): 5 << 20,
        ("meshfusion_pinned_limit_bytes",): 50 * (64 << 20),
        ("meshfusion_holders", "live"): 2,
        ("meshfusion_holders", "silent"): 1,
        ("meshfusion_holders", "condemned"): 0,
        ("meshfusion_holder_silent_seconds_max",): 3.0,
        ("meshfusion_saves_stopped",): 1,
        ("meshfusion_exports_problem",): 1,
        ("meshfusion_index_scan",): 1,
        ("meshfusion_epoch",): 3,
        ("meshfusion_build_info", "9.8.7"): 1,
        ("meshfusion_drive_state", "0", "online"): 1,
        ("meshfusion_drive_state", "1", "failing"): 1,
        ("meshfusion_drive_state", "1", "online"): 0,
        ("meshfusion_drive_percentage_used", "0"): 7,
        ("meshfusion_drive_months_left", "1"): float("inf"),
        ("meshfusion_drive_problem", "1"): 1,
        ("meshfusion_drive_written_bytes", "0"): 5 << 40,
        ("meshfusion_drive_media_errors", "0"): 2,
        ("meshfusion_drive_spare_percentage", "0"): 98,
        ("meshfusion_drive_write_budget_left_bytes", "0"): 1 << 29,
        ("meshfusion_drive_write_budget_limit_bytes", "0"): 1 << 30,  # a quarter of a day's, at once
        ("meshfusion_drive_command_failures_total", "0"): 3,
        ("meshfusion_drive_read_latency_seconds", "0"): 0.0001,
        ("meshfusion_rpc_total", "Match", "OK"): 1,
        ("meshfusion_rpc_total", "Match", "UNAVAILABLE"): 1,
        ("meshfusion_rpc_seconds_bucket", "Match", "0.002"): 0,
        ("meshfusion_rpc_seconds_bucket", "Match", "0.005"): 1,
        ("meshfusion_rpc_seconds_bucket", "Match", "+Inf"): 2,
        ("meshfusion_rpc_seconds_count", "Match"): 2,
        ("meshfusion_rpc_seconds_sum", "Match"): 0.303,
        ("meshfusion_probe_state", "ok"): 1,
        ("meshfusion_probe_state", "failing"): 0,
        ("meshfusion_probe_seconds",): 0.25,
        ("meshfusion_pool_answers",): 1,
    }
    assert {key: values[key] for key in expected} == pytest.approx(expected)
    assert values["meshfusion_saves_stopped_seconds",] >= 2.5
    assert values["meshfusion_events_total", "saves_stopped"] >= 1
    assert ("meshfusion_drive_percentage_used", "1") not in values
    blocks = (tmp_path / "data.mdb").stat().st_blocks
    assert values["meshfusion_index_bytes",] == blocks * 512


def test_counters_never_go_back(scraped: Scraped) -> None:
    name = "meshfusion_match_keys_total"
    status = scraped.pool.current_status
    for told, expected in ((5, 5), (3, 5), (6, 6)):
        scraped.pool.current_status = replace(status, counters=(("match_keys", told),))
        assert scraped.values()[name,] == expected


def test_a_pool_that_does_not_answer_is_told_and_nothing_old_is(
    scraped: Scraped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfusion.dpu.telemetry.collector.SCRAPE_DEADLINE_S", 0.1)
    assert scraped.values()["meshfusion_pool_answers",] == 1
    scraped.pool.hold.clear()
    values = scraped.values()
    assert values["meshfusion_pool_answers",] == 0
    assert ("meshfusion_capacity_bytes",) not in values
    assert ("meshfusion_build_info", "9.8.7") in values
    scraped.pool.hold.set()
    wait_until(lambda: scraped.values()["meshfusion_pool_answers",] == 1, "the pool answers again")


def test_a_failing_look_is_no_answer(scraped: Scraped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.dpu.telemetry.collector.SCRAPE_DEADLINE_S", 5.0)
    scraped.pool.failure = RuntimeError("broken")
    assert scraped.values()["meshfusion_pool_answers",] == 0
    scraped.pool.failure = None
    assert scraped.values()["meshfusion_pool_answers",] == 1


def test_buckets_rise_and_end_with_all(scraped: Scraped) -> None:
    for seconds in (0.0, 0.0005, 0.00051, 10.0, 10.1, 99.0):
        scraped.calls._ended("Match", seconds, "OK", "r")
    buckets = [
        value for key, value in scraped.values().items() if key[:2] == ("meshfusion_rpc_seconds_bucket", "Match")
    ]
    assert buckets[0] == 2, "a bound belongs to its bucket"
    assert all(low <= high for low, high in itertools.pairwise(buckets))
    assert buckets[-2:] == [4, 6]


class TwoPools:
    """``red`` and ``lab``, and what is scraped of their service. ``families``: by the name of the table."""

    def __init__(self) -> None:
        self.events, self.pools = EventLog(), {"red": FakePool(), "lab": FakePool()}
        self.budgets: dict[str, float | None] = {"red": 1.0, "lab": None}
        failing, good = ProbeView(ProbeState.FAILING, ("x",), 0.5, 1.0), ProbeView(ProbeState.OK, (), 0.1, 2.0)
        self.views = {"red": failing, "lab": good}
        self.watches = {
            name: PoolWatch(pool, pool, self.events.of_pool(name), version="1", name=name)
            for name, pool in self.pools.items()
        }
        watched = [
            WatchedPool(name, watch, partial(self.views.__getitem__, name), partial(self.limits_of, name))
            for name, watch in self.watches.items()
        ]
        self.metrics = Metrics(watched, CallWatch(slow_call_s=1.0), self.events, version="1")
        for watch in self.watches.values():
            watch.start()

    def limits_of(self, name: str) -> Limits:
        return Limits(0.25, 0.5, self.budgets[name])

    def values(self, name: str) -> dict[str, float]:
        """Of a metric without other labels, by pool."""
        found = [f for f in text_string_to_metric_families(self.metrics.text().decode()) if f.name == name]
        assert len(found) <= 1, "a family stands once, however many pools there are"
        return {sample.labels["pool"]: sample.value for family in found for sample in family.samples}


@pytest.fixture
def two() -> Iterator[TwoPools]:
    it = TwoPools()
    yield it
    for name, watch in it.watches.items():
        it.pools[name].hold.set()
        watch.close()


def test_of_several_pools_each_is_told_by_its_name(two: TwoPools) -> None:
    two.pools["red"].current_status = make_status(
        counters=(("match_keys", 7),), saves_stopped_reason="full", segment_count=100
    )
    two.pools["lab"].current_status = make_status(counters=(("match_keys", 5),), segment_count=40)
    assert two.values("meshfusion_match_keys") == {"red": 7, "lab": 5}
    assert two.values("meshfusion_saves_stopped") == {"red": 1, "lab": 0}
    assert two.values("meshfusion_segments_quarantined_limit") == {"red": 25, "lab": 10}
    assert two.values("meshfusion_probe_seconds") == {"red": 0.5, "lab": 0.1}
    assert two.values("meshfusion_pool_answers") == {"red": 1, "lab": 1}
    assert two.values("meshfusion_drive_write_budget_limit_bytes") == {"red": 1 << 30}
    two.budgets["lab"] = 2.0  # by a reload
    assert two.values("meshfusion_drive_write_budget_limit_bytes") == {"red": 1 << 30, "lab": 1 << 31}
    two.pools["red"].current_status = make_status(counters=(("match_keys", 6),))
    assert two.values("meshfusion_match_keys") == {"red": 7, "lab": 5}, "no count goes back, and each is its own"


def test_a_pool_that_hangs_takes_nothing_from_the_others(two: TwoPools, monkeypatch: pytest.MonkeyPatch) -> None:
    two.pools["lab"].current_status = make_status(counters=(("match_keys", 5),))
    assert two.values("meshfusion_pool_answers") == {"red": 1, "lab": 1}
    monkeypatch.setattr("meshfusion.dpu.telemetry.collector.SCRAPE_DEADLINE_S", 0.5)
    two.pools["red"].hold.clear()  # which is asked first
    assert two.values("meshfusion_pool_answers") == {"red": 0, "lab": 1}
    assert two.values("meshfusion_match_keys") == {"lab": 5}


def test_what_is_of_a_pool_has_its_label_and_nothing_else_has() -> None:
    of_the_service = {name for name, metric in METRICS.items() if "pool" not in metric.labels}
    assert {name for name in of_the_service if not name.startswith("process_")} == {
        *("meshfusion_build_info", "meshfusion_rpc_in_flight", "meshfusion_rpc_seconds", "meshfusion_rpc_total"),
        *("meshfusion_rpc_slow_total", "meshfusion_events_total", "meshfusion_event_watchers"),
    }
    assert all(metric.labels[0] == "pool" for metric in METRICS.values() if "pool" in metric.labels)
