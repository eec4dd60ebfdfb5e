"""How a vLLM request is cut into chunks, and what their keys are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshfusion.host.kv.adapters import AdapterDigests
from meshfusion.host.kv.freshness import process_started_ns
from meshfusion.host.kv.identity import chunk_key

KeyMaker = Callable[[int, bytes], bytes | None]


class Chunking:
    """``hashes_per_block``: the engine may hash finer than its blocks; a block's hash is that of its last part."""

    def __init__(self, *, block_tokens: int, blocks_per_chunk: int, hashes_per_block: int, lora_dtype: str) -> None:
        self.block_tokens = block_tokens
        self.blocks_per_chunk = blocks_per_chunk
        self.chunk_tokens = block_tokens * blocks_per_chunk
        self._hashes_per_block = hashes_per_block
        self._adapters = AdapterDigests(lora_dtype=lora_dtype, engine_started_ns=process_started_ns())

    def block_hashes(self, request: Any) -> Sequence[bytes]:
        """One hash per full block."""
        step = self._hashes_per_block
        hashes: Sequence[bytes] = request.block_hashes
        return hashes if step == 1 else hashes[step - 1 :: step]

    def chunk_hashes(self, request: Any) -> list[bytes]:
        """One hash per full chunk: that of its last block."""
        step = self._hashes_per_block * self.blocks_per_chunk
        return list(request.block_hashes[step - 1 :: step])

    def key_maker(self, request: Any, identity: bytes) -> KeyMaker:
        """Makes chunk keys from (position, block hash), off the scheduler's thread: an adapter's files may have to be
        read. None: this request's adapter is not known for sure."""
        adapters, lora_request = self._adapters, request.lora_request

        def key_of(position_tokens: int, block_hash: bytes) -> bytes | None:
            adapter = adapters.digest(lora_request)
            return None if adapter is None else chunk_key(identity, 0, adapter, position_tokens, block_hash)

        return key_of


def adapter_id(request: Any) -> int:
    """The engine's number for the request's LoRA adapter, 0 without one."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0
