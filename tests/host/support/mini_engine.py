"""The engine around the connector's two halves, without the engine: blocks with reference counts, a scheduler that
admits, preempts and aborts, and a forward pass whose KV is a function of the tokens, so that every byte can be judged.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.tracing import Tracer
from meshfusion.host.connector.config import parse_connector_config
from meshfusion.host.connector.vllm.kv_events import KvEvents
from meshfusion.host.connector.vllm.messages import WorkerFacts
from meshfusion.host.connector.vllm.scheduler import SchedulerSide
from meshfusion.host.connector.vllm.worker import WorkerSide
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.drift import LayerNumbers, Numbers, UnitNumbers
from meshfusion.host.kv.resume import GroupPlan, ResumeRule, StateAtBoundary, WholePrefix
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.memory.kv_memory import KvMemory as KvMemoryProtocol
from meshfusion.host.path.block_layout import Runs
from meshfusion.host.path.opening import access_of
from meshfusion.host.pool_client import PoolClient
from meshfusion.jbof.digest import DigestKernels
from tests.host.support.kv_memory import BLOCK_TOKENS, KvMemory
from tests.host.support.mini_blocks import BlockPool, Manager
from tests.host.support.mini_model import MiniModel
from tests.host.support.mini_request import Request

IDENTITY = hashlib.sha256(b"a model").digest()


class KeepOpen:
    """A service that outlives its clients: closing it does nothing."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def close(self) -> None:
        pass


