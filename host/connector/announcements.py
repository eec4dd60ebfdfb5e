"""What this engine has told others about its chunks in the pool: a router then sends a request where its KV is.

No I/O and no clock. A chunk is announced when the service has answered that it is visible (rule 1), and not before.
Everything that stays announced is remembered, so that it can be taken back; the memory is bounded, and what falls out
of it is taken back first. So a listener never believes more of us than we could still withdraw.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

QUEUE_MAX: Final = 4096
"""Announcements that wait to be taken: the engine takes them with every step."""
HASHES_MAX: Final = 1 << 20
"""Block hashes that stay announced, of at most 32 bytes each."""
ANSWER_MAX_S: Final = 30.0
"""A commit that is not answered within this time counts as refused: it is not waited for."""
_HASHES_PER_REMOVAL: Final = 1024


class StoredChunk(NamedTuple):
    """What of a chunk is stored, in the engine's words: whole blocks of ``block_tokens`` tokens, each with the engine's
    own hash of it. ``parent_hash``: of the block before the first one; None at the start of a request.

    ``token_ids``: of these blocks, in order. ``extra_keys``: what else went into the hashes, an entry for each block.
    """

    group: int
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_tokens: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    session_id: str | None = None


class RemovedBlocks(NamedTuple):
    """No longer to be counted on."""

    group: int
    block_hashes: tuple[bytes, ...]


Announcement = StoredChunk | RemovedBlocks


@dataclass(frozen=True, slots=True)
class _Awaited:
    chunk: StoredChunk
    until_s: float


class Announcements:
    """All of one scheduler. ``identity``: under which its chunks are found."""

    def __init__(self, identity: bytes, *, queue_max: int = QUEUE_MAX, hashes_max: int = HASHES_MAX) -> None:
        self._identity = identity
        self._queue_max = queue_max
        self._hashes_max = hashes_max
        self._pool_uuid = ""
        self._awaited: dict[bytes, _Awaited] = {}  # commits under way, by key, the oldest first
        self._announced: dict[bytes, RemovedBlocks] = {}  # by key, the oldest first: what would take it back
        self._hash_count = 0
        self._queue: deque[Announcement] = deque()
        self.counters: Counter[str] = Counter()

    # ---- what happens to chunks ----------------------------------------------------------------------------------

    def settling(self, now_s: float, identity: bytes, chunks: Iterable[tuple[bytes, StoredChunk]]) -> None:
        """These are about to be committed, each under its key. Those of another identity nobody will find here."""
        if identity != self._identity:
            return
        for key, chunk in chunks:
            if len(self._awaited) >= self._queue_max:
                self.counters["kv_events_dropped"] += 1
                continue
            self._awaited[key] = _Awaited(chunk, now_s + ANSWER_MAX_S)

    def committed(self, visible: Iterable[bytes], refused: Iterable[bytes]) -> None:
        """The service's answer. A key that is not awaited (any more) changes nothing."""
        for key in visible:
            awaited = self._awaited.pop(key, None)
            if awaited is not None:
                self._announce(key, awaited.chunk)
        for key in refused:
            self._awaited.pop(key, None)

    def gone(self, keys: Iterable[bytes]) -> None:
        """These are not to be had from the pool any more, whoever may have stored them."""
        found = [self._forget(key) for key in keys if key in self._announced]
        self._take_back(found)

    def in_pool(self, pool_uuid: str) -> None:
        """The service is attached to. What was announced of another pool is gone with it."""
        if self._pool_uuid not in ("", pool_uuid):
            self._all_gone()
        self._pool_uuid = pool_uuid

    def reset(self, identity: bytes) -> None:
        """From now on only chunks of ``identity`` are found."""
        self._identity = identity
        self._all_gone()

    # ---- for the engine ------------------------------------------------------------------------------------------

    def take(self) -> list[Announcement]:
        """What is to be told now, in order."""
        taken = list(self._queue)
        self._queue.clear()
        return taken

    @property
    def pending_count(self) -> int:
        """What there is to tell, and chunks that may be about to be told."""
        return len(self._queue) + len(self._awaited)

    def give_up_late(self, now_s: float) -> None:
        """Answers that have not come by now are not waited for."""
        for key in [key for key, awaited in self._awaited.items() if awaited.until_s <= now_s]:
            del self._awaited[key]

    # ---- inside --------------------------------------------------------------------------------------------------

    def _announce(self, key: bytes, chunk: StoredChunk) -> None:
        if len(self._queue) >= self._queue_max:
            self.counters["kv_events_dropped"] += 1
            return
        if key in self._announced:
            self._forget(key)  # written anew: told again, remembered once
        self._announced[key] = RemovedBlocks(chunk.group, chunk.block_hashes)
        self._hash_count += len(chunk.block_hashes)
        self._queue.append(chunk)
        self.counters["kv_events_stored"] += 1
        while self._hash_count > self._hashes_max:
            self._take_back([self._forget(next(iter(self._announced)))])

    def _forget(self, key: bytes) -> RemovedBlocks:
        removed = self._announced.pop(key)
        self._hash_count -= len(removed.block_hashes)
        return removed

    def _take_back(self, found: Sequence[RemovedBlocks]) -> None:
        """Never dropped: their number is bounded by what was announced."""
        by_group: dict[int, list[bytes]] = {}
        for removed in found:
            by_group.setdefault(removed.group, []).extend(removed.block_hashes)
        for group, hashes in by_group.items():
            for first in range(0, len(hashes), _HASHES_PER_REMOVAL):
                self._queue.append(RemovedBlocks(group, tuple(hashes[first : first + _HASHES_PER_REMOVAL])))
                self.counters["kv_events_removed"] += 1

    def _all_gone(self) -> None:
        self._awaited.clear()
        self.gone(list(self._announced))
