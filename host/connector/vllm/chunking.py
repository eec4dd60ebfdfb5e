"""How a vLLM request is cut into chunks, and what their keys are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshfusion.host.kv.adapters import AdapterDigests
from meshfusion.host.kv.freshness import process_started_ns
from meshfusion.host.kv.identity import chunk_key

KeyMaker = Callable[[int, Sequence[bytes]], tuple[bytes, ...] | None]


class Chunking:
    """``hashes_per_block``: the engine may hash finer than its blocks; a block's hash is that of its last part."""

    def __init__(self, *, block_tokens: int, blocks_per_chunk: int, hashes_per_block: int, lora_dtype: str) -> None:
        self.block_tokens = block_tokens
        self.blocks_per_chunk = blocks_per_chunk
        self.chunk_tokens = block_tokens * blocks_per_chunk
        self._hashes_per_block = hashes_per_block
        self._adapters = AdapterDigests(lora_dtype=lora_dtype, engine_started_ns=process_started_ns())

    def chunk_hashes(self, request: Any, first: int = 0, last: int | None = None) -> list[bytes]:
        """One hash for each full chunk from ``first`` up to ``last``: that of its last block."""
        step = self._hashes_per_block * self.blocks_per_chunk
        return list(request.block_hashes[(first + 1) * step - 1 : None if last is None else last * step : step])

    def key_maker(self, request: Any, identity: bytes) -> KeyMaker:
        """Makes the keys of consecutive chunks from (position of the first, their hashes), off the scheduler's thread:
        an adapter's files may have to be read. None: this request's adapter is not known for sure."""
        adapters, lora_request, chunk_tokens = self._adapters, request.lora_request, self.chunk_tokens

        def keys_of(position_tokens: int, chunk_hashes: Sequence[bytes]) -> tuple[bytes, ...] | None:
            adapter = adapters.digest(lora_request)
            if adapter is None:
                return None
            return tuple(
                chunk_key(identity, 0, adapter, position_tokens + i * chunk_tokens, chunk_hash)
                for i, chunk_hash in enumerate(chunk_hashes)
            )

        return keys_of
