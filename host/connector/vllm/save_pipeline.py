"""A run's way into the pool: its blocks are pinned, places are asked for, a worker writes, the service commits."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any, Final, NamedTuple

from meshfusion.host.connector.saves import SaveOptions, SaveRun, Saves
from meshfusion.host.connector.vllm.chunking import Chunking
from meshfusion.host.connector.vllm.messages import RunWritten, SaveOrder, WorkerFacts
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import GrantedRun, Reserved, ReserveWish

logger = logging.getLogger("meshfusion.saves")

REPEAT_PATIENCE_S: Final = 10.0


class SavePipeline:
    """Lives in the scheduler. Blocks stay pinned (referenced in the engine's block pool) until the fate of the run's
    last write is known, so that the engine cannot give them to another request meanwhile."""

    def __init__(
        self, client: PoolClient, facts: WorkerFacts, chunking: Chunking, kv_cache_manager: Any, *, queue_bytes: int
    ) -> None:
        self._client = client
        self._chunking = chunking
        self._manager = kv_cache_manager
        self._chunk_bytes = facts.unit_bytes * facts.blocks_per_chunk
        self.saves = Saves(
            SaveOptions(queue_bytes=queue_bytes),
            block_tokens=facts.block_tokens,
            blocks_per_chunk=facts.blocks_per_chunk,
            unit_bytes=facts.unit_bytes,
            block_count=facts.block_count,
        )
        self._pinned: dict[int, list[Any]] = {}
        self._granted: dict[int, GrantedRun] = {}
        self._orders: list[SaveOrder] = []
        self._repeated: set[int] = set()  # runs that are second attempts: there is no third
        self._repeats: list[_Repeat] = []
        self.counters: Counter[str] = Counter()

    @property
    def pinned_count(self) -> int:
        """Runs whose blocks are pinned."""
        return len(self._pinned)

    def plan(self, request: Any, computed_tokens: int, identity: bytes) -> list[ReserveWish]:
        """The step now scheduled brings ``request`` to ``computed_tokens``: which chunks to ask places for."""
        due = self.saves.due_chunks(request.request_id, computed_tokens)
        if not due:
            return []
        per_chunk = self._chunking.blocks_per_chunk
        blocks = self._manager.get_blocks(request.request_id).blocks[0][due.start * per_chunk : due.stop * per_chunk]
        hashes = self._chunking.chunk_hashes(request, due.start, due.stop)
        runs = self.saves.take(request.request_id, due, hashes, [block.block_id for block in blocks])
        for run in runs:
            first = (run.first_chunk - due.start) * per_chunk
            pinned = self._pinned[run.run_id] = blocks[first : first + len(run.block_ids)]
            self._manager.block_pool.touch(pinned)
        return [self._wish(run, request, identity) for run in runs]

    def reserved(self, event: Reserved) -> None:
        """The service answered: what got places goes to the worker, a run that got none is unpinned."""
        run = self.saves.run(event.run_id)
        ended = self.saves.reserved(event.run_id, event.outcomes, event.no_space)
        if ended is not None:
            self._repeated.discard(event.run_id)
            self._unpin(ended)
            return
        assert event.granted is not None, event
        self._granted[event.run_id] = event.granted
        position_tokens = run.first_chunk * self._chunking.chunk_tokens
        self._orders.append(SaveOrder(run.run_id, position_tokens, run.block_ids, event.granted))

    def refused(self, run_id: int) -> None:
        """The service could not be asked."""
        self._repeated.discard(run_id)
        self._unpin(self.saves.refused(run_id))

    def take_orders(self) -> tuple[SaveOrder, ...]:
        """What the worker is to write now."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def written(self, now_s: float, results: tuple[RunWritten, ...]) -> None:
        """The worker has written and flushed, or failed: unpin, then commit or give the places back.

        What is in doubt keeps its place, and is written once more elsewhere by the next incarnation (rule 3).
        """
        for result in results:
            granted = self._granted.pop(result.run_id)
            assert len(result.unit_digests) == len(granted.indexes), (result.run_id, granted.indexes)
            failed = [i for i, digests in zip(granted.indexes, result.unit_digests, strict=True) if digests is None]
            if failed:
                logger.warning("%d chunk(s) were not saved: %s", len(failed), result.reason)
            self.counters["saved_bytes"] += self._chunk_bytes * (len(granted.indexes) - len(failed))
            self.counters["saves_in_doubt"] += len(result.in_doubt)
            ended = self.saves.written(result.run_id, failed)
            if result.in_doubt and result.run_id not in self._repeated:
                self._repeat(now_s, ended, granted, result.in_doubt)
            else:
                self._repeated.discard(result.run_id)
                self._unpin(ended)
            self._client.settle(granted, result.unit_digests, result.in_doubt)
            if result.in_doubt:
                logger.warning(
                    "writes of %s are in doubt: going on as another, so that it is fenced", granted.holder_id
                )
                self._client.attach_anew(granted.holder_id)

    def take_repeats(self, holder_id: str) -> list[ReserveWish]:
        """What to ask places for, now that ``holder_id`` is attached."""
        due = [repeat.wish for repeat in self._repeats if repeat.doubted_holder_id != holder_id]
        self._repeats = [repeat for repeat in self._repeats if repeat.doubted_holder_id == holder_id]
        return due

    def give_up_repeats(self, now_s: float) -> None:
        """No attachment came in time: blocks are not kept for longer."""
        late = [repeat.wish for repeat in self._repeats if repeat.until_s <= now_s]
        self._repeats = [repeat for repeat in self._repeats if repeat.until_s > now_s]
        for wish in late:
            self.refused(wish.run_id)

    def _repeat(self, now_s: float, run: SaveRun, granted: GrantedRun, in_doubt: tuple[int, ...]) -> None:
        per_chunk = self._chunking.blocks_per_chunk
        blocks = self._pinned.pop(run.run_id)
        keys = {granted.indexes[i]: granted.keys[i] for i in in_doubt}
        kept: set[int] = set()
        for repeat in self.saves.repeat(run, sorted(keys)):
            first = repeat.first_chunk - run.first_chunk
            own = range(first * per_chunk, (first + repeat.chunk_count) * per_chunk)
            self._pinned[repeat.run_id] = [blocks[i] for i in own]
            kept.update(own)
            self._repeated.add(repeat.run_id)
            position_tokens = repeat.first_chunk * self._chunking.chunk_tokens
            its_keys = tuple(keys[first + i] for i in range(repeat.chunk_count))
            wish = ReserveWish(
                repeat.run_id, granted.identity, position_tokens, repeat.chunk_count, keys_of=partial(tuple, its_keys)
            )
            self._repeats.append(_Repeat(now_s + REPEAT_PATIENCE_S, granted.holder_id, wish))
        self._manager.block_pool.free_blocks([b for i, b in reversed(list(enumerate(blocks))) if i not in kept])

    def _wish(self, run: SaveRun, request: Any, identity: bytes) -> ReserveWish:
        position_tokens = run.first_chunk * self._chunking.chunk_tokens
        keys_of = self._chunking.key_maker(request, identity)
        return ReserveWish(
            run_id=run.run_id,
            identity=identity,
            position_tokens=position_tokens,
            chunk_count=run.chunk_count,
            keys_of=lambda: keys_of(position_tokens, run.chunk_hashes),
        )

    def _unpin(self, run: SaveRun) -> None:
        """Give the blocks back, the last of a prompt first: its first ones are worth keeping longest."""
        self._manager.block_pool.free_blocks(reversed(self._pinned.pop(run.run_id)))


class _Repeat(NamedTuple):
    """Waits until ``until_s`` for another attachment than that of the writes in doubt."""

    until_s: float
    doubted_holder_id: str
    wish: ReserveWish
