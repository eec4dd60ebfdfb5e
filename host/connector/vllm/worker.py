"""The worker's half: proves the layout at start, then carries out load and save orders."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.types import Attachment, Extent
from meshfusion.host.connector.config import ConnectorConfig
from meshfusion.host.connector.vllm.auditor import Auditor
from meshfusion.host.connector.vllm.messages import (
    LoadOrder,
    LoadReport,
    RunWritten,
    SaveOrder,
    StepOrders,
    StepReport,
    WorkerFacts,
)
from meshfusion.host.connector.vllm.path_slot import PathSlot
from meshfusion.host.connector.vllm.proven_memory import prove_memory
from meshfusion.host.kv.chunk_form import ChunkForm, form_of
from meshfusion.host.kv.drift import UnitNumbers, numbers_of
from meshfusion.host.kv.freshness import process_started_ns
from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.kv.identity import build_identity, hash_block_tokens
from meshfusion.host.kv.support import served_rules
from meshfusion.host.kv.weights import FileDigester, processor_fact, weights_fact
from meshfusion.host.memory.kv_memory import KvMemory
from meshfusion.host.path.block_layout import Runs
from meshfusion.host.path.cpus import engine_cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, LoadResult, UnitFailure, UnitRead
from meshfusion.host.path.opening import PathOpener, access_of
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from meshfusion.jbof.errors import MeshFusionError, UnsupportedError
from meshfusion.jbof.format import ChunkHeader

logger = logging.getLogger("meshfusion.worker")

CLOSE_S: Final = 5.0


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
        self._wanted = config.path.kind
        self._liveness: int | None = None  # held only while something is written: an idle engine holds up nobody
        self._slot: PathSlot | None = None
        self._auditor: Auditor | None = None
        self._memory: KvMemory | None = None
        self._jobs: dict[str, tuple[LoadOrder, LoadJob | LoadResult]] = {}
        self._waiting_loads: dict[str, _WaitingLoad] = {}  # for the path that is being opened
        self._waiting_saves: list[SaveOrder] = []
        self._next_holder_id = ""  # of the attachment told last
        self._runs: dict[int, _RunUnderWay] = {}  # being written, by run id
        self._reports: list[LoadReport] = []
        self._written: list[RunWritten] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    # ---- start ---------------------------------------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> WorkerFacts:
        """Derive the layout, prove it, and compute the identity. Raises UnsupportedError at any doubt (rule 6)."""
        proven = prove_memory(self._kv_cache_config, kv_caches, self._wanted)
        layouts, rules = proven.layouts, served_rules(self._kv_cache_config)
        form = form_of(layouts, rules, chunk_min_bytes=self._config.chunk_min_bytes)
        try:
            is_audited = self._config.audit.share > 0
            numbers = numbers_of(self._kv_cache_config, kv_caches, layouts) if is_audited else ()
        except UnsupportedError:
            proven.memory.close()
            raise
        self.use(proven.memory, layouts, form, numbers)
        model_config, load_config = self._vllm_config.model_config, self._vllm_config.load_config
        identity = build_identity(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            layouts,
            weights_fact(
                model_config,
                load_config,
                weights_id=self._config.weights_id,
                digester=FileDigester(),
                engine_started_ns=process_started_ns(),
            ),
            form=self._form,
            processor=processor_fact(model_config, load_config),
        )
        logger.info(
            "layout %s proven for %d KV group(s) on %d blocks each of %s; identity %s; %d tokens a chunk; %s",
            self._kv_cache_config.kv_cache_layout,
            len(layouts),
            len(proven.reports[0].blocks),
            proven.memory.place.device or "the host",
            identity.digest.hex()[:16],
            self._form.chunk_tokens,
            ", ".join(
                f"{type(plan.rule).__name__}: {layout.unit_bytes} bytes a block of {plan.block_tokens} tokens, "
                f"in {layout.run_count} run(s)"
                for plan, layout in zip(self._form.plans, layouts, strict=True)
            ),
        )
        return WorkerFacts(
            identity=identity.digest,
            identity_json=identity.canonical_json,
            form=self._form,
            hash_block_tokens=hash_block_tokens(self._vllm_config, self._kv_cache_config),
            block_count=layouts[0].block_count,
            runs=Runs.of(proven.memory.place.address, layouts),
            access=access_of(self._wanted).value,
            selftest_bytes=sum(report.bytes_moved for report in proven.reports),
        )

    def use(
        self,
        memory: KvMemory,
        layouts: tuple[GroupLayout, ...],
        form: ChunkForm,
        numbers: tuple[UnitNumbers, ...] = (),
    ) -> None:
        """From now on this is the engine's KV memory, proven to be laid out like that; it is closed at shutdown.
        ``numbers``: what it holds, for audits."""
        self._auditor = Auditor(memory, layouts, numbers)
        self._memory = memory
        self._layouts = layouts
        self._form = form
        opener = PathOpener(
            memory=memory,
            layouts=layouts,
            units_per_shard=tuple(plan.kept_blocks_max for plan in form.plans),
            load_threads=self._config.load_threads,
            direct_io=self._config.direct_io,
            cpus=engine_cpus(),
            is_digest_right=self._is_digest_right,
            key_scope=self._config.key_scope,
        )
        self._slot = PathSlot(partial(opener.open, self._wanted))

    # ---- each step -----------------------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        self._follow(orders.attachment)
        now_s = time.monotonic()
        for order in orders.loads:
            assert order.request_id not in self._jobs, f"{order.request_id} is being loaded already"
            if self._reading_path is None and self._slot is not None and self._slot.opening_holder_id:
                self._waiting_loads[order.request_id] = _WaitingLoad(order, now_s + order.abandon_after_s)
            else:
                self._start_load(order, order.abandon_after_s)

    def start_saves(self, orders: StepOrders) -> None:
        """The step that filled these blocks has run: their bytes are final."""
        self._start_saves(orders.saves)
        for order in orders.audits:
            assert self._auditor is not None
            self._auditor.start(order, self._reading_path)

    def finished_loads(self) -> set[str]:
        """Requests whose load has ended, well or not; each is returned exactly once."""
        self._advance()
        now_s = time.monotonic()
        finished: set[str] = set()
        for request_id, (order, job) in list(self._jobs.items()):
            result = job.result(now_s) if isinstance(job, LoadJob) else job
            if result is None:
                continue
            del self._jobs[request_id]
            finished.add(request_id)
            report = LoadReport(
                request_id,
                result.load_bytes,
                result.seconds,
                result.failures,
                order.refusal,
                result.path,
                result.descriptors,
            )
            self._reports.append(report)
            if not report.is_whole:
                self._load_failed(order, report)
        return finished

    def _load_failed(self, order: LoadOrder, report: LoadReport) -> None:
        """The engine recomputes from the first failed block on, or all that was to be loaded."""
        if self._form.may_load_in_part and not report.refusal:
            self._failed_blocks.update(order.block_ids[failure.index] for failure in report.failures)
        else:
            self._failed_requests.add(order.request_id)
        first = min(report.failures, key=lambda failure: failure.index, default=None)
        logger.warning(
            "%s: %d of %d blocks did not load and are recomputed, the first because: %s",
            order.request_id,
            len(report.failures),
            len(order.lbas),
            first.reason if first is not None else report.refusal,
        )

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Of those whose loads have ended, the ones of which nothing may be used."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> StepReport | None:
        """What happened since the last step, or None when there is nothing new to say."""
        self._advance()
        if self._reading_path is not None:
            for shard in self._reading_path.take_written():
                self._shard_written(shard)
            if not self._runs:
                self._let_go()
        path = self._slot.take_change() if self._slot is not None else None
        audits = self._auditor.take_reports() if self._auditor is not None else ()
        if not self._written and not self._reports and not audits and path is None:
            return None
        report = StepReport(tuple(self._written), tuple(self._reports), path, audits)
        self._written, self._reports = [], []
        return report

    def shutdown(self) -> None:
        for _, job in self._jobs.values():
            if isinstance(job, LoadJob):
                job.abandon("the engine is shutting down")
        is_quiet = self._slot.close(deadline_s=CLOSE_S) if self._slot is not None else True
        has_compared = self._auditor.close(deadline_s=CLOSE_S) if self._auditor is not None else True
        if is_quiet and has_compared:
            self._let_go()  # else it stays held, so that nobody reuses what we may still write
            self._close_memory()

    def _close_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            try:
                memory.close()
            except MeshFusionError:
                logger.exception("the KV memory is not given up before the engine ends")

    # ---- the path ------------------------------------------------------------------------------------------------

    @property
    def _reading_path(self) -> DataPath | None:
        return self._slot.path if self._slot is not None else None

    def _follow(self, attachment: Attachment | None) -> None:
        """Take up a new attachment once nothing of the former one is being written."""
        if attachment is not None:
            self._next_holder_id = attachment.holder_id
        if self._slot is None:
            return
        self._advance()
        self._slot.follow(attachment, is_writing=bool(self._runs))
        if self._runs:
            return
        self._let_go()
        saves, self._waiting_saves = self._waiting_saves, []
        self._start_saves(saves)

    def _advance(self) -> None:
        """What waited for a path begins when that is open, fails when it cannot be opened, and is not waited for
        longer than its load may take."""
        if self._slot is None:
            return
        if self._slot.advance():
            loads, self._waiting_loads = self._waiting_loads, {}
            for waiting in loads.values():
                self._start_load(waiting.order, waiting.deadline_s - time.monotonic())
            saves, self._waiting_saves = self._waiting_saves, []
            self._start_saves(saves)
        late = [w for w in self._waiting_loads.values() if w.deadline_s <= time.monotonic()]
        for waiting in late:
            del self._waiting_loads[waiting.order.request_id]
            self._fail_load(waiting.order, "abandoned: the path to the pool was not open in time")

    def _start_load(self, order: LoadOrder, abandon_after_s: float) -> None:
        path = self._reading_path
        if path is None:
            self._fail_load(order, "no pool attached")
            return
        if order.refusal:
            self._jobs[order.request_id] = (order, LoadResult(0, 0.0, ()))
            return
        groups = (group for group, count in enumerate(order.unit_counts) for _ in range(count))
        units = [
            UnitRead(lba, self._layouts[group].unit_bytes, block_id, digest, group)
            for group, lba, block_id, digest in zip(groups, order.lbas, order.block_ids, order.digests, strict=True)
        ]
        self._jobs[order.request_id] = (order, path.load(units, abandon_after_s=abandon_after_s))

    def _fail_load(self, order: LoadOrder, reason: str) -> None:
        failures = tuple(UnitFailure(i, False, reason) for i in range(len(order.lbas)))
        self._jobs[order.request_id] = (order, LoadResult(0, 0.0, failures))

    # ---- saves ---------------------------------------------------------------------------------------------------

    def _start_saves(self, orders: Iterable[SaveOrder]) -> None:
        writes: list[ShardWrite] = []
        for order in orders:
            if self._must_wait(order.granted.holder_id):
                self._waiting_saves.append(order)
                continue
            refusal = self._refuse_save(order)
            if refusal:
                self._written.append(RunWritten(order.run_id, (None,) * len(order.granted.indexes), refusal))
            else:
                self._runs[order.run_id] = _RunUnderWay(order)
                writes += self._shard_writes(order)
        if writes:
            assert self._reading_path is not None
            self._reading_path.save(writes)

    def _must_wait(self, holder_id: str) -> bool:
        """Is the path of this incarnation being opened, or about to be, when the former one has written?"""
        if self._slot is None:
            return False
        attachment = self._slot.attachment
        is_next = holder_id == self._next_holder_id and attachment is not None and attachment.holder_id != holder_id
        return holder_id == self._slot.opening_holder_id or (is_next and bool(self._runs))

    def _refuse_save(self, order: SaveOrder) -> str:
        attachment = self._slot.attachment if self._slot is not None else None
        if attachment is None:
            return "no pool attached"
        if self._slot is not None and self._slot.opening_holder_id:
            return "another incarnation of this worker is about to take over"
        if order.granted.holder_id != attachment.holder_id:
            return "granted to another incarnation of this worker"
        return self._hold(attachment)

    def _hold(self, attachment: Attachment) -> str:
        """With local access, hold the liveness lock before the first write: while it is held, our space is nobody
        else's (rule 3). A target knows by itself who writes."""
        if self._liveness is None and attachment.liveness_path:
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
        assert self._slot is not None
        assert self._slot.attachment is not None
        pool_uuid = bytes.fromhex(self._slot.attachment.pool_uuid.replace("-", ""))
        granted = order.granted
        columns = zip(order.groups, order.indexes, order.block_ids, granted.keys, granted.extents, strict=True)
        writes = []
        for number, (group, index, block_ids, key, extent_fields) in enumerate(columns):
            extent = Extent(*extent_fields)
            assert len(block_ids) == len(self._form.plans[group].kept_blocks(index)), (group, index, block_ids)
            header = ChunkHeader(
                pool_uuid=pool_uuid,
                identity=granted.identity,
                key=key,
                tenant="default",
                group=group,
                rank=0,
                shard_count=1,
                position_tokens=index * self._form.chunk_tokens,
                token_count=self._form.chunk_tokens,
                segment=extent.segment,
                generation=extent.generation,
                lba=extent.lba,
                unit_bytes=self._layouts[group].unit_bytes,
                unit_digests=(),
            )
            writes.append(ShardWrite((order.run_id, number), extent, header, block_ids))
        return writes

    def _shard_written(self, shard: ShardWritten) -> None:
        run_id, number = shard.save_id
        run = self._runs[run_id]
        run.shards[number] = shard
        if len(run.shards) == len(run.order.granted.indexes):
            del self._runs[run_id]
            assert self._reading_path is not None
            self._written.append(run.report(self._reading_path.kind.value))


@dataclass(slots=True)
class _RunUnderWay:
    """A save order being written; ``shards``: what has been, by number of the granted chunk."""

    order: SaveOrder
    shards: dict[int, ShardWritten] = field(default_factory=dict)

    def report(self, path: str) -> RunWritten:
        shards = [self.shards[number] for number in range(len(self.order.granted.indexes))]
        reason = next((shard.reason for shard in shards if shard.reason), "")
        # Giving such a place back would free space that a late write may still hit (rule 3).
        in_doubt = tuple(i for i, shard in enumerate(shards) if shard.fate is WriteFate.UNKNOWN)
        unit_digests = tuple(shard.unit_digests for shard in shards)
        descriptors = sum(shard.descriptors for shard in shards)
        return RunWritten(self.order.run_id, unit_digests, reason, in_doubt, path, descriptors)


class _WaitingLoad(NamedTuple):
    order: LoadOrder
    deadline_s: float
