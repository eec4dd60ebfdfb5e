"""Which chunks to save, and what becomes of them: asked for, granted, written. No I/O, no clock.

The unit here is a *run*: consecutive chunks of one request that one step completed. What a scheduling pass costs then
grows with the requests it touches and hardly with the chunks they fill. A run pins the engine's blocks from the step
that fills them until the fate of its last write is known, so the queue is bounded in bytes. What does not fit is tried
again in later steps while its request lives, in order, since a chunk behind a hole is of no use; what is left when the
request ends is dropped and counted. The engine never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from meshfusion.dpu.api.limits import MAX_ITEMS
from meshfusion.dpu.api.types import ReserveOutcome

KNOWN_CHUNKS_MAX = 100_000


class SaveRun(NamedTuple):
    """Consecutive chunks of one request on their way to the pool; ``first_chunk`` counts the request's from 0.

    ``chunk_hashes``: for each chunk the engine's hash of its last block (it covers everything before it, and the name
    of the adapter). ``block_ids``: the device blocks that hold them, in order, pinned.
    """

    run_id: int
    request_id: str
    first_chunk: int
    chunk_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_hashes)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """``queue_bytes``: engine memory that saves may keep pinned."""

    queue_bytes: int = 256 << 20


class KnownChunks:
    """Chunks there is no need to ask about, since they are stored or on their way.

    At most ``size_max`` and one addition more; the half that was added last is always among them.
    """

    def __init__(self, size_max: int = KNOWN_CHUNKS_MAX) -> None:
        self._half_max = size_max // 2
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, chunk_hash: bytes) -> bool:
        return chunk_hash in self._young or chunk_hash in self._old

    def has_any(self, chunk_hashes: Iterable[bytes]) -> bool:
        return not (self._young.isdisjoint(chunk_hashes) and self._old.isdisjoint(chunk_hashes))

    def add(self, chunk_hashes: Iterable[bytes]) -> None:
        self._young.update(chunk_hashes)
        if len(self._young) > self._half_max:
            self._young, self._old = set(), self._young

    def remove(self, chunk_hashes: Collection[bytes]) -> None:
        self._young.difference_update(chunk_hashes)
        self._old.difference_update(chunk_hashes)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def __len__(self) -> int:
        return len(self._young | self._old)


class Saves:
    """All saves of one scheduler. The caller pins a run's blocks when it gets it and unpins them when it has ended."""

    def __init__(
        self, options: SaveOptions, *, block_tokens: int, blocks_per_chunk: int, unit_bytes: int, block_count: int
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._chunk_tokens = block_tokens * blocks_per_chunk
        quarter = block_count // 4 // blocks_per_chunk
        self._pending_max = max(1, min(options.queue_bytes // (unit_bytes * blocks_per_chunk), quarter, MAX_ITEMS))
        self._next_chunk: dict[str, int] = {}
        self._complete: dict[str, int] = {}  # chunks computed so far, of requests that had some to consider
        self._runs: dict[int, SaveRun] = {}
        self._writing: dict[int, int] = {}  # run id -> chunks that a worker may be writing
        self._run_of: dict[bytes, int] = {}  # chunks that are on their way, by hash
        self._pending_count = 0
        self._known = KnownChunks()
        self._next_id = 0
        self.counters: Counter[str] = Counter()

    @property
    def pending_count(self) -> int:
        """Chunks that hold blocks pinned."""
        return self._pending_count

    @property
    def writing_count(self) -> int:
        """Chunks a worker may be writing."""
        return sum(self._writing.values())

    def start_at(self, request_id: str, stored_chunk_count: int) -> None:
        """The first ``stored_chunk_count`` chunks of this request came from, or are in, the pool."""
        self._next_chunk[request_id] = max(self._next_chunk.get(request_id, 0), stored_chunk_count)

    def due_chunks(self, request_id: str, computed_tokens: int) -> range:
        """Chunks to consider when the step now scheduled brings the request to ``computed_tokens``, as far as there is
        room. Cheap: asked for every request of every step."""
        complete = computed_tokens // self._chunk_tokens
        first = self._next_chunk.get(request_id, 0)
        if complete <= first:
            return range(0)
        self._complete[request_id] = complete
        return range(first, min(complete, first + self._pending_max - self._pending_count))

    def take(
        self, request_id: str, due: range, chunk_hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> list[SaveRun]:
        """The runs of ``due`` to ask places for. ``chunk_hashes``, ``block_ids``: of these chunks, as far as known."""
        count = min(len(due), len(chunk_hashes), len(block_ids) // self._blocks_per_chunk)
        if count <= 0:
            return []
        self._next_chunk[request_id] = due.start + count
        hashes = tuple(chunk_hashes[:count])
        runs = [
            self._new_run(request_id, due.start + part.start, hashes[part.start : part.stop], block_ids, part)
            for part in self._unknown_parts(hashes)
        ]
        self._known.add(hashes)
        self.counters["saves_asked"] += sum(run.chunk_count for run in runs)
        return runs

    def forget_request(self, request_id: str) -> None:
        """Finished; its pending saves go on, since their blocks are pinned."""
        considered = self._next_chunk.pop(request_id, 0)
        complete = self._complete.pop(request_id, 0)
        self.counters["saves_dropped_queue_full"] += max(0, complete - considered)

    def reserved(self, run_id: int, outcomes: Mapping[ReserveOutcome, int], no_space: Sequence[int]) -> SaveRun | None:
        """The service answered for a run; ``no_space``: which of its chunks found none, counted from 0.

        Returns the run when it has ended (nothing was granted): unpin its blocks. None: hand it to the worker.
        """
        run = self._runs[run_id]
        assert sum(outcomes.values()) == run.chunk_count, (run_id, outcomes)
        for outcome, count in outcomes.items():
            self.counters[f"reserve_{outcome.value}"] += count
        self._forget(run, no_space)
        self._not_on_the_way(run, [run.chunk_hashes[i] for i in no_space])
        granted = outcomes.get(ReserveOutcome.GRANTED, 0)
        if granted == 0:
            return self._end(run)
        self._writing[run_id] = granted
        return None

    def refused(self, run_id: int) -> SaveRun:
        """The service could not be asked: the run has ended; unpin its blocks."""
        run = self._runs[run_id]
        self._forget(run, range(run.chunk_count))
        self.counters["saves_dropped_service"] += run.chunk_count
        return self._end(run)

    def written(self, run_id: int, failed: Sequence[int]) -> SaveRun:
        """The worker is done with a run, but for its chunks ``failed`` (from 0): it has ended; unpin its blocks."""
        del self._writing[run_id]
        run = self._runs[run_id]
        self._forget(run, failed)
        self.counters["saves_failed"] += len(failed)
        return self._end(run)

    def repeat(self, run: SaveRun, indexes: Sequence[int]) -> list[SaveRun]:
        """Chunks (from 0) of a run that has ended, to be written to other places: ask for those. Their blocks stay."""
        assert run.run_id not in self._runs
        self.counters["saves_repeated"] += len(indexes)
        self._known.add([run.chunk_hashes[i] for i in indexes])
        repeats = []
        for part in _stretches(indexes):
            hashes = run.chunk_hashes[part.start : part.stop]
            repeats.append(self._new_run(run.request_id, run.first_chunk + part.start, hashes, run.block_ids, part))
        return repeats

    def run(self, run_id: int) -> SaveRun:
        """A run that has not ended."""
        return self._runs[run_id]

    def not_stored(self, chunk_hashes: Sequence[bytes]) -> None:
        """The service does not have these chunks (any more): they are worth saving again, unless on their way."""
        self._known.remove(set(chunk_hashes) - self._run_of.keys())

    def save_again_from(self, request_id: str, chunk: int) -> None:
        """A load failed from this chunk on: what is recomputed is worth saving."""
        self._next_chunk[request_id] = min(chunk, self._next_chunk.get(request_id, chunk))

    def forget_known(self) -> None:
        """The pool is another one, or was reset: ask again for everything."""
        self._known.clear()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _unknown_parts(self, hashes: tuple[bytes, ...]) -> list[range]:
        """Stretches of chunks that must be asked about."""
        if not self._known.has_any(hashes):
            return [range(len(hashes))]
        parts = []
        for is_known, group in groupby(range(len(hashes)), key=lambda i: hashes[i] in self._known):
            if not is_known:
                indexes = list(group)
                parts.append(range(indexes[0], indexes[-1] + 1))
        return parts

    def _new_run(
        self, request_id: str, first_chunk: int, hashes: tuple[bytes, ...], block_ids: Sequence[int], part: range
    ) -> SaveRun:
        self._next_id += 1
        per_chunk = self._blocks_per_chunk
        blocks = tuple(block_ids[part.start * per_chunk : part.stop * per_chunk])
        run = SaveRun(self._next_id, request_id, first_chunk, hashes, blocks)
        self._runs[run.run_id] = run
        self._run_of.update(dict.fromkeys(hashes, run.run_id))
        self._pending_count += run.chunk_count
        return run

    def _forget(self, run: SaveRun, indexes: Sequence[int]) -> None:
        if indexes:
            self._known.remove([run.chunk_hashes[i] for i in indexes])

    def _not_on_the_way(self, run: SaveRun, chunk_hashes: Sequence[bytes]) -> None:
        """Not with this run; another one may have taken some of them up since it got no space for them."""
        for chunk_hash in chunk_hashes:
            if self._run_of.get(chunk_hash) == run.run_id:
                del self._run_of[chunk_hash]

    def _end(self, run: SaveRun) -> SaveRun:
        del self._runs[run.run_id]
        self._not_on_the_way(run, run.chunk_hashes)
        self._pending_count -= run.chunk_count
        return run


def _stretches(indexes: Sequence[int]) -> list[range]:
    """Consecutive ones together."""
    parts: list[range] = []
    for index in sorted(indexes):
        if parts and parts[-1].stop == index:
            parts[-1] = range(parts[-1].start, index + 1)
        else:
            parts.append(range(index, index + 1))
    return parts
