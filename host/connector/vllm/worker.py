"""The worker's half: proves the layout at start, then carries out load and save orders."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.types import Attachment, Extent
from meshfusion.host.connector.config import ConnectorConfig
from meshfusion.host.connector.vllm.messages import (
    LoadOrder,
    LoadReport,
    RunWritten,
    SaveOrder,
    StepOrders,
    StepReport,
    WorkerFacts,
)
from meshfusion.host.kv.freshness import process_started_ns
from meshfusion.host.kv.identity import build_identity, hash_block_tokens
from meshfusion.host.kv.layout import backing_memory, derive_layout
from meshfusion.host.kv.selftest import run_selftest
from meshfusion.host.kv.weights import FileDigester, processor_fact, weights_fact
from meshfusion.host.path.cpus import engine_cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.kernel_mover import KernelMover
from meshfusion.host.path.load_job import LoadJob, LoadResult, UnitFailure, UnitRead
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from meshfusion.host.path.staged import staged_path
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.errors import FormatError, MeshFusionError
from meshfusion.jbof.format import (
    LABEL_LBAS,
    LBA_BYTES,
    ChunkHeader,
    decode_label_copies,
    shard_lba_count,
)
from meshfusion.jbof.media.file import DirectMode, open_data_file

logger = logging.getLogger("meshfusion.worker")

READ_BYTES = 6 << 20  # staging of one load thread; a larger unit gets what it needs


class WorkerSide:
    """Lives in the worker process. All methods are called on the engine's thread and never wait for the medium."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        *,
        is_digest_right: Callable[[bytes, bytes], bool],
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._is_digest_right = is_digest_right
        self._attachment: Attachment | None = None
        self._refused_holder_id = ""  # an attachment that this worker could not take up
        self._liveness: int | None = None  # held only while something is written: an idle engine holds up nobody
        self._path: DataPath | None = None
        self._pool_uuid = ""
        self._jobs: dict[str, tuple[LoadOrder, LoadJob | LoadResult]] = {}
        self._runs: dict[int, _RunUnderWay] = {}  # being written, by run id
        self._reports: list[LoadReport] = []
        self._written: list[RunWritten] = []
        self._failed_blocks: set[int] = set()

    # ---- start ---------------------------------------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> WorkerFacts:
        """Derive the layout, prove it, and compute the identity. Raises UnsupportedError at any doubt (rule 6)."""
        self._memory = backing_memory(kv_caches)
        self._layout = derive_layout(self._kv_cache_config, kv_caches)
        self._kernels = load_kernels(self._layout.unit_bytes)
        report = run_selftest(kv_caches, self._layout, self._memory, KernelMover(self._kernels))
        self._blocks_per_chunk = max(1, -(-self._config.chunk_min_bytes // self._layout.unit_bytes))
        model_config, load_config = self._vllm_config.model_config, self._vllm_config.load_config
        identity = build_identity(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self._layout,
            weights_fact(
                model_config,
                load_config,
                weights_id=self._config.weights_id,
                digester=FileDigester(),
                engine_started_ns=process_started_ns(),
            ),
            blocks_per_chunk=self._blocks_per_chunk,
            processor=processor_fact(model_config, load_config),
        )
        logger.info(
            "layout proven on %d blocks; identity %s; %d bytes a block, %d block(s) a chunk",
            len(report.blocks),
            identity.digest.hex()[:16],
            self._layout.unit_bytes,
            self._blocks_per_chunk,
        )
        return WorkerFacts(
            identity=identity.digest,
            identity_json=identity.canonical_json,
            unit_bytes=self._layout.unit_bytes,
            block_tokens=self._layout.block_tokens,
            hash_block_tokens=hash_block_tokens(self._vllm_config, self._kv_cache_config),
            block_count=self._layout.block_count,
            blocks_per_chunk=self._blocks_per_chunk,
            selftest_bytes=report.bytes_moved,
        )

    # ---- each step -----------------------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        self._follow(orders.attachment)
        for order in orders.loads:
            assert order.request_id not in self._jobs, f"{order.request_id} is being loaded already"
            if self._path is None:
                failures = tuple(UnitFailure(i, False, "no pool attached") for i in range(len(order.lbas)))
                self._jobs[order.request_id] = (order, LoadResult(0, 0.0, failures))
            else:
                units = [
                    UnitRead(lba, self._layout.unit_bytes, block_id, digest)
                    for lba, block_id, digest in zip(order.lbas, order.block_ids, order.digests, strict=True)
                ]
                job = self._path.load(units, abandon_after_s=order.abandon_after_s)
                self._jobs[order.request_id] = (order, job)

    def start_saves(self, orders: StepOrders) -> None:
        """The step that filled these blocks has run: their bytes are final."""
        writes: list[ShardWrite] = []
        for order in orders.saves:
            refusal = self._refuse_save(order)
            if refusal:
                self._written.append(RunWritten(order.run_id, (None,) * len(order.granted.indexes), refusal))
            else:
                self._runs[order.run_id] = _RunUnderWay(order)
                writes += self._shard_writes(order)
        if writes:
            assert self._path is not None
            self._path.save(writes)

    def finished_loads(self) -> set[str]:
        """Requests whose load has ended, well or not; each is returned exactly once."""
        now_s = time.monotonic()
        finished: set[str] = set()
        for request_id, (order, job) in list(self._jobs.items()):
            result = job.result(now_s) if isinstance(job, LoadJob) else job
            if result is None:
                continue
            del self._jobs[request_id]
            finished.add(request_id)
            self._reports.append(LoadReport(request_id, result.load_bytes, result.seconds, result.failures))
            self._failed_blocks.update(order.block_ids[failure.index] for failure in result.failures)
            if result.failures:
                first = min(result.failures, key=lambda failure: failure.index)
                logger.warning(
                    "%s: %d of %d blocks did not load and are recomputed, the first because: %s",
                    request_id,
                    len(result.failures),
                    len(order.lbas),
                    first.reason,
                )
        return finished

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StepReport | None:
        """What happened since the last step, or None when there is nothing new to say."""
        if self._path is not None:
            for shard in self._path.take_written():
                self._shard_written(shard)
            if not self._runs:
                self._let_go()
        if not self._written and not self._reports:
            return None
        report = StepReport(tuple(self._written), tuple(self._reports))
        self._written, self._reports = [], []
        return report

    def shutdown(self) -> None:
        for _, job in self._jobs.values():
            if isinstance(job, LoadJob):
                job.abandon("the engine is shutting down")
        is_quiet = self._path.close() if self._path is not None else True
        if is_quiet:
            self._let_go()  # else it stays held, so that nobody reuses what we may still write

    # ---- inside --------------------------------------------------------------------------------------------------

    def _follow(self, attachment: Attachment | None) -> None:
        """Take up a new attachment once nothing of the former one is being written."""
        if attachment is None or attachment.holder_id in (self._refused_holder_id, self._holder_id()):
            return
        if self._runs:
            return  # the order of the next step carries it again
        try:
            os.close(hold_liveness(Path(attachment.liveness_path)))  # only to see that it is in reach
            self._open_path(attachment)
        except MeshFusionError as error:
            logger.error("the pool is out of this worker's reach, nothing is saved or loaded: %s", error)
            self._refused_holder_id = attachment.holder_id
            return
        assert self._liveness is None, "held only while something is written"
        self._attachment = attachment

    def _holder_id(self) -> str:
        return self._attachment.holder_id if self._attachment else ""

    def _open_path(self, attachment: Attachment) -> None:
        if self._path is not None and self._pool_uuid == attachment.pool_uuid:
            return
        (namespace,) = attachment.namespaces
        direct = DirectMode.AUTO if self._config.direct_io else DirectMode.OFF
        check_pool_uuid(Path(namespace.path), attachment.pool_uuid)
        data = open_data_file(Path(namespace.path), writable=True, direct=direct)
        if not data.direct:
            logger.info("O_DIRECT is not used on %s: %s", namespace.path, data.direct_reason)
        unit_bytes = self._layout.unit_bytes
        former, self._path = (
            self._path,
            staged_path(
                data,
                self._memory,
                self._layout,
                self._kernels,
                lba_bytes=namespace.lba_bytes,
                load_threads=self._config.load_threads,
                read_bytes=READ_BYTES,
                write_bytes=shard_lba_count(unit_bytes, self._blocks_per_chunk, namespace.lba_bytes)
                * namespace.lba_bytes,
                cpus=engine_cpus(),
                is_digest_right=self._is_digest_right,
            ),
        )
        self._pool_uuid = attachment.pool_uuid
        if former is not None:
            former.close(deadline_s=0.0)

    def _refuse_save(self, order: SaveOrder) -> str:
        if self._path is None or self._attachment is None:
            return "no pool attached"
        if order.granted.holder_id != self._attachment.holder_id:
            return "granted to an earlier incarnation of this worker"
        block_count = (order.granted.indexes[-1] + 1) * self._blocks_per_chunk
        assert len(order.block_ids) >= block_count, (len(order.block_ids), block_count)
        return self._hold(self._attachment)

    def _hold(self, attachment: Attachment) -> str:
        """Hold the liveness lock before the first write: while it is held, our space is nobody else's (rule 3)."""
        if self._liveness is None:
            try:
                self._liveness = hold_liveness(Path(attachment.liveness_path))
            except MeshFusionError as error:
                return error.message
        return ""

    def _let_go(self) -> None:
        if self._liveness is not None:
            os.close(self._liveness)
            self._liveness = None

    def _shard_writes(self, order: SaveOrder) -> list[ShardWrite]:
        """One for each granted chunk."""
        pool_uuid = bytes.fromhex(self._pool_uuid.replace("-", ""))
        chunk_tokens = self._layout.block_tokens * self._blocks_per_chunk
        writes = []
        columns = zip(order.granted.indexes, order.granted.keys, order.granted.extents, strict=True)
        for index, key, extent_fields in columns:
            extent = Extent(*extent_fields)
            header = ChunkHeader(
                pool_uuid=pool_uuid,
                identity=order.granted.identity,
                key=key,
                tenant="default",
                group=0,
                rank=0,
                position_tokens=order.position_tokens + index * chunk_tokens,
                token_count=chunk_tokens,
                segment=extent.segment,
                generation=extent.generation,
                lba=extent.lba,
                unit_bytes=self._layout.unit_bytes,
                unit_digests=(),
            )
            first = index * self._blocks_per_chunk
            block_ids = order.block_ids[first : first + self._blocks_per_chunk]
            writes.append(ShardWrite((order.run_id, index), extent, header, block_ids))
        return writes

    def _shard_written(self, shard: ShardWritten) -> None:
        run_id, index = shard.save_id
        # Giving its place back would free space that a late write may still hit (rule 3). The staged path knows.
        assert shard.fate is not WriteFate.UNKNOWN
        run = self._runs[run_id]
        run.shards[index] = shard
        if len(run.shards) == len(run.order.granted.indexes):
            del self._runs[run_id]
            self._written.append(run.report())


@dataclass(slots=True)
class _RunUnderWay:
    """A save order being written; ``shards``: what has been, by chunk of the run."""

    order: SaveOrder
    shards: dict[int, ShardWritten] = field(default_factory=dict)

    def report(self) -> RunWritten:
        shards = [self.shards[index] for index in self.order.granted.indexes]
        reason = next((shard.reason for shard in shards if shard.reason), "")
        return RunWritten(self.order.run_id, tuple(shard.unit_digests for shard in shards), reason)


def check_pool_uuid(path: Path, pool_uuid: str) -> None:
    """Is the file at ``path`` the pool that the service spoke of? Raises FormatError or MediaError."""
    copies = []
    with contextlib.closing(open_data_file(path, writable=False, direct=DirectMode.OFF)) as data:
        for lba in LABEL_LBAS:
            raw = bytearray(LBA_BYTES)
            data.read_into(lba, memoryview(raw))
            copies.append(bytes(raw))
    label = decode_label_copies(copies, where=str(path))
    if label.pool_uuid.hex() != pool_uuid.replace("-", ""):
        raise FormatError(
            f"{path} is pool {label.pool_uuid.hex()}, the service speaks of {pool_uuid}",
            next_step="run the engine on the service's machine",
        )
