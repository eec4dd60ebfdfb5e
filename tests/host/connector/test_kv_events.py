"""KV events of a small engine on the real pool, and against what vLLM's own block pool tells of the same request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.vllm.kv_events import KvEvents, is_enabled
from meshfusion.host.kv.resume import GroupPlan, LastWindow, StateAtBoundary, WholePrefix
from tests.host.support.engine_on_pool import (
    CHUNK_TOKENS,
    EngineFactory,
    committed,
    corrupt,
    prompt,
    save_prompt,
    settle,
)
from tests.host.support.kv_memory import BLOCK_TOKENS
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import make_request

pytestmark = pytest.mark.usefixtures("quick_reattach")


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine cuts them to 64 bits unless it is told not to."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def stored(events: list[KVCacheEvent]) -> list[BlockStored]:
    return [event for event in events if isinstance(event, BlockStored)]


def chunks_of(pool: Pool) -> tuple[api.ChunkRecord, ...]:
    return pool.list_chunks(api.ListRequest(), deadline_s=1).chunks


def removed_hashes(events: list[KVCacheEvent]) -> list[Any]:
    return [h for event in events if isinstance(event, BlockRemoved) for h in event.block_hashes]


def all_told(engine: MiniEngine, chunks: int) -> None:
    engine.step_until(lambda: len(stored(engine.events)) == chunks)


def test_what_becomes_visible_is_told_with_the_engines_own_hashes(pool: Pool, start: EngineFactory) -> None:
    engine = start(announces=True)
    tokens = prompt(3 * CHUNK_TOKENS + 7)
    hashes = make_request("writer", tokens).block_hashes
    save_prompt(engine, tokens)
    # The engine has gone idle: it made steps until all was told.
    assert pool.status(deadline_s=1).committed_chunk_count == 3
    assert [event.block_hashes for event in stored(engine.events)] == [hashes[i : i + 2] for i in (0, 2, 4)]
    assert [event.parent_block_hash for event in stored(engine.events)] == [None, hashes[1], hashes[3]]
    assert [event.token_ids for event in stored(engine.events)] == [
        tokens[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS] for i in range(3)
    ]
    assert {(e.block_size, e.medium, e.ownership, e.group_idx, e.lora_id) for e in stored(engine.events)} == {
        (BLOCK_TOKENS, "STORAGE", "meshfusion", 0, None)
    }
    assert engine.side.counts()["kv_events_stored"] == 3
    # What is stored already is not ours to tell, nor is what was loaded.
    engine.events.clear()
    reader = start(announces=True)
    reader.add(make_request("reader", tokens))
    reader.run()
    assert (engine.events, reader.events) == ([], [])
    settle(engine, pool)
    settle(reader, pool)


def test_nothing_is_told_where_nobody_asked(pool: Pool, start: EngineFactory) -> None:
    engine = start()
    save_prompt(engine, prompt(2 * CHUNK_TOKENS))
    committed(pool, 2)
    engine.step()
    assert engine.events == []
    settle(engine, pool)


def test_a_refused_commit_is_not_told(pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(announces=True)
    commit = pool.commit

    def refused(request: Any, *, deadline_s: float) -> Any:
        reply = commit(request, deadline_s=deadline_s)
        return type(reply)((False,) * len(reply.committed))

    monkeypatch.setattr(pool, "commit", refused)
    save_prompt(engine, prompt(2 * CHUNK_TOKENS))
    assert engine.events == []
    assert engine.side.counts()["commits_refused"] == 2
    assert not engine.side.has_work


def test_an_answer_to_another_question_is_not_told(
    pool: Pool, start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(announces=True)
    commit = pool.commit

    def short(request: Any, *, deadline_s: float) -> Any:
        reply = commit(request, deadline_s=deadline_s)
        return type(reply)(reply.committed[:-1])

    monkeypatch.setattr(pool, "commit", short)
    save_prompt(engine, prompt(2 * CHUNK_TOKENS))
    assert engine.events == []
    assert engine.side.counts()["commits_refused"] == 2


def test_a_chunk_with_wrong_bytes_is_taken_back_and_told_again(pool: Pool, start: EngineFactory) -> None:
    engine = start(announces=True)
    tokens = prompt(3 * CHUNK_TOKENS + 5)
    hashes = make_request("writer", tokens).block_hashes
    save_prompt(engine, tokens)
    engine.abort("writer")
    engine.events.clear()
    victim = next(c for c in chunks_of(pool) if c.position_tokens == CHUNK_TOKENS)
    corrupt(pool, victim, 0)
    engine.add(make_request("reader", tokens))
    engine.run()
    all_told(engine, 1)
    assert [type(event) for event in engine.events] == [BlockRemoved, BlockStored]
    (gone, again) = engine.events
    assert isinstance(gone, BlockRemoved)
    assert (gone.block_hashes, gone.medium, gone.ownership) == (hashes[2:4], "STORAGE", "meshfusion")
    assert stored([again])[0].block_hashes == hashes[2:4]
    settle(engine, pool)


def test_after_a_reset_all_is_taken_back(pool: Pool, start: EngineFactory) -> None:
    engine = start(announces=True)
    tokens = prompt(2 * CHUNK_TOKENS)
    save_prompt(engine, tokens)
    engine.finish_all()
    engine.events.clear()
    engine.side.reset()
    engine.run()
    assert removed_hashes(engine.events) == make_request("writer", tokens).block_hashes
    assert stored(engine.events) == []


def test_a_place_for_what_was_told_says_that_it_is_gone(pool: Pool, start: EngineFactory) -> None:
    """The service has reclaimed it: the engine learns that when it saves the same again."""
    engine = start(announces=True)
    tokens = prompt(CHUNK_TOKENS + 1)
    save_prompt(engine, tokens)
    (chunk,) = chunks_of(pool)
    engine.finish_all()
    engine.events.clear()
    attachment = engine.client.attachment
    assert attachment is not None
    extent = chunk.shards[0].extent
    assert pool.drop(api.DropRequest(attachment.holder_id, chunk.key, extent, "by the test"), deadline_s=1)
    engine.add(make_request("again", tokens))
    engine.run()
    all_told(engine, 1)
    assert [type(event) for event in engine.events] == [BlockRemoved, BlockStored]
    settle(engine, pool)


# ---- the engine's own words ----------------------------------------------------------------------------------------


def real_request(**arguments: Any) -> Request:
    init_none_hash(sha256_cbor)
    return Request(
        "request",
        list(range(500, 628)),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(16, sha256_cbor),
        **arguments,
    )


LORA = LoRARequest("an-adapter", 7, "/nowhere")


@pytest.mark.parametrize(
    "arguments", [{}, {"cache_salt": "tenant"}, {"lora_request": LORA}, {"session_id": "a session"}]
)
def test_a_chunk_is_told_as_the_engine_tells_its_blocks(arguments: dict[str, Any]) -> None:
    request = real_request(**arguments)
    pool = BlockPool(20, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, blocks, 0, 2, 32, 0)
    pool.cache_full_blocks(request, blocks, 2, 4, 32, 0)
    ours = KvEvents(hash_tokens=16, spec_facts=((None, None),))
    plan = GroupPlan(0, WholePrefix(), 32, 64)
    for chunk, theirs in enumerate(pool.take_events()):
        told = ours.event(ours.describe(request, plan, chunk))
        assert isinstance(told, BlockStored)
        assert (told.medium, told.ownership) == ("STORAGE", "meshfusion")
        told.medium, told.ownership = theirs.medium, theirs.ownership
        assert msgspec.to_builtins(told) == msgspec.to_builtins(theirs)
    assert chunk == 1


@pytest.mark.parametrize("start_tokens", [0, 40, 70])
def test_images_are_told_as_the_engine_tells_them(start_tokens: int) -> None:
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=at, length=40))
        for name, at in (("first", start_tokens), ("second", start_tokens + 40))
    ]
    request = real_request()
    request.mm_features = features
    pool = BlockPool(20, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(8), 0, 8, 16, 0)
    (theirs,) = pool.take_events()
    ours = KvEvents(hash_tokens=16, spec_facts=((None, None),))
    plan = GroupPlan(0, WholePrefix(), 16, 64)
    told = [ours.event(ours.describe(request, plan, chunk)).extra_keys for chunk in range(2)]
    assert told[0] + told[1] == theirs.extra_keys


def test_hashes_may_be_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    request = real_request()
    ours = KvEvents(hash_tokens=16, spec_facts=((None, None),))
    told = ours.event(ours.describe(request, GroupPlan(0, WholePrefix(), 16, 32), 1))
    assert told.block_hashes == [int.from_bytes(h[-8:], "big") for h in request.block_hashes[2:4]]
    assert told.parent_block_hash == int.from_bytes(request.block_hashes[1][-8:], "big")


@pytest.mark.parametrize(
    ("rule", "first_block", "kind", "window"),
    [(LastWindow(33), 6, "sliding_window", 33), (StateAtBoundary(), 7, "mamba", None)],
)
def test_of_a_window_or_a_state_only_what_is_stored_is_told(
    rule: Any, first_block: int, kind: str, window: int | None
) -> None:
    """Chunk 1 are blocks 4 to 7; before its end a window of 33 tokens reaches 32 tokens back, with the token itself."""
    request = real_request()
    ours = KvEvents(hash_tokens=16, spec_facts=(("full_attention", None), (kind, window)))
    told = ours.event(ours.describe(request, GroupPlan(1, rule, 16, 64), 1))
    assert told.block_hashes == request.block_hashes[first_block:8]
    assert told.parent_block_hash == request.block_hashes[first_block - 1]
    assert told.token_ids == list(request.all_token_ids[first_block * 16 : 128])
    assert (told.group_idx, told.kv_cache_spec_kind, told.kv_cache_spec_sliding_window) == (1, kind, window)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        (SimpleNamespace(enable_kv_cache_events=False), False),
        (SimpleNamespace(enable_kv_cache_events=True), True),
    ],
)
def test_events_are_for_engines_that_publish_them(config: Any, expected: bool) -> None:
    assert is_enabled(SimpleNamespace(kv_events_config=config)) is expected
