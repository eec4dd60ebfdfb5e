"""What is announced of chunks, as vLLM's KV events: what its publisher sends and KV-aware routers read.

The shapes follow ``_build_block_stored_event`` in vLLM 0.32, ``vllm/v1/core/block_pool.py``; the fields are the same in
0.30 and 0.31, see ``vllm/distributed/kv_events.py``.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from meshfusion.host.connector.announcements import Announcement, RemovedBlocks, StoredChunk
from meshfusion.host.kv.resume import GroupPlan

OWNERSHIP: Final = "meshfusion"
"""Tells our events of medium STORAGE from those of other tiers."""


def is_enabled(vllm_config: Any) -> bool:
    """Does the user want KV events at all?"""
    events_config = vllm_config.kv_events_config
    return events_config is not None and events_config.enable_kv_cache_events


class KvEvents:
    """``hash_tokens``: of one of the engine's block hashes. ``spec_facts``: kind and window of each KV group."""

    def __init__(self, *, hash_tokens: int, spec_facts: tuple[tuple[str | None, int | None], ...]) -> None:
        self._hash_tokens = hash_tokens
        self._spec_facts = spec_facts

    def describe(self, request: Any, plan: GroupPlan, chunk: int) -> StoredChunk:
        """What is stored of the group's ``chunk`` of ``request``, while the request can be asked."""
        kept, size = plan.kept_blocks(chunk), plan.block_tokens
        first_token, end_token = kept.start * size, kept.stop * size
        extra_keys, mm_index = [], 0
        for start in range(first_token, end_token, size):
            keys, mm_index = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + size, mm_index)
            extra_keys.append(keys)
        lora = request.lora_request
        return StoredChunk(
            plan.group,
            tuple(self._hash_at(request, start + size) for start in range(first_token, end_token, size)),
            self._hash_at(request, first_token) if first_token else None,
            tuple(request.all_token_ids[first_token:end_token]),
            size,
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            tuple(extra_keys),
            request.session_id,
        )

    def event(self, announcement: Announcement) -> KVCacheEvent:
        if isinstance(announcement, RemovedBlocks):
            return BlockRemoved(
                block_hashes=_external(announcement.block_hashes),
                medium=MEDIUM_STORAGE,
                group_idx=announcement.group,
                ownership=OWNERSHIP,
            )
        parent = announcement.parent_hash
        kind, window_tokens = self._spec_facts[announcement.group]
        return BlockStored(
            block_hashes=_external(announcement.block_hashes),
            parent_block_hash=None if parent is None else _external((parent,))[0],
            token_ids=list(announcement.token_ids),
            block_size=announcement.block_tokens,
            lora_id=announcement.lora_id,
            medium=MEDIUM_STORAGE,
            lora_name=announcement.lora_name,
            extra_keys=_event_extra_keys(announcement.extra_keys),
            group_idx=announcement.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window_tokens,
            ownership=OWNERSHIP,
            session_id=announcement.session_id,
        )

    def _hash_at(self, request: Any, token: int) -> bytes:
        """The engine's hash of the block that ends before ``token``: that of everything before it."""
        found: bytes = request.block_hashes[token // self._hash_tokens - 1]
        return found


def _external(block_hashes: tuple[bytes, ...]) -> list[Any]:
    """As the engine shows them: it may cut them to numbers for listeners that want those."""
    return [kv_cache_utils.maybe_convert_block_hash(block_hash) for block_hash in block_hashes]


def _event_extra_keys(extra_keys: tuple[tuple[Any, ...] | None, ...] | None) -> list[tuple[Any, ...] | None] | None:
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)  # since 0.31, which tags what goes into hashes
    if untag is None:
        return list(extra_keys) if extra_keys else None
    events_keys: list[tuple[Any, ...] | None] | None = untag(extra_keys)
    return events_keys
