"""Which chunks to save, and what becomes of each: asked for, granted, written, committed. No I/O, no clock.

A save pins the engine's blocks from the step that fills them until the fate of its write is known, so the queue is
bounded in bytes. What does not fit is tried again in later steps while its request lives, in order, since a chunk
behind a hole is of no use; what is left when the request ends is dropped and counted. The engine never waits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from meshfusion.dpu.api.types import Extent, ReserveOutcome, ReserveResult

KNOWN_CHUNKS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class ChunkSave:
    """One chunk of one request on its way to the pool.

    ``block_hash``: the engine's hash of the chunk's last block (it covers everything before it). ``block_ids``: the
    device blocks that hold it, pinned.
    """

    save_id: int
    request_id: str
    position_tokens: int
    block_hash: bytes
    adapter_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrantedSave:
    """A save with a place to go: the worker writes it. ``holder_id``/``epoch``: under whom it was granted."""

    save: ChunkSave
    key: bytes
    grant_id: str
    extent: Extent
    holder_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """``queue_bytes``: engine memory that saves may keep pinned."""

    queue_bytes: int = 256 << 20


class Saves:
    """All saves of one scheduler."""

    def __init__(
        self, options: SaveOptions, *, block_tokens: int, blocks_per_chunk: int, unit_bytes: int, block_count: int
    ) -> None:
        self._block_tokens = block_tokens
        self._blocks_per_chunk = blocks_per_chunk
        quarter = block_count // 4 // blocks_per_chunk
        self._pending_max = max(1, min(options.queue_bytes // (unit_bytes * blocks_per_chunk), quarter))
        self._next_chunk: dict[str, int] = {}
        self._complete: dict[str, int] = {}  # chunks computed so far, of requests that had some to consider
        self._pending: dict[int, ChunkSave] = {}
        self._writing: set[int] = set()
        self._known: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        self._next_id = 0
        self.counters: Counter[str] = Counter()

    @property
    def pending_count(self) -> int:
        """Saves that hold blocks pinned."""
        return len(self._pending)

    @property
    def writing_count(self) -> int:
        """Saves a worker may be writing."""
        return len(self._writing)

    def start_at(self, request_id: str, stored_chunk_count: int) -> None:
        """The first ``stored_chunk_count`` chunks of this request came from, or are in, the pool."""
        self._next_chunk[request_id] = max(self._next_chunk.get(request_id, 0), stored_chunk_count)

    def is_due(self, request_id: str, computed_tokens: int) -> bool:
        """Is there a chunk to consider, and room for it? Cheap: asked for every request of every step."""
        complete = computed_tokens // (self._block_tokens * self._blocks_per_chunk)
        if complete <= self._next_chunk.get(request_id, 0):
            return False
        self._complete[request_id] = complete
        return len(self._pending) < self._pending_max

    def computed(
        self,
        request_id: str,
        computed_tokens: int,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        adapter_id: int,
    ) -> list[ChunkSave]:
        """The step now scheduled brings the request to ``computed_tokens``; returns the chunks to ask a place for.

        The caller pins their blocks. ``block_hashes``: one per full block.
        """
        first = self._next_chunk.get(request_id, 0)
        full_blocks = min(computed_tokens // self._block_tokens, len(block_hashes), len(block_ids))
        last = full_blocks // self._blocks_per_chunk
        if last <= first:
            return []
        self._next_chunk[request_id] = last
        chosen = []
        for chunk in range(first, last):
            start, end = chunk * self._blocks_per_chunk, (chunk + 1) * self._blocks_per_chunk
            known = (block_hashes[end - 1], adapter_id)
            if known in self._known:
                self._known.move_to_end(known)
                continue
            if len(self._pending) >= self._pending_max:
                self._next_chunk[request_id] = chunk
                break
            self._next_id += 1
            save = ChunkSave(
                save_id=self._next_id,
                request_id=request_id,
                position_tokens=start * self._block_tokens,
                block_hash=block_hashes[end - 1],
                adapter_id=adapter_id,
                block_ids=tuple(block_ids[start:end]),
            )
            self._pending[save.save_id] = save
            self._remember(known)
            chosen.append(save)
        self.counters["saves_asked"] += len(chosen)
        return chosen

    def forget_request(self, request_id: str) -> None:
        """Finished; its pending saves go on, since their blocks are pinned."""
        considered = self._next_chunk.pop(request_id, 0)
        complete = self._complete.pop(request_id, 0)
        self.counters["saves_dropped_queue_full"] += max(0, complete - considered)

    def reserved(self, save_id: int, result: ReserveResult) -> bool:
        """The service answered for one save. True: hand it to the worker. False: unpin its blocks."""
        save = self._pending[save_id]
        self.counters[f"reserve_{result.outcome.value}"] += 1
        if result.outcome is ReserveOutcome.GRANTED:
            self._writing.add(save_id)
            return True
        if result.outcome is ReserveOutcome.NO_SPACE:
            self._forget(save)
        del self._pending[save_id]
        return False

    def refused(self, save_id: int) -> ChunkSave:
        """The service could not be asked: drop the save; unpin its blocks."""
        save = self._pending.pop(save_id)
        self._forget(save)
        self.counters["saves_dropped_service"] += 1
        return save

    def pending(self, save_id: int) -> ChunkSave:
        return self._pending[save_id]

    def written(self, save_id: int, *, ok: bool) -> ChunkSave:
        """The worker is done with it, well or not: unpin its blocks."""
        self._writing.discard(save_id)
        save = self._pending.pop(save_id)
        if not ok:
            self._forget(save)
            self.counters["saves_failed"] += 1
        return save

    def not_stored(self, block_hashes: Sequence[bytes], adapter_id: int) -> None:
        """The service does not have these chunks (any more): they are worth saving again."""
        pending = {(save.block_hash, save.adapter_id) for save in self._pending.values()}
        for block_hash in block_hashes:
            known = (block_hash, adapter_id)
            if known not in pending:
                self._known.pop(known, None)

    def save_again_from(self, request_id: str, chunk: int) -> None:
        """A load failed from this chunk on: what is recomputed is worth saving."""
        self._next_chunk[request_id] = min(chunk, self._next_chunk.get(request_id, chunk))

    def forget_known(self) -> None:
        """The pool is another one, or was reset: ask again for everything."""
        self._known.clear()

    def _remember(self, known: tuple[bytes, int]) -> None:
        self._known[known] = None
        if len(self._known) > KNOWN_CHUNKS_MAX:
            self._known.popitem(last=False)

    def _forget(self, save: ChunkSave) -> None:
        self._known.pop((save.block_hash, save.adapter_id), None)
