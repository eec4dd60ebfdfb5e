"""What the scheduler's half and the worker's half of the connector tell each other, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from meshfusion.dpu.api.types import Attachment, Extent
from meshfusion.host.path.load_job import UnitFailure, UnitRead
from meshfusion.host.path.staged import ShardWritten


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load these units for a request; abandon it after ``abandon_after_s``."""

    request_id: str
    units: tuple[UnitRead, ...]
    abandon_after_s: float


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Write one chunk. Only valid while the worker holds the liveness of ``holder_id``."""

    save_id: int
    holder_id: str
    extent: Extent
    key: bytes
    identity: bytes
    position_tokens: int
    block_ids: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler to worker. ``attachment`` is the current one, or None while the service is away."""

    attachment: Attachment | None = None
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    request_id: str
    load_bytes: int
    seconds: float
    failures: tuple[UnitFailure, ...]


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Worker to scheduler. ``ready_holder_id``: whom the worker writes as; nothing of an earlier one is in flight."""

    ready_holder_id: str = ""
    written: tuple[ShardWritten, ...] = ()
    loads: tuple[LoadReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        # One rank so far (rank_count 1 is all that is served); its reports of one step simply add up.
        return StepReport(other.ready_holder_id, self.written + other.written, self.loads + other.loads)


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: what was proven at start. ``identity`` is the digest of ``identity_json``."""

    identity: bytes
    identity_json: str
    unit_bytes: int
    block_tokens: int
    hash_block_tokens: int
    block_count: int
    blocks_per_chunk: int
    selftest_bytes: int = 0
    extra: dict[str, str] = field(default_factory=dict)
