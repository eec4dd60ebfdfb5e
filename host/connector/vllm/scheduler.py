"""The scheduler's half: answers before scheduling, rolls back when nothing comes of it, plans loads and saves.

Every method runs on the scheduler's thread and only moves values: whatever may block lives in :class:`PoolClient`.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from meshfusion.dpu.api.tracing import NobodyCollects, Tracer
from meshfusion.host.connector.announcements import Announcement, Announcements
from meshfusion.host.connector.audits import AuditOptions
from meshfusion.host.connector.config import ConnectorConfig
from meshfusion.host.connector.lookups import (
    Effect,
    LookupOptions,
    Lookups,
    ReleaseLease,
    StartAudit,
    StartLoad,
    StartMatch,
)
from meshfusion.host.connector.observations import Observations
from meshfusion.host.connector.path_gate import Gate, PathGate
from meshfusion.host.connector.vllm.audit_pipeline import AuditPipeline
from meshfusion.host.connector.vllm.chunking import Chunking
from meshfusion.host.connector.vllm.load_pipeline import LoadPipeline
from meshfusion.host.connector.vllm.lookup_calls import LookupCalls
from meshfusion.host.connector.vllm.messages import LoadReport, StepOrders, StepReport, WorkerFacts
from meshfusion.host.connector.vllm.request_trace import trace_of
from meshfusion.host.connector.vllm.save_pipeline import Describe, SavePipeline
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import (
    Attached,
    Committed,
    Dropped,
    Event,
    LeasesLost,
    Matched,
    Reserved,
    ReserveFailed,
)

logger = logging.getLogger("meshfusion.scheduler")

_LOOKUP_NAMES = {"hits": "lookup_hits"}
_SAVE_NAMES = {
    "reserve_granted": "saves_granted",
    "reserve_exists": "saves_existing",
    "reserve_busy": "saves_busy",
    "reserve_no_space": "saves_no_space",
    "reserve_declined": "saves_declined",
}


class SchedulerSide:
    """Made once the workers have proven their layout; ``facts`` is what they proved. ``now_s`` reads the clock,
    ``draw`` gives random numbers of [0, 1). ``describe``: None when nothing is to be announced."""

    def __init__(
        self,
        client: PoolClient,
        config: ConnectorConfig,
        facts: WorkerFacts,
        *,
        kv_cache_manager: Any,
        lora_dtype: str = "",
        describe: Describe | None = None,
        tracer: Tracer | None = None,
        now_s: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._now_s = now_s
        self._client = client
        self._config = config
        self._identity = facts.identity
        self._chunking = Chunking(facts.form, hash_tokens=facts.hash_block_tokens, lora_dtype=lora_dtype)
        options = LookupOptions(deadline_s=config.lookup_deadline_ms / 1000)
        self._lookups = Lookups(options, facts.form)
        self._observations = Observations()
        tracer = tracer or NobodyCollects()
        self._lookup_calls = LookupCalls(
            client, self._chunking, self._observations, tracer, patience_s=options.patience_s
        )
        self._announcements = Announcements(facts.identity)
        self._pipeline = SavePipeline(
            client,
            facts,
            self._chunking,
            kv_cache_manager,
            self._announcements,
            queue_bytes=config.save_queue,
            describe=describe,
            observations=self._observations,
            tracer=tracer,
        )
        self._saves = self._pipeline.saves
        self._loads = LoadPipeline(client, facts.form, self._observations, tracer)
        self._audit_pipeline = AuditPipeline(
            client,
            facts.form,
            kv_cache_manager,
            AuditOptions(config.audit.share, config.audit.alarms_max),
            draw=draw,
            free_lookup=lambda request_id: self._carry_out(self._lookups.audit_ended(request_id)),
        )
        self._audits = self._audit_pipeline.audits
        attachment = client.attachment
        if attachment is not None:
            self._announcements.in_pool(attachment.pool_uuid)
        self._gate = PathGate(facts.form.rank_count)
        self._requests: dict[str, Any] = {}
        self._never_save: set[str] = set()  # requests that began before a reset: their KV may mix old and new
        self._step_started_s: float | None = None
        self._step_tokens = 0
        self.counters: Counter[str] = Counter()

    # ---- requests ------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        if not request.skip_reading_prefix_cache and not self._audits.is_distrusted:
            self._carry_out(self._lookups.new_request(self._now_s(), request.request_id))

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None: not known yet."""
        if request.skip_reading_prefix_cache:
            return 0
        self._take_events()
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
        if self._audits.is_distrusted:
            self.counters["lookups_distrusted"] += 1
            return 0
        gate = self._gate.look(self._now_s())
        if gate is not Gate.OPEN:
            self.counters["lookups_without_path"] += gate is Gate.CLOSED
            return None if gate is Gate.WAIT else 0
        now_s = self._now_s()
        tokens, effects = self._lookups.query(
            now_s, request.request_id, local_tokens, self._is_load_worth, partial(self._audits.choose, now_s)
        )
        if effects:
            self._carry_out(effects)
        return tokens

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """``block_ids``: for each KV group those of the whole request."""
        request_id = request.request_id
        self._saves.start_at(request_id, self._lookups.matched_chunk_count(request_id))
        self._carry_out(self._lookups.allocated(request_id, external_tokens, block_ids))

    def finished(self, request: Any) -> None:
        request_id = request.request_id
        self._carry_out(self._lookups.finished(request_id))
        self._audit_pipeline.give_up(request_id)
        self._saves.forget_request(request_id)
        self._requests.pop(request_id, None)
        self._never_save.discard(request_id)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self, scheduler_output: Any) -> StepOrders:
        """The end of a scheduling pass: plan saves for what this step computes; hand out loads and granted saves."""
        self._measure_prefill(scheduler_output)
        self._take_events()
        self._pipeline.give_up_repeats(self._now_s())
        self._audit_pipeline.give_up_late(self._now_s())
        self._announcements.give_up_late(self._now_s())
        attachment = self._client.attachment
        wishes = self._pipeline.take_repeats(attachment.holder_id) if attachment is not None else []
        snapshots = snapshots_of(scheduler_output)
        may_save = not self._audits.is_distrusted and self._pipeline.may_ask(self._now_s())
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            computed_tokens = request.num_computed_tokens + tokens
            kept = snapshots.get(request_id, {})
            self._audit_pipeline.computed(request, computed_tokens, kept)
            if may_save and request_id not in self._never_save:
                wishes += self._pipeline.plan(self._now_s(), request, computed_tokens, kept, self._identity)
        if wishes:
            self._client.reserve(tuple(wishes))
        lease_ids = self._lookups.take_lease_change()
        if lease_ids is not None:
            self._client.set_leases(lease_ids)
        self._gate.stepped(self._now_s())
        return StepOrders(
            attachment, self._loads.take_orders(), self._pipeline.take_orders(), self._audit_pipeline.take_orders()
        )

    def workers_reported(self, report: StepReport | None, finished_loads: set[str]) -> None:
        """What the workers did in a step. ``finished_loads`` as the engine was told."""
        if report is not None:
            for path in report.paths:
                self._gate.workers_told(path)
                if (reached := self._gate.reached(path.holder_id)) is not None:
                    self._client.set_reached(path.holder_id, reached)
            for load in report.loads:
                self._load_reported(load)
            self._pipeline.written(self._now_s(), report.written)
            self._audit_pipeline.reported(report.audits, self._identity)
        for request_id in finished_loads & self._loads.under_way:  # reported without details: treat as failed
            self._end_load(request_id, failed=True)

    @property
    def has_work(self) -> bool:
        """The engine must keep stepping: saves hold blocks pinned, or a lookup's answer, whose request may be gone,
        brings a lease to be given back, the workers have yet to say whether they reach the data, or they compare, or
        something is to be announced: without a step nobody would hear of it."""
        is_path_unknown = self._gate.needs_steps(self._now_s())
        is_comparing = self._audits.is_comparing
        is_under_way = self._saves.pending_count > 0 or self._lookup_calls.unanswered_count > 0
        return is_under_way or is_path_unknown or is_comparing or self._announcements.pending_count > 0

    def take_announcements(self) -> list[Announcement]:
        """What others are to be told of chunks of this engine, in order."""
        return self._announcements.take()

    def reset(self) -> None:
        """The engine's cache was reset, perhaps because its weights changed under it: nothing from before this
        moment may ever be matched by this engine again, nor may what it computes be matched by others."""
        self._carry_out(self._lookups.reset())
        self._audit_pipeline.reset()
        self._saves.forget_known()
        self._never_save |= self._requests.keys()
        self._identity = hashlib.sha256(self._identity + b"reset" + uuid.uuid4().bytes).digest()
        self._announcements.reset(self._identity)
        self._client.attach_as(self._identity)
        logger.warning("the cache was reset: from now on this engine uses a pool identity of its own")

    def close(self) -> None:
        self._client.close()

    def counts(self) -> dict[str, int]:
        """Everything counted since the start; the names are those of the metrics table."""
        lookups, saves = self._lookups.counters, self._saves.counters
        return {
            **{_LOOKUP_NAMES.get(name, name): value for name, value in lookups.items()},
            **{_SAVE_NAMES.get(name, name): value for name, value in saves.items()},
            **self._pipeline.counters,
            **self._loads.counters,
            **self._lookup_calls.counters,
            **self._audits.counters,
            **self._announcements.counters,
            **self.counters,
        }

    def measures(self) -> dict[str, float]:
        """The names are those of the gauges table."""
        return {"audit_drift_max": self._audits.drift_max, "audit_variation_max": self._audits.variation}

    def take_observations(self) -> dict[str, list[float]]:
        """What was measured since the last time; the names are those of the histograms table."""
        return self._observations.take()

    def gauges(self) -> dict[str, int]:
        """What is held right now; all zero when the engine is idle and nothing leaks."""
        return {
            "requests": len(self._requests),
            "lookups": len(self._lookups),
            "live_leases": len(self._lookups.live_lease_ids()),
            "pinned_saves": self._pipeline.pinned_count,
            "pending_saves": self._saves.pending_count,
            "loads_under_way": len(self._loads.under_way),
            "unanswered_lookups": self._lookup_calls.unanswered_count,
            "audits": self._audits.count,
            "unannounced": self._announcements.pending_count,
        }

    # ---- events from the client ----------------------------------------------------------------------------------

    def _take_events(self) -> None:
        for event in self._client.take_events():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Matched(request_id, attempt, lease_id, stored):
                self._lookup_calls.answered(self._now_s(), event)
                self._note_missing(request_id, stored.chunk_count)
                self._carry_out(self._lookups.matched(self._now_s(), request_id, attempt, lease_id, stored))
            case Reserved():
                self._pipeline.reserved(event)
            case ReserveFailed(run_id):
                self._pipeline.refused(run_id)
            case Committed(visible_keys, refused_keys):
                self.counters["chunks_committed"] += len(visible_keys)
                self.counters["commits_refused"] += len(refused_keys)
                self._announcements.committed(visible_keys, refused_keys)
            case Dropped(key):
                self._announcements.gone((key,))
            case LeasesLost(lease_ids):
                self._lookups.leases_lost(lease_ids)
            case Attached(attachment):
                self._saves.forget_known()
                self._announcements.in_pool(attachment.pool_uuid)

    def _note_missing(self, request_id: str, stored_chunks: int) -> None:
        """Chunks the service does not have are worth saving, whatever we thought we knew."""
        request = self._requests.get(request_id)
        if request is not None:
            self._saves.not_stored(self._chunking.chunk_hashes(request, stored_chunks))

    # ---- loads ---------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartMatch(request_id, attempt):
                    self._lookup_calls.start(self._now_s(), self._requests[request_id], attempt, self._identity)
                case ReleaseLease(lease_id):
                    self._client.release((lease_id,))
                case StartLoad(request_id):
                    self._loads.start(effect, trace_of(self._requests.get(request_id)))
                case StartAudit(request_id, local_tokens, stored):
                    self._audits.admitted(request_id, local_tokens, stored)

    def _load_reported(self, report: LoadReport) -> None:
        end = self._loads.reported(report)
        if end is None:
            return
        first_failed = end.first_failed
        request = self._requests.get(report.request_id)
        if first_failed is not None and request is not None:  # else it was aborted while it was being loaded
            self._saves.save_again_from(report.request_id, first_failed)
            self._saves.not_stored(self._chunking.chunk_hashes(request, first_failed))
        self._end_load(report.request_id, failed=first_failed is not None)

    def _end_load(self, request_id: str, *, failed: bool) -> None:
        self._loads.end(request_id, failed=failed)
        self._carry_out(self._lookups.load_finished(request_id, failed=failed))

    def _is_load_worth(self, tokens: int, load_bytes: int) -> bool:
        return self._config.load_always or self._loads.estimate.is_load_worth(tokens, load_bytes)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _measure_prefill(self, scheduler_output: Any) -> None:
        """The time from one pass to the next is what the step between them took (an idle engine makes no passes)."""
        now_s = self._now_s()
        if self._step_started_s is not None:
            self._loads.estimate.observe_prefill(self._step_tokens, now_s - self._step_started_s)
        self._step_started_s, self._step_tokens = now_s, scheduler_output.total_num_scheduled_tokens


def snapshots_of(scheduler_output: Any) -> dict[str, dict[tuple[int, int], int]]:
    """The states that the engine keeps from this step on, by request: KV group and boundary in tokens -> device block.

    Where a state lies cannot be told from the request's table of blocks, see
    ``KVCacheManager.take_boundary_state_offloads`` of vLLM 0.32.
    """
    block_state = getattr(scheduler_output, "kv_connector_block_state", None)
    if block_state is None:
        return {}
    return {
        request_id: {(group, boundary_tokens): block_id for group, block_id, boundary_tokens in offers}
        for request_id, offers in block_state.boundary_state_offloads.items()
    }
