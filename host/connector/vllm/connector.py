"""``MeshFusionConnector``: vLLM's connector interface, mapped onto the scheduler's and the worker's half.

Call order and duties follow vLLM 0.32, ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` and
``vllm/v1/core/sched/scheduler.py``; 0.30 and 0.31 call a subset. Loading is asynchronous only: synchronous loads
publish block hashes before the data has arrived.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

from meshfusion.dpu.api.otel import open_tracer
from meshfusion.dpu.api.types import Access
from meshfusion.host.connector.config import OnUnsupported, WantedLayout, parse_connector_config
from meshfusion.host.connector.off_board import show_off, unshow_off
from meshfusion.host.connector.off_note import WhyOff
from meshfusion.host.connector.vllm.handshake import WorkerOff, agreed_facts
from meshfusion.host.connector.vllm.kv_events import KvEvents, is_enabled
from meshfusion.host.connector.vllm.layout_request import asked_layout
from meshfusion.host.connector.vllm.messages import StepOrders, StepReport, WorkerFacts
from meshfusion.host.connector.vllm.opening import open_service
from meshfusion.host.connector.vllm.scheduler import SchedulerSide
from meshfusion.host.connector.vllm.stats import MeshFusionPromMetrics, MeshFusionStats, counts_since
from meshfusion.host.connector.vllm.worker import WorkerSide
from meshfusion.host.kv.identity import installed_engine_version
from meshfusion.host.kv.support import check_supported
from meshfusion.host.path.start_check import check_attached_path
from meshfusion.host.pool_client import PoolClient
from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.meshfusion")
logging.getLogger("meshfusion").parent = logging.getLogger("vllm")  # our modules log where the engine logs

STEP_TIMES_KEPT = 8192
F = TypeVar("F", bound=Callable[..., Any])


def _timed(method: F) -> F:
    """Add the time spent in a scheduler hook to the current step's."""

    @functools.wraps(method)
    def timed(self: MeshFusionConnector, *args: Any, **kwargs: Any) -> Any:
        start_ns = time.perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._step_ns += time.perf_counter_ns() - start_ns

    return cast(F, timed)


