"""An engine process in a guest, which has no NUMA nodes, and whose path into its memory is watched."""

from __future__ import annotations

import sys
from typing import Any

import vllm.utils.cpu_resource_utils

from meshfusion.host.connector import path_gate
from meshfusion.host.connector.vllm import scheduler
from meshfusion.host.path.rdma import RdmaMedium
from meshfusion.jbof.nvme.memory import RegionPart
from tests.e2e import engine_child

MOVED = {"inside": 0, "outside": 0}
"""Bytes of what commands were given as memory: inside of the engine's own tensors, and not."""


def watch() -> None:
    """Counts what loads and saves give to the target as memory."""
    for name in ("parts_to_read", "parts_to_write"):
        _watch(name, getattr(RdmaMedium, name))


def _watch(name: str, parts_of: Any) -> None:
    def watched(medium: RdmaMedium, group: int, block_id: int) -> list[RegionPart]:
        parts: list[RegionPart] = parts_of(medium, group, block_id)
        start = medium.memory.place.address
        end = start + medium.memory.place.length_bytes
        for part in parts:
            is_inside = start <= part.remote.address <= part.remote.address + part.length_bytes <= end
            MOVED["inside" if is_inside else "outside"] += part.length_bytes
        return parts

    setattr(RdmaMedium, name, watched)


class PatientGate(path_gate.PathGate):
    """Connecting takes seconds here, beside an engine that asks all the time: each reading of the clock is a system
    call."""

    def __init__(self, rank_count: int) -> None:
        super().__init__(rank_count, patience_s=30.0)


class Engine(engine_child.Engine):
    def moved(self) -> dict[str, int]:
        return MOVED


if __name__ == "__main__":
    vllm.utils.cpu_resource_utils.get_memory_affinity = lambda pid=0: [0]
    watch()
    vars(scheduler)["PathGate"] = PatientGate
    engine_child.Engine = Engine  # type: ignore[misc]
    engine_child.main(int(sys.argv[1]))
