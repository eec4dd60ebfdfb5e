"""One engine with its connector's scheduler half, a pool, and what goes wrong between them; all from one ``Random``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Final

from meshfusion.host.connector.config import ConnectorConfig, parse_connector_config
from meshfusion.host.connector.vllm.messages import WorkerFacts
from meshfusion.host.connector.vllm.save_pipeline import PAUSE_MAX_S
from meshfusion.host.connector.vllm.scheduler import SchedulerSide
from meshfusion.host.path.block_layout import Runs
from tests.sim.connector.blocks import must
from tests.sim.connector.client import SimClient
from tests.sim.connector.engine import SimEngine
from tests.sim.connector.requests import Request, Status
from tests.sim.connector.service import HEARTBEAT_S, TTL_S, SimService
from tests.sim.connector.shapes import SHAPES
from tests.sim.connector.texts import TEXT_TOKENS, TEXTS
from tests.sim.connector.worker import Faults, SimWorkers

IDENTITY: Final = b"i" * 32
PATIENCE_STEPS: Final = 200


@cache
def _config(has_small_queue: bool) -> ConnectorConfig:
    return parse_connector_config(
        {
            "service": "unix:///nowhere",
            "save_queue": (1 if has_small_queue else 64) << 20,
        }
    )


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 1000.0
        self.seen: Counter[str] = Counter()
        self.shape = rng.choice(SHAPES)
        self.is_rough = rng.random() < 0.7
        block_count = rng.choice((18, 24, 40))
        self.service = SimService(rng, self.shape, IDENTITY, self.seen)
        self.service.pass_time(self.now_s)
        self.engine = SimEngine(rng, self.shape, block_count, self.seen)
        self.client = SimClient(self.service, IDENTITY, self.shape, self.engine.requests, self._now_s)
        self.workers = SimWorkers(rng, self.shape, self.engine.kv, self.service, self.seen)
        self.side = SchedulerSide(
            self.client,
            _config(rng.random() < 0.3),
            WorkerFacts(IDENTITY, "", self.shape.form, self.shape.hash_tokens, block_count, Runs(4096, 4096)),
            kv_cache_manager=self.engine.kv,
            now_s=self._now_s,
        )
        self.engine.bind(self.side, self.client)
        self._request_count = 0
        self._beaten_s = self.now_s
        self._away_steps = 0
        if self.is_rough:
            self.service.no_space_rate = rng.choice((0.0, 0.1))
            self.workers.set_faults(
                Faults(
                    unreadable=rng.choice((0.0, 0.05)),
                    unwritable=rng.choice((0.0, 0.1)),
                    doubtful=rng.choice((0.0, 0.05)),
                    no_path=rng.choice((0.0, 0.3)),
                )
            )
        if rng.random() < 0.7:
            self._save_as_another()
        self.add_request()

    def _now_s(self) -> float:
        return self.now_s

    # ---- events --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One pass of the scheduler, with what happens around it."""
        rng = self.rng
        if rng.random() < 0.4 and len(self.engine.requests) < 5:
            self.add_request()
        if rng.random() < 0.3:
            self._disturb()
        self.pass_time(rng.choice((0.001, 0.004, 0.03)))
        self.run_step(rng.choice((3, 6, 12, 24)))
        self.client.run_fast(rng.choice((0, 1, 2, 9)))
        self.client.run_slow(rng.choice((0, 1, 2, 9)))
        self.check()

    def run_step(self, budget: int) -> None:
        engine = self.engine
        scheduled = engine.schedule(budget)
        orders = self.side.step(scheduled)
        self.workers.receive(orders)
        for request in engine.waiting:
            is_known = request.status is not Status.LOADING or self.workers.has_load(request.request_id)
            must(is_known, "a request waits for a load that nobody was told of", request.request_id)
        engine.forward(scheduled)
        engine.update(self.workers.step())

    def add_request(self) -> None:
        request = self._request(self.rng.choice(TEXTS), self.rng.randrange(2, 19))
        request.skip_reading_prefix_cache = self.rng.random() < 0.03
        self.engine.add(request)

    def _request(self, text: str, prompt_tokens: int) -> Request:
        self._request_count += 1
        last_tokens = min(TEXT_TOKENS, prompt_tokens + self.rng.randrange(1, 6))
        return Request(f"r{self._request_count}", self.shape, text, prompt_tokens, last_tokens)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.service.pass_time(self.now_s)
        if self.now_s - self._beaten_s >= HEARTBEAT_S:
            self._beaten_s = self.now_s
            self.client.sim_standing.beat()
        if self._away_steps:
            self._away_steps -= 1
            self.service.is_away = self._away_steps > 0
        elif self.client.attachment is None and self.rng.random() < 0.5:
            self.client.sim_standing.attach()

    def _disturb(self) -> None:
        rng, engine = self.rng, self.engine
        chance = rng.random()
        if chance < 0.25:
            self._abort_one()
        elif chance < 0.35:
            if engine.running:
                engine.preempt(rng.choice(engine.running))
        elif chance < 0.55:
            self.service.evict()
        elif chance < 0.65:
            self._save_as_another()
        elif chance < 0.72:
            self.pass_time(rng.choice((0.3, 3.0, 12.0, TTL_S + 1, 130.0)))
        elif chance < 0.80:
            self.client.sim_standing.beat()
        elif chance < 0.82:
            engine.reset(running_too=rng.random() < 0.7)
        elif self.is_rough:
            self._break(chance)

    def _break(self, chance: float) -> None:
        service, attachment = self.service, self.client.attachment
        if chance < 0.86:
            service.lose_lease()
            self.client.sim_standing.beat()
        elif chance < 0.90:
            service.rot()
        elif chance < 0.92:
            service.lapse_grant()
        elif chance < 0.95:
            self._away_steps = self.rng.choice((1, 3, 8))
            service.is_away = True
        elif chance < 0.98:
            service.restart()
        elif attachment is not None and service.is_known(attachment.holder_id):
            service.forget_holder(attachment.holder_id)

    def _abort_one(self) -> None:
        live = [r for r in self.engine.requests.values() if r.status is not Status.ABORTED]
        if live:
            request = self.rng.choice(live)
            self.seen[f"aborted {request.status.value}"] += 1
            self.engine.end(request)

    def _save_as_another(self) -> None:
        self.service.save_as_another(IDENTITY, self.rng.choice(TEXTS), self.rng.randrange(1, 7))

    # ---- rules ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What is held has somebody who needs it."""
        side, service, requests = self.side, self.service, self.engine.requests
        for request_id, _ in self.client.held.values():
            must(request_id in requests, "a lease outlives its request", request_id)
        if not self.client.is_idle or self.client.attachment is None:
            return
        holder_id = self.client.attachment.holder_id
        for lease_id, lease in service.leases.items():
            if lease.holder_id == holder_id:
                must(lease_id in self.client.held, "a lease that the scheduler does not know", lease)
        if service.grants:
            is_pinned = side.gauges()["pinned_saves"] > 0
            for grant_id, grant in service.grants.items():
                is_accounted = is_pinned or grant_id in service.doubtful or grant.holder_id != holder_id
                must(is_accounted, "a grant that nobody will use", grant_id)

    def wind_down(self) -> None:
        """All requests end, everything that was begun ends: nothing stays held. The engine makes no more steps than
        it is asked for."""
        self._calm_down()
        for request in list(self.engine.requests.values()):
            if request.status is not Status.ABORTED:
                self.engine.end(request)
        self._settle()
        self.check_nothing_held()

    def die(self) -> None:
        """The engine is gone from one moment to the next: what it held in the pool ends by itself."""
        self.seen["engine deaths"] += 1
        self.service.is_away = False
        self.service.pass_time(self.now_s + TTL_S + 1)
        must(not self.service.leases and not self.service.grants, "something outlives a dead engine")

    def probe(self) -> None:
        """After whatever happened: what one request computes, the next one finds, up to the last boundary."""
        self.engine.is_calm, began_s = True, self.now_s
        while not self.side._pipeline.may_ask(self.now_s):  # after saves that failed, others wait
            self.pass_time(HEARTBEAT_S)
        must(self.now_s <= began_s + PAUSE_MAX_S + HEARTBEAT_S, "saves pause for too long", self.now_s - began_s)
        text, tokens = self.rng.choice(TEXTS), self.rng.randrange(6, 19)
        for _ in range(2):
            self.engine.kv.block_pool.forget_cached()
            request = self._request(text, tokens)
            self.engine.add(request)
            self.client.run_fast(99)
            self._settle()
        wanted = self.shape.boundary_max(tokens) * self.shape.chunk_tokens
        must(request.load_tokens == wanted, "a hit is lost for good", self.shape, tokens, request.load_tokens, wanted)
        self.check_nothing_held()
        self.seen["probes"] += 1

    def check_nothing_held(self) -> None:
        gauges = self.side.gauges()
        must(not any(gauges.values()), "something is held in the end", gauges)
        pool = self.engine.kv.block_pool
        must(pool.is_idle, "blocks are held in the end", [b.block_id for b in pool.blocks[1:] if b.ref_cnt])
        must(not self.client.held, "a lease is held in the end", self.client.held)
        must(not self.service.leases, "the pool has a lease in the end", self.service.leases)
        must(not self.service.grants.keys() - self.service.doubtful, "the pool has a grant in the end")

    def _calm_down(self) -> None:
        self.service.is_away = False
        self._away_steps = 0
        self.service.no_space_rate = 0.0
        self.workers.set_faults(Faults())

    def _settle(self) -> None:
        """Step as long as somebody asks for it."""
        self._quiet_steps(lambda: not self.side.has_work and not self.engine.requests)
        self.client.sim_standing.beat()  # it may be that we are known no more
        self.client.sim_standing.attach()
        self._quiet_steps(lambda: self.workers.is_idle and self.client.is_idle)
        if self.service.leases or self.service.grants:
            for _ in range(int(TTL_S / HEARTBEAT_S) + 1):  # what former holders held ends
                self.pass_time(HEARTBEAT_S)
        self.check()

    def _quiet_steps(self, is_done: Callable[[], bool]) -> None:
        for _ in range(PATIENCE_STEPS):
            if is_done():
                return
            self.pass_time(0.004)
            # A queue of saves that is full would cost windows and states, which are there only for a while.
            self.run_step(0 if self.side.gauges()["pending_saves"] else self.shape.chunk_tokens)
            self.client.run_fast(99)
            self.client.run_slow(99)
        must(
            False, "it does not come to an end", self.side.gauges(), [(w.saves, w.loads) for w in self.workers.workers]
        )
