"""What workers tell the scheduler's half when they have started, and what it makes of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from meshfusion.host.connector.off_note import WhyOff
from meshfusion.host.connector.vllm.messages import WorkerFacts


@dataclass
class WorkerOff(KVConnectorHandshakeMetadata):
    """Instead of facts: it serves without the cache (on_unsupported), and why."""

    why: WhyOff
    reason: str
    next_step: str


def only_worker(told: Iterable[KVConnectorHandshakeMetadata]) -> WorkerFacts | WorkerOff:
    """The facts of the one worker that is served, or why none is."""
    workers = list(told)
    for worker in workers:
        if isinstance(worker, WorkerOff):
            return worker
    if len(workers) == 1 and isinstance(workers[0], WorkerFacts):
        return workers[0]
    return WorkerOff(
        WhyOff.WORKERS,
        f"{len(workers)} workers answered and one is served so far",
        "use tensor_parallel_size 1, or start the engine without this connector",
    )
