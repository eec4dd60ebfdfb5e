"""The engine around the connector's two halves, without the engine: blocks with reference counts, a scheduler that
admits, preempts and aborts, and a forward pass whose KV is a function of the tokens, so that every byte can be judged.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from meshfusion.dpu.api import types as api
from meshfusion.host.connector.config import parse_connector_config
from meshfusion.host.connector.vllm.messages import WorkerFacts
from meshfusion.host.connector.vllm.scheduler import SchedulerSide
from meshfusion.host.connector.vllm.worker import WorkerSide
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.memory.kv_memory import KvMemory as KvMemoryProtocol
from meshfusion.host.path.block_layout import Runs
from meshfusion.host.pool_client import PoolClient
from meshfusion.jbof.digest import DigestKernels
from tests.host.support.kv_memory import BLOCK_TOKENS, U8, KvMemory

IDENTITY = hashlib.sha256(b"a model").digest()


class KeepOpen:
    """A service that outlives its clients: closing it does nothing."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Block:
    block_id: int
    ref_cnt: int = 0


class BlockPool:
    def __init__(self, count: int) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.free = list(self.blocks)

    def take(self, count: int) -> list[Block] | None:
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "a block without owner was pinned"
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "unpinned twice"
            if block.ref_cnt == 0:
                self.free.append(block)


@dataclass(slots=True)
class Request:
    request_id: str
    tokens: list[int]
    block_hashes: list[bytes]  # several for each block, where the engine hashes finer than it allocates
    unit_hashes: list[bytes]  # one for each full block
    num_computed_tokens: int = 0
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    stage: str = "waiting"  # waiting, loading, loaded, running, done
    loaded_tokens: int = 0  # of the last load, as far as it went well
    recomputed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def make_request(request_id: str, tokens: list[int], *, hashes_per_block: int = 1) -> Request:
    hash_tokens = BLOCK_TOKENS // hashes_per_block
    hashes, parent = [], b""
    for end in range(hash_tokens, len(tokens) + 1, hash_tokens):
        parent = hashlib.sha256(parent + repr(tokens[end - hash_tokens : end]).encode()).digest()
        hashes.append(parent)
    return Request(request_id, tokens, hashes, hashes[hashes_per_block - 1 :: hashes_per_block])


def expected_unit(block_hash: bytes, unit_bytes: int) -> bytes:
    seed = int.from_bytes(block_hash[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, unit_bytes, dtype=np.uint8).tobytes()


@dataclass(slots=True)
class Manager:
    block_pool: BlockPool
    held: dict[str, list[Block]] = field(default_factory=dict)

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self.held[request_id],))