class MeshFusionConnector(KVConnectorBase_V1, SupportsHMA):
    """One per role. Construction refuses to start the engine at any doubt (rule 6)."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._client: PoolClient | None = None
        self._facts: WorkerFacts | WorkerOff | None = None
        self._kv_events: KvEvents | None = None
        self._step_ns = 0
        self._former_counts: dict[str, float] = {}
        self.step_times_ns: deque[int] = deque(maxlen=STEP_TIMES_KEPT)  # scheduler-side time of each step
        self.config = parse_connector_config(self._kv_transfer_config.kv_connector_extra_config)
        self._service = None
        try:
            check_supported(
                vllm_config,
                kv_cache_config,
                force_load_failure_policy=self.config.force_load_failure_policy,
                serves_without_cache=self.config.on_unsupported is OnUnsupported.SERVE_WITHOUT_CACHE,
            )
            if role is KVConnectorRole.WORKER:
                self._worker = WorkerSide(
                    vllm_config,
                    kv_cache_config,
                    self.config,
                    rank=vllm_config.parallel_config.rank,
                    is_digest_right=self._is_digest_right,
                )
            else:
                unshow_off()
                self._service = open_service(self.config)
        except UnsupportedError as error:
            self._serve_without_cache(error, WhyOff.ENGINE)

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half, for tests and measurements inside the engine's process."""
        assert self._scheduler is not None
        return self._scheduler

    # ---- what is fixed -------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache, not a hand-off: a dropped save is a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A wish: an engine that does not grant it is served as well."""
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        config = parse_connector_config(transfer_config.kv_connector_extra_config)
        return asked_layout(vllm_config) if config.kv_layout is WantedLayout.AUTO else None

    @staticmethod
    def _is_digest_right(got: bytes, expected: bytes) -> bool:
        """Rule 4. A negative control in the tests replaces this; nothing else may."""
        return got == expected

    def _serve_without_cache(self, error: MeshFusionError, why: WhyOff) -> None:
        """Rule 6: start with the cache off, loudly, where the user asked for that; refuse otherwise."""
        if self.config.on_unsupported is not OnUnsupported.SERVE_WITHOUT_CACHE:
            raise error
        logger.error("MeshFusion is OFF for this engine, nothing is cached: %s", error)
        self._worker = None
        self._scheduler = None
        self._facts = WorkerOff(why, error.message, error.next_step)
        if self.role is KVConnectorRole.SCHEDULER:
            show_off(why, error)

    # ---- worker --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        try:
            self._facts = self._worker.register(kv_caches)
        except (UnsupportedError, MediaError) as error:  # of a device that fails while the layout is proven
            self._serve_without_cache(error, WhyOff.MEMORY)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._facts

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(cast(StepOrders, self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are saved whole, after the step, from pinned blocks."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(cast(StepOrders, self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        finished = self._worker.finished_loads()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=self._worker.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """With one KV group, where block ids are unique: a failed load costs the tokens from its first failed block."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker is not None else None

    # ---- scheduler -----------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The workers have proven their layout: attach. Trouble here aborts the engine's start. ``metadata``: by rank
        among the tensor-parallel ones."""
        if self._service is None:
            return
        workers = agreed_facts(metadata, self._vllm_config.parallel_config.tensor_parallel_size)
        if not isinstance(workers, WorkerOff):
            self._attach(workers)
            return
        self._service.close()
        self._service = None
        self._serve_without_cache(UnsupportedError(workers.reason, next_step=workers.next_step), workers.why)

    def _attach(self, by_rank: Sequence[WorkerFacts]) -> None:
        """For all workers together: they are one holder, and what they have proven is alike."""
        assert self._service is not None
        lora_config = self._vllm_config.lora_config
        self._facts = facts = by_rank[0]
        if is_enabled(self._vllm_config):
            assert self._kv_cache_manager is not None, "the engine binds it before the handshake"
            spec_facts = self._kv_cache_manager.kv_cache_event_metadata
            self._kv_events = KvEvents(hash_tokens=facts.hash_block_tokens, spec_facts=spec_facts)
        self._client = PoolClient(
            self._service,
            identity=facts.identity,
            engine_version=installed_engine_version(),
            form=facts.form,
            access=Access(facts.access),
            tenant=self.config.tenant,
        )
        attachment = self._client.start()
        try:
            for each in by_rank:
                check_attached_path(self.config.path.kind, attachment, each.runs)
        except UnsupportedError as error:
            self._client.close()
            self._client = self._service = None
            self._serve_without_cache(error, WhyOff.PATH)
            return
        self._scheduler = SchedulerSide(
            self._client,
            self.config,
            facts,
            kv_cache_manager=self._kv_cache_manager,
            lora_dtype=str(lora_config.lora_dtype) if lora_config is not None else "",
            describe=self._kv_events.describe if self._kv_events is not None else None,
            tracer=open_tracer(),
        )
        logger.info(
            "attached to pool %s (epoch %d) as %s", attachment.pool_uuid, attachment.epoch, attachment.holder_id
        )

    @_timed
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_timed
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    @_timed
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @_timed
    def _build_step(self, scheduler_output: SchedulerOutput) -> StepOrders:
        return self._scheduler.step(scheduler_output) if self._scheduler is not None else StepOrders()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        orders = self._build_step(scheduler_output)
        self.step_times_ns.append(self._step_ns)
        self._step_ns = 0
        return orders

    @_timed
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            assert report is None or isinstance(report, StepReport)
            self._scheduler.workers_reported(report, connector_output.finished_recving or set())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_timed
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may go at once: what is being saved is pinned, and a load under way is the engine's to wait for."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    @_timed
    def take_events(self) -> Iterable[KVCacheEvent]:
        """What became visible in the pool, or is known to be gone from it, for the engine's publisher."""
        if self._scheduler is None or self._kv_events is None:
            return ()
        return [self._kv_events.event(announcement) for announcement in self._scheduler.take_announcements()]

    # ---- both ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if isinstance(self._facts, WorkerOff) and self.role is KVConnectorRole.SCHEDULER:
            unshow_off()
        if self._worker is not None:
            self._worker.shutdown()
        if self._client is not None:
            self._client.close()
        elif self._service is not None:
            self._service.close()
        self._client = self._service = None
        self._scheduler = None

    @_timed
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            current: dict[str, float] = {**self._scheduler.counts(), **self._scheduler.measures()}
        elif isinstance(self._facts, WorkerOff) and self.role is KVConnectorRole.SCHEDULER:  # once an engine
            current = {f"without_cache_{self._facts.why.value}": 1}
        else:
            return None
        added = counts_since(current, self._former_counts)
        if self._scheduler is not None:
            added |= self._scheduler.take_observations()
        self._former_counts = current
        return MeshFusionStats(data=added) if added else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return MeshFusionStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return MeshFusionPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
