"""Connector statistics in the forms vLLM collects: its periodic log line and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from meshfusion.host.connector.metrics import GAUGES, HISTOGRAMS, LATENCY_BUCKETS_S, METRIC_PREFIX, METRICS


class MeshFusionStats(KVConnectorStats):
    """Counts since the last collection, which add up, with keys of ``METRICS`` and ``GAUGES``; and lists of what was
    observed, with keys of ``HISTOGRAMS``: the histograms of an engine's endpoint take single values only."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = dict(self.data)
        for name, value in other.data.items():
            merged[name] = merged[name] + value if name in merged else value
        return MeshFusionStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """For a line of the log: of what was observed its mean and maximum."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                reduced[f"{name}_mean"] = round(sum(value) / len(value), 6)
                reduced[f"{name}_max"] = round(max(value), 6)
            else:
                reduced[name] = value
        return reduced


class MeshFusionPromMetrics(KVConnectorPromMetrics):
    """``vllm:meshfusion_<name>_total`` on the engine's own endpoint, labelled as the engine's metrics are.

    Gauges and histograms go without ``_total``.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        counter_type = metric_types[Counter]
        self._counters = {
            name: counter_type(name=f"{METRIC_PREFIX}{name}", documentation=text, labelnames=labelnames)
            for name, text in METRICS.items()
        }
        gauge_type = metric_types[Gauge]
        self._counters |= {
            name: gauge_type(name=f"{METRIC_PREFIX}{name}", documentation=text, labelnames=labelnames)
            for name, text in GAUGES.items()
        }

        histogram_type = metric_types[Histogram]
        self._histograms = {
            name: histogram_type(
                name=f"{METRIC_PREFIX}{name}", documentation=text, buckets=LATENCY_BUCKETS_S, labelnames=labelnames
            )
            for name, text in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, added in transfer_stats_data.items():
            if name in self._histograms:
                histogram = self._histograms[name].labels(*labels)
                for value in added:
                    histogram.observe(value)
            elif added > 0:
                self._counters[name].labels(*labels).inc(added)


def counts_since(current: Mapping[str, float], former: Mapping[str, float]) -> dict[str, Any]:
    """What was added to each counter; unchanged ones are left out."""
    return {name: value - former.get(name, 0) for name, value in current.items() if value != former.get(name, 0)}
