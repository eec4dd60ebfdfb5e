"""Connector statistics in the forms vLLM collects: its periodic log line and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from meshfusion.host.connector.metrics import GAUGES, METRIC_PREFIX, METRICS


class MeshFusionStats(KVConnectorStats):
    """Counts since the last collection; they add up. Keys are those of ``METRICS`` and ``GAUGES``."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = dict(self.data)
        for name, value in other.data.items():
            merged[name] = merged.get(name, 0) + value
        return MeshFusionStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


class MeshFusionPromMetrics(KVConnectorPromMetrics):
    """``vllm:meshfusion_<name>_total`` on the engine's own endpoint, labelled as the engine's metrics are.

    Gauges go without ``_total``.
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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, added in transfer_stats_data.items():
            if added > 0:
                self._counters[name].labels(*labels).inc(added)


def counts_since(current: Mapping[str, float], former: Mapping[str, float]) -> dict[str, Any]:
    """What was added to each counter; unchanged ones are left out."""
    return {name: value - former.get(name, 0) for name, value in current.items() if value != former.get(name, 0)}