class MiniEngine:
    """``step`` is one scheduling pass and one forward pass. ``memory``: as what ``kv`` is used, unless the host's."""

    def __init__(
        self,
        service: api.ChunkService,
        kv: KvMemory,
        kernels: DigestKernels,
        *,
        blocks_per_chunk: int = 2,
        hashes_per_block: int = 1,
        identity: bytes = IDENTITY,
        memory: KvMemoryProtocol | None = None,
        **config: Any,
    ) -> None:
        self.kv = kv
        self.config = parse_connector_config(
            {"service": "unix:///unused", "lookup_deadline_ms": 5000, "load_always": True, **config}
        )
        self.manager = Manager(BlockPool(kv.layout.block_count))
        used = memory or HostKvMemory(kv.memory, kernels)
        facts = WorkerFacts(
            identity=identity,
            identity_json="{}",
            unit_bytes=kv.layout.unit_bytes,
            block_tokens=BLOCK_TOKENS,
            hash_block_tokens=BLOCK_TOKENS // hashes_per_block,
            block_count=kv.layout.block_count,
            blocks_per_chunk=blocks_per_chunk,
            runs=Runs.of(used.place.address, kv.layout),
        )
        chunk_tokens = BLOCK_TOKENS * blocks_per_chunk
        shard = api.ShardSize(rank=0, unit_bytes=kv.layout.unit_bytes, unit_count=blocks_per_chunk)
        self.client = PoolClient(
            service, identity=identity, engine_version="0.32.0", chunk_tokens=chunk_tokens, shard=shard
        )
        self.client.start()
        self.side = SchedulerSide(
            self.client, self.config, facts, kv_cache_manager=self.manager, hashes_per_block=hashes_per_block
        )
        self.worker = WorkerSide(None, None, self.config, is_digest_right=lambda got, expected: got == expected)
        # What register() derives from the engine's tensors.
        self.worker.use(used, kv.layout, blocks_per_chunk)
        self.requests: dict[str, Request] = {}
        self.leaving: dict[str, Request] = {}  # aborted while loading: blocks stay until the workers are done

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
            self._free(request)

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        assert request.stage == "running"
        self._free(request)
        request.stage, request.num_computed_tokens = "waiting", 0

    # ---- one pass ----

    def step(self, *, admit: str = "full", tokens_max: int = 64, local_tokens: int = 0) -> None:
        """``admit``: what the scheduler takes of what was promised: "full", "trimmed", "zero", or "no" admission."""
        for request in list(self.requests.values()):
            if request.stage == "waiting":
                self._try_admit(request, admit, local_tokens)
            elif request.stage == "loaded":
                self.side.allocated(request, self._block_ids(request), 0)
                request.stage = "running"
        scheduled = {
            request.request_id: min(tokens_max, request.num_tokens - request.num_computed_tokens)
            for request in self.requests.values()
            if request.stage == "running" and request.num_computed_tokens < request.num_tokens
        }
        output = SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))
        orders = self.side.step(output)
        self.worker.start_loads(orders)
        for request_id, count in scheduled.items():
            self._forward(self.requests[request_id], count)
        self.worker.start_saves(orders)
        finished = self.worker.finished_loads()
        failed_blocks = self.worker.take_failed_blocks()
        self.side.workers_reported(self.worker.take_report(), finished)
        for request_id in finished:
            self._loaded(request_id, failed_blocks)
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
        self.worker.shutdown()
        self.client.close()

    # ---- judging ----

    def is_right(self, request: Request) -> bool:
        """Is every full block of the request what its tokens say?"""
        return all(
            self.kv.unit(block_id) == expected_unit(block_hash, self.kv.layout.unit_bytes)
            for block_id, block_hash in zip(self._block_ids(request), request.unit_hashes, strict=False)
        )

    def assert_nothing_held(self) -> None:
        """Every reference is given back, here and in the connector."""
        assert all(block.ref_cnt == 0 for block in self.manager.block_pool.blocks)
        assert sorted(block.block_id for block in self.manager.block_pool.free) == list(
            range(self.kv.layout.block_count)
        )
        assert not any(self.side.gauges().values()), self.side.gauges()
        assert not self.side._saves._next_chunk
        assert not self.side._pipeline._granted
        assert not self.side._saves._complete
        assert not self.side._never_save

    # ---- inside ----

    def _block_ids(self, request: Request) -> list[int]:
        return [block.block_id for block in self.manager.held[request.request_id]]

    def _free(self, request: Request) -> None:
        self.manager.block_pool.free_blocks(reversed(self.manager.held.pop(request.request_id, [])))

    def _try_admit(self, request: Request, admit: str, local_tokens: int) -> None:
        external = self.side.matched_tokens(request, local_tokens)
        if external is None or admit == "no":
            return
        take = {"full": external, "trimmed": external // BLOCK_TOKENS // 2 * BLOCK_TOKENS, "zero": 0}[admit]
        if request.request_id not in self.manager.held:
            blocks = self.manager.block_pool.take(-(-request.num_tokens // BLOCK_TOKENS))
            if blocks is None:
                return
            self.manager.held[request.request_id] = blocks
        self._compute(request, 0, local_tokens)  # what the engine's own prefix cache would have held
        request.num_computed_tokens = local_tokens + take
        self.side.allocated(request, self._block_ids(request), take)
        request.stage = "loading" if take else "running"
        request.loaded_tokens = take

    def _loaded(self, request_id: str, failed_blocks: set[int]) -> None:
        if request_id in self.leaving:
            self._free(self.leaving.pop(request_id))
            return
        request = self.requests[request_id]
        assert request.stage == "loading"
        loaded_end = request.num_computed_tokens
        first_bad = [i for i, block_id in enumerate(self._block_ids(request)) if block_id in failed_blocks]
        if first_bad:
            request.num_computed_tokens = min(loaded_end, first_bad[0] * BLOCK_TOKENS)
            request.loaded_tokens = request.num_computed_tokens
        if request.num_computed_tokens == 0:
            self._free(request)  # as the engine does: it starts over, and asks again
            request.stage = "waiting"
            return
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.stage = "loaded"

    def _forward(self, request: Request, count: int) -> None:
        self._compute(request, request.num_computed_tokens, request.num_computed_tokens + count)
        request.num_computed_tokens += count
        request.recomputed_tokens += count

    def _compute(self, request: Request, first: int, last: int) -> None:
        """Fills every block that these tokens complete. A block is whole or not at all: enough for full blocks."""
        block_ids = self._block_ids(request)
        for index in range(first // BLOCK_TOKENS, last // BLOCK_TOKENS):
            unit: U8 = np.frombuffer(
                expected_unit(request.unit_hashes[index], self.kv.layout.unit_bytes), dtype=np.uint8
            )
            self.kv.memory[self.kv.byte_places[block_ids[index]]] = unit