class MiniEngine:
    """``step`` is one scheduling pass and one forward pass. ``kv``: the memory of each KV group, all in one piece;
    ``rules``: by which they resume. ``memory``: as what it is used, unless the host's. ``more_ranks``: the same of
    further workers; ``ranks_per_shard``: which of them hold the same (:class:`ChunkForm`). ``draw``: for audits.
    ``announces``: does the user want KV events? ``tracer``: None when nobody collects spans."""

    def __init__(
        self,
        service: api.ChunkService,
        kv: KvMemory | Sequence[KvMemory],
        kernels: DigestKernels,
        *,
        rules: Sequence[ResumeRule] = (WholePrefix(),),
        blocks_per_chunk: int = 2,
        hashes_per_block: int = 1,
        identity: bytes = IDENTITY,
        memory: KvMemoryProtocol | None = None,
        more_ranks: Sequence[Sequence[KvMemory]] = (),
        ranks_per_shard: tuple[int, ...] = (),
        draw: Callable[[], float] = random.random,
        announces: bool = False,
        tracer: Tracer | None = None,
        **config: Any,
    ) -> None:
        self.kvs = (kv,) if isinstance(kv, KvMemory) else tuple(kv)
        self.ranks = (self.kvs, *map(tuple, more_ranks))
        self.rules = tuple(rules)
        self.config = parse_connector_config(
            {"service": "unix:///unused", "lookup_deadline_ms": 5000, "load_always": True, **config}
        )
        layouts = tuple(group.layout for group in self.kvs)
        self.manager = Manager(BlockPool(layouts[0].block_count))
        self.model = MiniModel(self.ranks, self.rules, self.manager, ranks_per_shard)
        chunk_tokens = blocks_per_chunk * math.lcm(*(layout.block_tokens for layout in layouts))
        plans = tuple(
            GroupPlan(i, rule, layout.block_tokens, chunk_tokens)
            for i, (rule, layout) in enumerate(zip(self.rules, layouts, strict=True))
        )
        unit_bytes = tuple(layout.unit_bytes for layout in layouts)
        self.form = ChunkForm(plans, unit_bytes, len(self.ranks), ranks_per_shard)
        used = memory or HostKvMemory(self.kvs[0].memory, kernels)
        facts = WorkerFacts(
            identity=identity,
            identity_json="{}",
            form=self.form,
            hash_block_tokens=BLOCK_TOKENS // hashes_per_block,
            block_count=layouts[0].block_count,
            runs=Runs.of(used.place.address, layouts),
        )
        access = access_of(self.config.path.kind)
        self.client = PoolClient(service, identity=identity, engine_version="0.32.0", form=self.form, access=access)
        self.client.start()
        spec_facts = tuple((type(rule).__name__, None) for rule in self.rules)
        self.kv_events = KvEvents(hash_tokens=facts.hash_block_tokens, spec_facts=spec_facts)
        self.events: list[KVCacheEvent] = []  # all that were published
        self.side = SchedulerSide(
            self.client,
            self.config,
            facts,
            kv_cache_manager=self.manager,
            describe=self.kv_events.describe if announces else None,
            tracer=tracer,
            draw=draw,
        )
        self.workers = [self._worker(rank, kernels, used if rank == 0 else None) for rank in range(len(self.ranks))]
        self.worker = self.workers[0]
        self._aggregator = KVOutputAggregator(len(self.ranks))
        self._invalid_blocks: set[int] = set()  # of loads that some worker has not ended
        self.requests: dict[str, Request] = {}
        self.leaving: dict[str, Request] = {}  # aborted while loading: blocks stay until the workers are done

    def _worker(self, rank: int, kernels: DigestKernels, memory: KvMemoryProtocol | None) -> WorkerSide:
        kvs = self.ranks[rank]
        worker = WorkerSide(None, None, self.config, rank=rank, is_digest_right=lambda got, expected: got == expected)
        # What register() derives from the engine's tensors.
        layouts, numbers = tuple(group.layout for group in kvs), self._numbers(rank) if self.config.audit.share else ()
        worker.use(memory or HostKvMemory(kvs[0].memory, kernels), layouts, self.form, numbers)
        return worker

    # ---- what a user does ----

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.side.on_new_request(request)
        return request

    def abort(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        self.side.finished(request)
        if request.stage == "loading":
            self.leaving[request_id] = request
        else:
            self.manager.free(request_id)

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        assert request.stage == "running"
        self.manager.free(request_id)
        request.stage, request.num_computed_tokens = "waiting", 0

    # ---- one pass ----

    def step(self, *, admit: str = "full", tokens_max: int = 64, local_tokens: int = 0) -> None:
        """``admit``: what the scheduler takes of what was promised: "full", "trimmed", "zero", or "no" admission."""
        for request in list(self.requests.values()):
            if request.stage == "waiting":
                self._try_admit(request, admit, local_tokens)
            elif request.stage == "loaded":
                self.side.allocated(request, self.manager.block_ids(request.request_id), 0)
                request.stage = "running"
            if request.stage == "running":
                self.model.retire(request)
        scheduled = {
            request.request_id: min(tokens_max, request.num_tokens - request.num_computed_tokens)
            for request in self.requests.values()
            if request.stage == "running" and request.num_computed_tokens < request.num_tokens
        }
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=self._snapshots(scheduled)),
        )
        orders = self.side.step(output)
        for worker in self.workers:
            worker.start_loads(orders)
        for request_id, count in scheduled.items():
            self._forward(self.requests[request_id], count)
        for worker in self.workers:
            worker.start_saves(orders)
        told = self._outputs()
        finished = told.finished_recving or set()
        self._invalid_blocks |= told.invalid_block_ids
        assert not self._invalid_blocks or self.rules == (WholePrefix(),), "what is left of such a load is of no use"
        self.side.workers_reported(told.kv_connector_worker_meta, finished)
        for request_id in finished:
            self._loaded(request_id, self._invalid_blocks, is_lost=request_id in told.failed_recving)
        self.events += [self.kv_events.event(announcement) for announcement in self.side.take_announcements()]
        for request in list(self.requests.values()):
            if request.stage == "running" and request.num_computed_tokens == request.num_tokens:
                request.stage = "done"

    def run(self, *, limit_s: float = 10.0, **options: Any) -> None:
        """Until every request is done and nothing is under way any more."""
        end_s = time.monotonic() + limit_s
        while any(request.stage != "done" for request in self.requests.values()) or self.side.has_work or self.leaving:
            assert time.monotonic() < end_s, [(r.request_id, r.stage) for r in self.requests.values()]
            self.step(**options)
            time.sleep(0.001)

    def step_until(self, condition: Callable[[], Any], *, limit_s: float = 10.0, **options: Any) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, self.side.gauges()
            self.step(**options)
            time.sleep(0.001)

    def finish_all(self) -> None:
        for request_id in list(self.requests):
            self.abort(request_id)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.client.close()

    # ---- judging ----

    def is_right(self, request: Request) -> bool:
        """Is what the next token would read what the request's tokens say?"""
        return not self.model.wrong_reads(request)

    def assert_nothing_held(self) -> None:
        """Every reference is given back, here and in the connector."""
        assert all(block.ref_cnt == 0 for block in self.manager.block_pool.blocks)
        count = self.kvs[0].layout.block_count
        assert sorted(block.block_id for block in self.manager.block_pool.free) == list(range(1, count))
        assert not any(self.side.gauges().values()), self.side.gauges()
        assert not self.side._saves._next_chunk
        assert not self.side._pipeline._granted
        assert not self.side._saves._complete
        assert not self.side._never_save

    # ---- inside ----

    def _outputs(self) -> KVConnectorOutput:
        """What all workers say, put together as the engine does."""
        outputs: list[Any] = []
        for worker in self.workers:
            finished = worker.finished_loads()
            output = KVConnectorOutput(
                finished_recving=finished or None,
                invalid_block_ids=worker.take_failed_blocks(),
                failed_recving=worker.take_failed_requests(),
                kv_connector_worker_meta=worker.take_report(),
            )
            outputs.append(SimpleNamespace(kv_connector_output=output))
        together = self._aggregator.aggregate(outputs)
        assert together is not None
        assert together.kv_connector_output is not None
        return together.kv_connector_output

    def _numbers(self, rank: int) -> tuple[UnitNumbers, ...]:
        return tuple(
            tuple(
                LayerNumbers(name, (Numbers(torch.bfloat16, page_bytes),))
                for name, page_bytes in zip(kv.layout.layer_names, kv.layout.page_bytes, strict=True)
            )
            for kv in self.ranks[rank]
        )

    def _try_admit(self, request: Request, admit: str, local_tokens: int) -> None:
        external = self.side.matched_tokens(request, local_tokens)
        if external is None or admit == "no":
            return
        take = {"full": external, "trimmed": external // BLOCK_TOKENS // 2 * BLOCK_TOKENS, "zero": 0}[admit]
        request_id = request.request_id
        if request_id not in self.manager.tables:
            counts = [-(-request.num_tokens // kv.layout.block_tokens) for kv in self.kvs]
            if not self.manager.allocate(request_id, counts):
                return
        self.model.compute(request, 0, local_tokens)  # what the engine's own prefix cache would have held
        request.num_computed_tokens = local_tokens + take
        self.model.retire(request)
        self.side.allocated(request, self.manager.block_ids(request_id), take)
        request.stage = "loading" if take else "running"
        request.loaded_tokens = take

    def _loaded(self, request_id: str, failed_blocks: set[int], *, is_lost: bool) -> None:
        if request_id in self.leaving:
            self.leaving.pop(request_id)
            failed_blocks.difference_update(self.manager.block_ids(request_id)[0])
            self.manager.free(request_id)
            return
        request = self.requests[request_id]
        assert request.stage == "loading"
        if is_lost:
            request.num_computed_tokens = request.loaded_tokens = 0
        elif failed_blocks:
            first_table = self.manager.block_ids(request_id)[0]
            first_bad = [i for i, block_id in enumerate(first_table) if block_id in failed_blocks]
            if first_bad:
                request.num_computed_tokens = min(request.num_computed_tokens, first_bad[0] * BLOCK_TOKENS)
                request.loaded_tokens = request.num_computed_tokens
                failed_blocks.difference_update(first_table)
        if request.num_computed_tokens == 0:
            self.manager.free(request_id)  # as the engine does: it starts over, and asks again
            request.stage = "waiting"
            return
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.stage = "loaded"

    def _snapshots(self, scheduled: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """States that these steps end with, where they end with a block."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for request_id, count in scheduled.items():
            end = self.requests[request_id].num_computed_tokens + count
            for group, kv, rule in self.model.groups():
                if isinstance(rule, StateAtBoundary) and end % kv.layout.block_tokens == 0:
                    block = self.manager.tables[request_id][group][end // kv.layout.block_tokens - 1]
                    found.setdefault(request_id, []).append((group, block.block_id, end))
        return found

    def _forward(self, request: Request, count: int) -> None:
        assert not (wrong := self.model.wrong_reads(request)), wrong
        self.model.compute(request, request.num_computed_tokens, request.num_computed_tokens + count)
        request.num_computed_tokens += count
        request.recomputed_tokens += count
