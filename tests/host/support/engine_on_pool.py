"""Short words for a small engine on the real pool: the fixtures are in ``tests/host/connector/conftest.py``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.format import LBA_BYTES
from tests.host.support.kv_memory import BLOCK_TOKENS
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import Request, make_request
from tests.host.support.waiting import until

CHUNK_TOKENS = 2 * BLOCK_TOKENS
EngineFactory = Callable[..., MiniEngine]


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=length)


def save_prompt(engine: MiniEngine, tokens: list[int], request_id: str = "writer") -> Request:
    request = engine.add(make_request(request_id, tokens))
    engine.run()
    assert engine.is_right(request)
    return request


def committed(pool: Pool, count: int) -> None:
    until(lambda: pool.status(deadline_s=1).committed_chunk_count == count, what=f"for {count} chunks")


def committed_by(engine: MiniEngine, count: int) -> None:
    engine.step_until(lambda: engine.side.counters["chunks_committed"] == count)


def raising(error: Exception) -> Callable[..., Any]:
    """What fails with ``error``, whatever it is called with."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def settle(engine: MiniEngine, pool: Pool) -> api.PoolStatus:
    """Finish everything; what is then held anywhere is a leak."""
    engine.finish_all()
    engine.run()
    engine.assert_nothing_held()
    until(lambda: (s := pool.status(deadline_s=1)).lease_count == s.grant_count == 0, what="for leases and grants")
    status = pool.status(deadline_s=1)
    assert status.pinned_bytes == 0
    return status


def corrupt(pool: Pool, chunk: api.ChunkRecord, unit: int) -> None:
    (shard,) = chunk.shards
    at = (shard.extent.lba + shard.payload_lba_offset + unit * shard.unit_lba_count) * LBA_BYTES + 5
    with pool._parts.taken.layout.data.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([byte ^ 1]))
