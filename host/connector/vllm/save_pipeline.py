"""A chunk's way into the pool: its blocks are pinned, a place is asked for, a worker writes, the service commits."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.host.connector.saves import ChunkSave, GrantedSave, SaveOptions, Saves
from meshfusion.host.connector.vllm.chunking import Chunking, KeyMaker, adapter_id
from meshfusion.host.connector.vllm.messages import SaveOrder, WorkerFacts
from meshfusion.host.path.staged import ShardWritten
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import Reserved, ReserveWish

logger = logging.getLogger("meshfusion.saves")


class SavePipeline:
    """Lives in the scheduler. Blocks stay pinned (referenced in the engine's block pool) until the write's fate is
    known, so that the engine cannot give them to another request meanwhile."""

    def __init__(
        self, client: PoolClient, facts: WorkerFacts, chunking: Chunking, kv_cache_manager: Any, *, queue_bytes: int
    ) -> None:
        self._client = client
        self._chunking = chunking
        self._manager = kv_cache_manager
        self._chunk_bytes = facts.unit_bytes * facts.blocks_per_chunk
        self._shard = api.ShardSize(rank=0, unit_bytes=facts.unit_bytes, unit_count=facts.blocks_per_chunk)
        self.saves = Saves(
            SaveOptions(queue_bytes=queue_bytes),
            block_tokens=facts.block_tokens,
            blocks_per_chunk=facts.blocks_per_chunk,
            unit_bytes=facts.unit_bytes,
            block_count=facts.block_count,
        )
        self._pinned: dict[int, list[Any]] = {}
        self._granted: dict[int, GrantedSave] = {}
        self._orders: list[SaveOrder] = []
        self.counters: Counter[str] = Counter()

    @property
    def pinned_count(self) -> int:
        """Saves whose blocks are pinned."""
        return len(self._pinned)

    def plan(self, request: Any, computed_tokens: int, identity: bytes) -> list[ReserveWish]:
        """The step now scheduled brings ``request`` to ``computed_tokens``: which chunks to ask a place for."""
        request_id = request.request_id
        if not self.saves.is_due(request_id, computed_tokens):
            return []
        blocks = self._manager.get_blocks(request_id).blocks[0]
        chosen = self.saves.computed(
            request_id,
            computed_tokens,
            self._chunking.block_hashes(request),
            [block.block_id for block in blocks],
            adapter_id(request),
        )
        if not chosen:
            return []
        key_of = self._chunking.key_maker(request, identity)
        wishes = [self._wish(save, blocks, identity, key_of) for save in chosen]
        self._manager.block_pool.touch([block for save in chosen for block in self._pinned[save.save_id]])
        return wishes

    def reserved(self, event: Reserved) -> None:
        """The service answered: what got a place goes to the worker, the rest is unpinned."""
        done: list[int] = []
        for i, save_id in enumerate(event.save_ids):
            if event.results is None:
                self.saves.refused(save_id)
                done.append(save_id)
                continue
            save, result = self.saves.pending(save_id), event.results[i]
            if not self.saves.reserved(save_id, result):
                done.append(save_id)
                continue
            (extent,) = result.extents
            self._granted[save_id] = GrantedSave(
                save, event.keys[i], result.grant_id, extent, event.holder_id, event.epoch
            )
            self._orders.append(
                SaveOrder(
                    save_id,
                    event.holder_id,
                    extent,
                    event.keys[i],
                    event.identity,
                    save.position_tokens,
                    save.block_ids,
                )
            )
        self._unpin(done)

    def take_orders(self) -> tuple[SaveOrder, ...]:
        """What the worker is to write now."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def written(self, results: tuple[ShardWritten, ...]) -> None:
        """The worker has written and flushed, or failed: unpin, then commit or give the place back."""
        commits: dict[tuple[str, int], list[api.CommitItem]] = {}
        for result in results:
            granted = self._granted.pop(result.save_id)
            self.saves.written(result.save_id, ok=result.unit_digests is not None)
            whom = (granted.holder_id, granted.epoch)
            if result.unit_digests is None:
                logger.warning("a chunk was not saved: %s", result.reason)
                self._client.abort(*whom, (granted.grant_id,))
            else:
                commits.setdefault(whom, []).append(api.CommitItem(granted.grant_id, (result.unit_digests,)))
                self.counters["saved_bytes"] += self._chunk_bytes
        self._unpin([result.save_id for result in results])
        for (holder_id, epoch), items in commits.items():
            self._client.commit(holder_id, epoch, tuple(items))

    def _wish(self, save: ChunkSave, blocks: Any, identity: bytes, key_of: KeyMaker) -> ReserveWish:
        first = save.position_tokens // self._chunking.block_tokens
        self._pinned[save.save_id] = blocks[first : first + self._chunking.blocks_per_chunk]
        return ReserveWish(
            save_id=save.save_id,
            identity=identity,
            key_of=lambda: key_of(save.position_tokens, save.block_hash),
            position_tokens=save.position_tokens,
            token_count=self._chunking.chunk_tokens,
            shard=self._shard,
        )

    def _unpin(self, save_ids: list[int]) -> None:
        """Give the blocks back, the last of a prompt first: its first ones are worth keeping longest."""
        blocks = [block for save_id in save_ids for block in self._pinned.pop(save_id)]
        if blocks:
            self._manager.block_pool.free_blocks(reversed(blocks))
