"""What a router hears of a real engine: KV events of the connector, beside the engine's own for the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.e2e.conftest import Prompts
from tests.e2e.harness import BLOCK_TOKENS, CHUNK_TOKENS, MAX_TOKENS, Engines, embedded, whole_chunks

PATIENCE_S = 20.0


class Block(NamedTuple):
    """As a router knows it."""

    parent: object
    tokens: tuple[int, ...]


class Listener:
    """Hears all of one engine: it connects as soon as the publisher is there, long before the first request."""

    def __init__(self, folder: Path) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._endpoint = f"ipc://{folder}/kv"
        self._socket.subscribe("kv")
        self._socket.connect(self._endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0
        self.stored: list[BlockStored] = []
        self.removed: list[BlockRemoved] = []

    def config(self) -> dict[str, object]:
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self._endpoint, "topic": "kv"}

    def hear(self, until: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < end_s, (len(self.stored), len(self.removed))
            if not self._socket.poll(100):
                continue
            _, sequence, payload = self._socket.recv_multipart()
            assert int.from_bytes(sequence, "big") == self._next, "nothing is missing"
            self._next += 1
            for event in self._decoder.decode(payload).events:
                if isinstance(event, BlockStored):
                    self.stored.append(event)
                elif isinstance(event, BlockRemoved):
                    self.removed.append(event)

    def ours(self) -> list[BlockStored]:
        return [event for event in self.stored if event.ownership == "meshfusion"]

    def engines(self) -> list[BlockStored]:
        return [event for event in self.stored if event.ownership != "meshfusion"]

    def close(self) -> None:
        self._socket.close(linger=0)


def blocks_of(events: list[BlockStored]) -> dict[object, Block]:
    """By hash, as they chain."""
    found = {}
    for event in events:
        assert event.block_size == BLOCK_TOKENS
        assert len(event.token_ids) == BLOCK_TOKENS * len(event.block_hashes)
        parent: object = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])
            found[block_hash] = Block(parent, tokens)
            parent = block_hash
    return found


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path)
    yield listener
    listener.close()


def test_a_router_hears_of_chunks_by_the_engines_own_hashes(
    engines: Engines, model: Path, prompts: Prompts, listener: Listener, tmp_path: Path
) -> None:
    engine = engines.start(model, embedded(tmp_path / "pool"), kv_events_config=listener.config())
    engine.answer(prompts.aligned)
    engine.answer(prompts.unaligned)
    held = engine.settle()
    chunks = sum(whole_chunks(len(p) + MAX_TOKENS - 1) // CHUNK_TOKENS for p in (prompts.aligned, prompts.unaligned))
    listener.hear(lambda: len(listener.ours()) >= chunks)

    ours, engines_own = listener.ours(), listener.engines()
    assert len(ours) == chunks == held["pool"]["committed_chunk_count"] == held["counts"]["kv_events_stored"]
    told, known = blocks_of(ours), blocks_of(engines_own)
    assert len(told) == chunks * CHUNK_TOKENS // BLOCK_TOKENS
    assert told == {block_hash: block for block_hash, block in known.items() if block_hash in told}
    expected = (tuple(prompts.aligned), tuple(prompts.unaligned[: whole_chunks(len(prompts.unaligned))]))
    assert {prompt_of(told, last) for last in ends_of(told)} == set(expected)
    assert {event.medium for event in ours} == {"STORAGE"}
    assert "STORAGE" not in {event.medium for event in engines_own}
    alike = ("lora_id", "lora_name", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "session_id")
    for name in alike:
        assert {getattr(event, name) for event in ours} == {getattr(event, name) for event in engines_own}, name

    # The engine forgets its own blocks; what is in the pool stays announced until that is reset too.
    assert engine.call("reset")
    engine.answer(prompts.short)
    listener.hear(lambda: any(event.token_ids[:100] == prompts.short[:96] for event in listener.engines()))
    assert not [event for event in listener.removed if event.medium == "STORAGE"]
    assert engine.call("reset", connector=True)
    engine.settle()
    listener.hear(lambda: any(event.ownership == "meshfusion" for event in listener.removed))
    removed = [event for event in listener.removed if event.ownership == "meshfusion"]
    assert {h for event in removed for h in event.block_hashes} == told.keys()
    assert {event.medium for event in removed} == {"STORAGE"}
    engine.close()


def ends_of(blocks: dict[object, Block]) -> set[object]:
    return blocks.keys() - {block.parent for block in blocks.values()}


def prompt_of(blocks: dict[object, Block], last: object) -> tuple[int, ...]:
    """All tokens up to the end of ``last``."""
    tokens: tuple[int, ...] = ()
    while last is not None:
        tokens = blocks[last].tokens + tokens
        last = blocks[last].parent
    return tokens
