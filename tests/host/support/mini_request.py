"""A request as the connector's scheduler half sees it, with what the mini engine notes of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from tests.host.support.kv_memory import BLOCK_TOKENS


@dataclass(slots=True)
class Request:
    request_id: str
    tokens: list[int]
    block_hashes: list[bytes]  # several for each block, where the engine hashes finer than it allocates
    num_computed_tokens: int = 0
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    mm_features: tuple[Any, ...] = ()
    cache_salt: str | None = None
    prompt_embeds: Any = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    stage: str = "waiting"  # waiting, loading, loaded, running, done
    loaded_tokens: int = 0  # of the last load, as far as it went well
    recomputed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens


def make_request(request_id: str, tokens: list[int], *, hashes_per_block: int = 1) -> Request:
    hash_tokens = BLOCK_TOKENS // hashes_per_block
    hashes, parent = [], b""
    for end in range(hash_tokens, len(tokens) + 1, hash_tokens):
        parent = hashlib.sha256(parent + repr(tokens[end - hash_tokens : end]).encode()).digest()
        hashes.append(parent)
    return Request(request_id, tokens, hashes)
