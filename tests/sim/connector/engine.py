"""The engine's scheduler as a connector meets it: vLLM 0.32, v1/core/sched/scheduler.py, ``schedule`` and
``update_from_output``, without what a connector does not see. All choices come from one ``random.Random``.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

from meshfusion.host.connector.vllm.scheduler import SchedulerSide
from tests.sim.connector.blocks import must
from tests.sim.connector.client import SimClient
from tests.sim.connector.kv_manager import KvManager
from tests.sim.connector.requests import Request, Status
from tests.sim.connector.shapes import Kind, Shape
from tests.sim.connector.worker import StepResult

RUNNING_MAX = 4


class BlockState(NamedTuple):
    """As vLLM's ``KVConnectorBlockState``: by request, (KV group, block, boundary in tokens)."""

    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]


class Scheduled(NamedTuple):
    """As vLLM's ``SchedulerOutput``."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    kv_connector_block_state: BlockState


class SimEngine:
    def __init__(self, rng: random.Random, shape: Shape, block_count: int, seen: Counter[str]) -> None:
        self.rng = rng
        self.shape = shape
        self.seen = seen
        self.kv = KvManager(shape, block_count)
        self.requests = self.kv.requests
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.era = 0
        self.is_calm = False  # whatever is promised is taken, and all states are kept
        self._kept_states: dict[str, set[int]] = {}
        self._side: Any = None
        self._client: Any = None

    def bind(self, side: SchedulerSide, client: SimClient) -> None:
        self._side, self._client = side, client

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        request.begin_era(self.era)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._side.on_new_request(request)

    def end(self, request: Request) -> None:
        """Finished or aborted. Blocks that are being loaded stay until that is reported."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        is_loading = request.status is Status.LOADING
        request.status = Status.ABORTED if is_loading else Status.ENDED
        self._side.finished(request)
        if not is_loading:
            self._forget(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        self.waiting.insert(0, request)
        self.seen["preemptions"] += 1

    def reset(self, *, running_too: bool) -> None:
        """``running_too``: as after an update of the weights; the engine refuses when something still holds blocks."""
        if running_too:
            for request in reversed(self.running[:]):
                self.preempt(request)
            if not self.kv.block_pool.is_idle:
                return
            self.era += 1
            self._client.era = self.era
            for request in self.requests.values():
                request.begin_era(self.era)
        if self.kv.block_pool.is_idle:
            self.kv.block_pool.forget_cached()
        self._side.reset()
        self.seen["resets"] += 1

    # ---- scheduling ----------------------------------------------------------------------------------------------

    def schedule(self, budget: int) -> Scheduled:
        counts: dict[str, int] = {}
        has_preempted = False
        for request in self.running[:]:
            if request.status is not Status.RUNNING:
                continue
            count = self._count(request, request.num_computed_tokens, budget)
            end = request.num_computed_tokens + count
            while count and not self.kv.extend(request, request.num_computed_tokens, end):
                has_preempted = True
                victim = self.running[-1]
                self.preempt(victim)
                counts.pop(victim.request_id, None)
                if victim is request:
                    count = 0
            if count:
                counts[request.request_id] = count
                budget -= count
        if not has_preempted:
            for request in self.waiting[:]:
                if budget < 1 or len(self.running) >= RUNNING_MAX:
                    break
                taken = self._try_admit(request, budget)
                if taken is None:
                    break
                if taken:
                    counts[request.request_id] = taken
                    budget -= taken
        return Scheduled(counts, sum(counts.values()), BlockState(self._offers(counts)))

    def _try_admit(self, request: Request, budget: int) -> int | None:
        """How many of its tokens are scheduled; None when there is no room for it."""
        if request.status is Status.LOADING:
            return 0
        if request.status is Status.LOADED:
            self._after_load(request)
        if request.num_computed_tokens:
            start = request.num_computed_tokens
            count = self._count(request, start, budget)
            if not count or not self.kv.extend(request, start, start + count):
                return None
            return self._run(request, count)
        local = 0 if request.skip_reading_prefix_cache else self.kv.local_hit(request)
        external = self._ask(request, local)
        if external is None:
            return 0
        if external:
            external = self._allotted(local, external)
        if external:
            return self._begin_load(request, local, external)
        count = self._count(request, local, budget)
        if not count or not self.kv.admit(request, local, 0, count):
            return None
        request.num_computed_tokens = local
        return self._run(request, count)

    def _ask(self, request: Request, local: int) -> int | None:
        """As often as the engine likes; the promise is absolute and lasts until it is given back (rule 7)."""
        answer: int | None = None
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            answer = self._side.matched_tokens(request, local)
            self._client.check_answer(request, local, answer)
        return answer

    def _allotted(self, local: int, external: int) -> int:
        """Mostly all that was promised."""
        chance = 1.0 if self.is_calm else self.rng.random()
        if chance < 0.04:
            self.seen["promises not taken"] += 1
            return 0
        if chance < 0.10:
            step = self.shape.step_tokens
            taken = self.rng.randrange(0, external + 1, step) if external >= step else external
            self.seen["promises trimmed"] += taken < external
            return taken
        return external

    def _begin_load(self, request: Request, local: int, external: int) -> int | None:
        if (not self.is_calm and self.rng.random() < 0.1) or not self.kv.admit(request, local, external, 0):
            self.seen["not admitted"] += 1
            return None
        request.local_tokens, request.load_tokens = local, external
        request.num_computed_tokens = local + external
        request.status = Status.LOADING
        self._tell_allocated(request, external)
        self.seen["loads"] += 1
        self.seen["loads of whole prompts"] += local + external == request.num_tokens
        return 0

    def _run(self, request: Request, count: int) -> int:
        self._tell_allocated(request, 0)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        return count

    def _tell_allocated(self, request: Request, external: int) -> None:
        self._side.allocated(request, tuple([b.block_id for b in table] for table in request.tables), external)

    def _count(self, request: Request, start: int, budget: int) -> int:
        """With states a prompt is computed up to ends of blocks, where they can be kept (vLLM:
        ``_mamba_block_aligned_split``)."""
        count = min(request.num_tokens - start, budget)
        prefill_end = max(request.prompt_tokens, request.num_tokens - 1)
        if not self.shape.has_states or start >= prefill_end:
            return count
        size, end = self.shape.step_tokens, start + count
        if end < prefill_end:
            end = end // size * size
        stops = ((start // size + 1) * size if start % size else 0, (request.num_tokens - 1) // size * size)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    def _offers(self, counts: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """States at ends of blocks that this step computes, each with the block it will be in."""
        self._kept_states.clear()
        offers: dict[str, list[tuple[int, int, int]]] = {}
        if not self.shape.has_states:
            return offers
        for request_id, count in counts.items():
            request = self.requests[request_id]
            end = request.num_computed_tokens + count
            if end % self.shape.step_tokens or (not self.is_calm and self.rng.random() < 0.2):
                continue
            self._kept_states[request_id] = {end}
            for i, group in enumerate(self.shape.groups):
                if group.kind is Kind.STATE:
                    block = request.tables[i][end // group.block_tokens - 1]
                    offers.setdefault(request_id, []).append((i, block.block_id, end))
        return offers

    # ---- a step's end --------------------------------------------------------------------------------------------

    def forward(self, scheduled: Scheduled) -> None:
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            end = request.num_computed_tokens = start + count
            self.kv.compute(request, start, end)
            self.kv.cache(request, start, end, self._kept_states.get(request_id, set()))
            if end == request.num_tokens:
                if end == request.last_tokens:
                    self.end(request)
                    self.seen["finished"] += 1
                else:
                    request.append_token()

    def update(self, result: StepResult) -> None:
        """What the workers told: failures first, then the connector hears, then blocks may go."""
        for request_id in result.failed_requests:
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                request.num_computed_tokens = 0
                request.is_load_failed = True
        if result.failed_blocks:
            must(len(self.shape.groups) == 1, "blocks reported as failed where their numbers say nothing")
            for request in self.waiting:
                if request.status is Status.LOADING:
                    self._cut_at(request, result.failed_blocks)
        for path in result.report.paths if result.report is not None else ():
            self._client.path_problems[path.rank] = path.problem
        for request_id in result.finished:
            must(request_id in self.requests, "a load was reported of a request that is not there", request_id)
            request = self.requests[request_id]
            must(request.status in (Status.LOADING, Status.ABORTED), "a load was reported twice", request_id)
            request.status = Status.LOADED if request.status is Status.LOADING else Status.ENDED
        self._side.workers_reported(result.report, result.finished)
        for request_id in result.finished:
            if self.requests[request_id].status is Status.ENDED:
                self._forget(self.requests[request_id])
                self.seen["aborted while loading"] += 1

    def _cut_at(self, request: Request, failed_blocks: set[int]) -> None:
        size = self.shape.groups[0].block_tokens
        for block_index in range(-(-request.num_computed_tokens // size)):
            if request.tables[0][block_index].block_id in failed_blocks:
                request.num_computed_tokens = block_index * size
                request.is_load_failed = True
                return

    def _after_load(self, request: Request) -> None:
        """vLLM: ``_update_waiting_for_remote_kv``."""
        request.status = Status.WAITING
        tokens = request.num_computed_tokens
        if request.is_load_failed and not tokens:
            self.kv.free(request)
        else:
            self.kv.cache(request, request.local_tokens, tokens, {tokens})
            if tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        request.is_load_failed = False

    def _forget(self, request: Request) -> None:
        self.kv.free(request)
        del self.requests[request.request_id]
