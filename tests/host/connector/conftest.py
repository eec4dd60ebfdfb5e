"""A real pool, and small engines on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.pool import Pool, PoolOptions, create_pool
from meshfusion.host import pool_standing
from meshfusion.jbof.digest import DigestKernels, load_kernels
from tests.host.support.engine_on_pool import EngineFactory
from tests.host.support.kv_memory import KvMemory, layer_outermost
from tests.host.support.mini_engine import KeepOpen, MiniEngine


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(64 << 10)


@pytest.fixture
def quick_reattach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_standing, "REATTACH_FIRST_S", 0.01)
    monkeypatch.setattr(pool_standing, "REATTACH_MAX_S", 0.05)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    create_pool(tmp_path / "pool", size_bytes=16 << 20, segment_bytes=1 << 20)
    with Pool.open(tmp_path / "pool", PoolOptions(heartbeat_s=0.2)) as opened:
        yield opened


@pytest.fixture
def start(pool: Pool, kernels: DigestKernels) -> Iterator[EngineFactory]:
    engines: list[MiniEngine] = []

    def start_engine(
        kv: KvMemory | Sequence[KvMemory] | None = None, service: Any = None, **options: Any
    ) -> MiniEngine:
        kv = kv or layer_outermost(blocks=64)
        (kv if isinstance(kv, KvMemory) else kv[0]).fill(len(engines))
        engines.append(MiniEngine(service or KeepOpen(pool), kv, kernels, **options))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()
