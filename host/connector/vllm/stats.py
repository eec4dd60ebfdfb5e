"""Connector statistics in the form vLLM collects and logs."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class MeshFusionStats(KVConnectorStats):
    """Counts since the last collection; they add up."""

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


def counts_since(current: dict[str, int], former: dict[str, int]) -> dict[str, Any]:
    """What was added to each counter; unchanged ones are left out."""
    return {name: value - former.get(name, 0) for name, value in current.items() if value != former.get(name, 0)}
