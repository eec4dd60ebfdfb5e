"""Makes Prometheus' text from what the service knows, when it is scraped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from meshfusion.dpu.telemetry.calls import CallCounts, CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.samples import Sample, one_of, pool_samples
from meshfusion.dpu.telemetry.table import METRICS, PREFIX, PROCESS, RPC_BUCKETS_S, Kind
from meshfusion.dpu.telemetry.watched_pool import Look, WatchedPool, look_at

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SCRAPE_DEADLINE_S: Final = 3.0  # Prometheus gives up after 10 s, unless told otherwise
_RPC = f"{PREFIX}rpc_seconds"


class Metrics:
    """Of all pools of a service."""

    def __init__(self, pools: Sequence[WatchedPool], calls: CallWatch, events: EventLog, *, version: str) -> None:
        self._pools = tuple(pools)
        self._calls = calls
        self._events = events
        self._version = version
        self._mutex = threading.Lock()
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}
        # Of our own: what others in this process put into the global one is theirs.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self._families))
        self._registry.register(_Listed(ProcessCollector(registry=None)))

    def text(self) -> bytes:
        """In the format of :data:`CONTENT_TYPE`. What cannot be read in time is absent, and told."""
        return generate_latest(self._registry)

    def _families(self) -> Iterator[Metric]:
        looks = look_at(self._pools, deadline_s=SCRAPE_DEADLINE_S)
        calls = self._calls.counts()
        samples = list(self._own(calls))
        samples += (sample.of_pool(look.pool.name) for look in looks for sample in _of_pool(look))
        with self._mutex:
            families = self._as_families(samples)
        yield from families
        yield _histogram(calls)

    def _own(self, calls: CallCounts) -> Iterator[Sample]:
        yield Sample(f"{PREFIX}build_info", 1, (self._version,))
        yield Sample(f"{PREFIX}rpc_in_flight", calls.in_flight)
        for (call, code), count in calls.codes.items():
            yield Sample(f"{PREFIX}rpc_total", count, (call, code))
        yield Sample(f"{PREFIX}rpc_slow_total", calls.slow)
        yield from one_of("events_total", self._events.counts)
        yield Sample(f"{PREFIX}event_watchers", self._events.watcher_count)

    def _as_families(self, samples: list[Sample]) -> list[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in samples:
            metric = METRICS[sample.metric]
            assert len(sample.labels) == len(metric.labels), f"{sample} has not the labels of the table"
            family = families.get(metric.name)
            if family is None:
                make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                family = families[metric.name] = make(metric.name, metric.help, labels=metric.labels)
            value = self._at_least(sample) if metric.kind is Kind.COUNTER else sample.value
            family.add_metric(sample.labels, value)
        return list(families.values())

    def _at_least(self, sample: Sample) -> float:
        """Parts of the pool are counted one after another while they change: a count that seemed to go back would be
        taken for a restart, and all of it added once more."""
        key = sample.metric, sample.labels
        value = self._highest[key] = max(sample.value, self._highest.get(key, 0))
        return value


def _of_pool(look: Look) -> Iterator[Sample]:
    """As :mod:`~meshfusion.dpu.telemetry.samples` makes them."""
    yield Sample(f"{PREFIX}pool_answers", look.snapshot is not None)
    probe = look.pool.probed()
    yield from one_of("probe_state", {probe.state.value: 1})
    if probe.age_s is not None:
        yield Sample(f"{PREFIX}probe_seconds", probe.seconds)
        yield Sample(f"{PREFIX}probe_age_seconds", probe.age_s)
    if look.snapshot is not None:
        yield from pool_samples(look.snapshot, look.pool.limits())


def _histogram(calls: CallCounts) -> HistogramMetricFamily:
    metric = METRICS[_RPC]
    family = HistogramMetricFamily(_RPC, metric.help, labels=metric.labels)
    bounds = [*map(str, RPC_BUCKETS_S), "+Inf"]
    for call, times in calls.times.items():
        family.add_metric((call,), list(zip(bounds, times.cumulative, strict=True)), times.sum_s)
    return family


class _Collector(Collector):
    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


class _Listed(Collector):
    """Of what the library tells of the process, what the table has: another version may tell more."""

    def __init__(self, of_process: ProcessCollector) -> None:
        self._of_process = of_process
        self._names = {metric.name.removesuffix("_total") for metric in PROCESS}

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._of_process.collect() if family.name in self._names)
