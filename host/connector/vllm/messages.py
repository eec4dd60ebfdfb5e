"""What the scheduler's half and the workers' half of the connector tell each other, once per engine step.

All workers get the same orders; each carries out its rank's part of them and reports that once. They may cross
processes on the engine's own time, so what there is one of for each chunk or block is a column (a flat tuple), not an
object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from meshfusion.dpu.api.types import Access, Attachment
from meshfusion.host.connector.audits import BlockDrift
from meshfusion.host.connector.path_gate import PathState
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.path.block_layout import Runs
from meshfusion.host.path.load_job import UnitFailure
from meshfusion.host.pool_events import GrantedRun, RankDigests
from meshfusion.jbof.pool_addresses import split_pool_lba


class LoadOrder(NamedTuple):
    """Load units for a request, into ``block_ids``, an entry for each. ``lbas`` and ``digests`` have, for each KV group
    in order, a column for each of its shards, with an entry for each unit. Abandon it after ``abandon_after_s``.
    ``refusal``: why it must fail at once instead."""

    request_id: str
    block_ids: tuple[int, ...]
    lbas: tuple[tuple[tuple[int, ...], ...], ...]
    digests: tuple[tuple[tuple[bytes, ...], ...], ...]
    abandon_after_s: float
    refusal: str = ""

    @property
    def namespaces(self) -> frozenset[int]:
        """On which drives it lies."""
        columns = (column for shards in self.lbas for column in shards)
        return frozenset(split_pool_lba(lba)[0] for column in columns for lba in column)

    def units_of(self, form: ChunkForm, rank: int) -> Iterator[tuple[int, int, int, bytes]]:
        """What ``rank`` is to load of each unit: its group, logical block, device block and digest."""
        block_ids = iter(self.block_ids)
        for group, (lbas, digests) in enumerate(zip(self.lbas, self.digests, strict=True)):
            shard = form.shard_at(group, rank)
            for lba, digest in zip(lbas[shard], digests[shard], strict=True):
                yield group, lba, next(block_ids), digest


class SaveOrder(NamedTuple):
    """Write the granted chunks of a run, each worker its shards of them. The columns have an entry for each chunk: its
    KV group, its number in that group from the start of the request, and the device blocks that hold what is stored of
    it. Only valid while the worker holds the liveness of ``granted.holder_id``."""

    run_id: int
    groups: tuple[int, ...]
    indexes: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]
    granted: GrantedRun


class AuditOrder(NamedTuple):
    """Compare stored units with what the step now ordered computes. The columns have an entry for each: its KV group,
    where it is stored, the block with what was computed, a block to load what is stored into, and its digest; ``lbas``
    and ``digests`` one for each shard. Both blocks are held until all ranks have reported."""

    audit_id: int
    groups: tuple[int, ...]
    lbas: tuple[tuple[int, ...], ...]
    block_ids: tuple[int, ...]
    spare_block_ids: tuple[int, ...]
    digests: tuple[tuple[bytes, ...], ...]
    abandon_after_s: float


class AuditReport(NamedTuple):
    """Of one rank. ``drifts``: of every unit, in the order's order; none where it could not be done, for ``reason``.
    ``variation``: the largest difference of two computations of one unit, where one was audited before."""

    audit_id: int
    drifts: tuple[BlockDrift, ...]
    variation: float
    reason: str = ""
    rank: int = 0


class RunWritten(NamedTuple):
    """A save order is done by ``rank``, and flushed; where writes failed it was the first time for ``reason``. Nothing
    of it is in flight, except for those of the granted chunks (from 0) that are ``in_doubt``: they may still land on
    the medium. What was written took ``descriptors`` on ``path``."""

    run_id: int
    unit_digests: RankDigests
    reason: str = ""
    in_doubt: tuple[int, ...] = ()
    path: str = ""
    descriptors: int = 0
    rank: int = 0


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler to workers. ``attachment`` is the current one, or None while the service is away."""

    attachment: Attachment | None = None
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    audits: tuple[AuditOrder, ...] = ()


class LoadReport(NamedTuple):
    """Of one rank. ``refusal``: as in the order; ``path`` and ``descriptors``: as in
    :class:`~meshfusion.host.path.load_job.LoadResult`."""

    request_id: str
    load_bytes: int
    seconds: float
    failures: tuple[UnitFailure, ...]
    refusal: str = ""
    path: str = ""
    descriptors: int = 0
    rank: int = 0

    @property
    def is_whole(self) -> bool:
        """Has everything come that was to come?"""
        return not self.failures and not self.refusal


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: what each has to say about an order is said once, by ranks in any order. ``paths``: those
    that have changed."""

    written: tuple[RunWritten, ...] = ()
    loads: tuple[LoadReport, ...] = ()
    paths: tuple[PathState, ...] = ()
    audits: tuple[AuditReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        return StepReport(
            self.written + other.written,
            self.loads + other.loads,
            self.paths + other.paths,
            self.audits + other.audits,
        )


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """The worker ``rank`` to the scheduler, once: what was proven at start. ``identity`` is the digest of
    ``identity_json``; ``access`` is how this worker will reach the data (:class:`~meshfusion.dpu.api.types.Access`),
    ``runs`` what of its memory."""

    identity: bytes
    identity_json: str
    form: ChunkForm
    hash_block_tokens: int
    block_count: int
    runs: Runs
    rank: int = 0
    access: str = Access.LOCAL.value
    selftest_bytes: int = 0
    extra: dict[str, str] = field(default_factory=dict)
