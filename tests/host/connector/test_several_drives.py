"""Engines on a pool of three drives: what they save lies on several, and what they load comes from these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_create import create_pool_of_drives
from tests.host.support.engine_on_pool import CHUNK_TOKENS, EngineFactory, committed, prompt, save_prompt, settle
from tests.host.support.mini_request import make_request

CHUNKS = 6

pytestmark = pytest.mark.usefixtures("quick_reattach")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Instead of the one with one drive."""
    path = tmp_path / "pool"
    create_pool_of_drives(path, size_bytes=8 << 20, segment_bytes=1 << 20, data_paths=(None,) * 3)
    with Pool.open(path, PoolOptions(heartbeat_s=0.2)) as opened:
        yield opened


@pytest.fixture
def saved(start: EngineFactory, pool: Pool) -> list[int]:
    """A prompt that is stored."""
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 7)
    engine = start()
    save_prompt(engine, tokens)
    committed(pool, CHUNKS)
    settle(engine, pool)
    return tokens


def namespaces(pool: Pool) -> Counter[int]:
    chunks = pool.list_chunks(api.ListRequest(), deadline_s=1).chunks
    return Counter(shard.extent.namespace for chunk in chunks for shard in chunk.shards)


@pytest.mark.parametrize("path", ["staged", "auto"])
def test_a_prompt_lies_on_several_drives_and_is_loaded_from_them(
    start: EngineFactory, pool: Pool, saved: list[int], path: str
) -> None:
    assert sorted(namespaces(pool).values()) == [3, 3], "in turn on those that have an open segment: two of three"
    reader = start(path=path)
    request = reader.add(make_request("reader", saved))
    reader.run()
    assert request.loaded_tokens == CHUNKS * CHUNK_TOKENS
    assert reader.is_right(request)
    settle(reader, pool)


def test_what_lies_on_a_drive_that_the_engine_cannot_open_is_computed(
    start: EngineFactory, pool: Pool, saved: list[int], tmp_path: Path
) -> None:
    (lost, _), *_ = namespaces(pool).most_common()
    file = tmp_path / "pool" / ("data" if lost == 1 else f"data.{lost - 1}")
    file.rename(tmp_path / "elsewhere")
    reader = start()
    request = reader.add(make_request("reader", saved))
    reader.run()
    assert reader.is_right(request)
    assert request.loaded_tokens < CHUNKS * CHUNK_TOKENS
    settle(reader, pool)
