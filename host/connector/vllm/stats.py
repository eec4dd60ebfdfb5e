"""Connector statistics in the forms vLLM collects: its periodic log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Name in SchedulerSide.counts() -> what it counts. One table: the log line, the endpoint and the docs come from it.
METRICS: dict[str, str] = {
    "lookups": "Lookups of a request's chunks in the pool",
    "lookup_hits": "Lookups answered with at least one chunk",
    "lookups_timed_out": "Lookups that did not answer within the deadline and counted as a miss",
    "promises_lost": "Promises whose lease the service no longer knew",
    "promises_too_old": "Promises given back because the request was not scheduled for too long",
    "loads_not_worth": "Hits not loaded because recomputing was estimated to be faster",
    "loads_started": "Loads started",
    "loads_failed": "Loads of which at least one block failed and was recomputed",
    "loaded_blocks": "Blocks loaded and proven",
    "loaded_bytes": "Bytes loaded and proven",
    "load_us": "Microseconds from the start to the end of loads, added up",
    "failed_blocks": "Blocks that did not load and were recomputed",
    "digest_mismatches": "Blocks whose bytes did not match their digest",
    "saves_asked": "Chunks offered to the pool",
    "saves_granted": "Chunks for which the pool gave a place",
    "saves_existing": "Chunks that were stored already",
    "saves_busy": "Chunks that another writer was storing",
    "saves_no_space": "Chunks for which the pool had no space",
    "saves_dropped_queue_full": "Chunks not offered because too many saves were under way",
    "saves_dropped_service": "Chunks not saved because the service could not be asked",
    "saves_failed": "Chunks that could not be written",
    "saved_bytes": "Bytes written to the pool",
    "chunks_committed": "Chunks made visible to other engines",
    "commits_refused": "Chunks written but refused by the service (their grant had expired, or the service restarted)",
}


class MeshFusionStats(KVConnectorStats):
    """Counts since the last collection; they add up. Keys are those of :data:`METRICS`."""

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
    """``vllm:meshfusion_<name>_total`` on the engine's own endpoint, labelled as the engine's metrics are."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        counter_type = metric_types[Counter]
        self._counters = {
            name: counter_type(name=f"vllm:meshfusion_{name}", documentation=text, labelnames=labelnames)
            for name, text in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, added in transfer_stats_data.items():
            if added > 0:
                self._counters[name].labels(*labels).inc(added)


def counts_since(current: dict[str, int], former: dict[str, int]) -> dict[str, Any]:
    """What was added to each counter; unchanged ones are left out."""
    return {name: value - former.get(name, 0) for name, value in current.items() if value != former.get(name, 0)}
