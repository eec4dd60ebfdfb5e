"""Which chunks to save, and what becomes of them: asked for, granted, written. No I/O, no clock.

The unit here is a *run*: the chunks of one request, of all KV groups, that one step completed. What a scheduling pass
costs then grows with the requests it touches and hardly with the chunks they fill. A run pins the engine's blocks from
the step that fills them until the fate of its last write is known, so the queue is bounded. What does not fit is tried
again in later steps while its request lives, in order, since a chunk behind a hole is of no use; what is left when the
request ends is dropped and counted. The engine never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.dpu.api.limits import MAX_ITEMS
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.host.connector.announcements import StoredChunk
from meshfusion.host.kv.chunk_form import ChunkForm

KNOWN_CHUNKS_MAX = 100_000


class SaveChunk(NamedTuple):
    """A chunk worth saving: ``number`` in its KV group, from the start of the request.

    ``chunk_hash``: the engine's hash of the last block that it covers (it stands for everything before it, and for the
    name of the adapter). ``block_ids``: the device blocks that hold what is stored of it, in order. ``told``: what is
    announced once it is visible, if anything.
    """

    group: int
    number: int
    chunk_hash: bytes
    block_ids: tuple[int, ...]
    told: StoredChunk | None = None

    @property
    def name(self) -> bytes:
        return chunk_name(self.group, self.chunk_hash)


def chunk_name(group: int, chunk_hash: bytes) -> bytes:
    """What a chunk is remembered by. The same tokens have a chunk in every group."""
    return chunk_hash + group.to_bytes(2, "little") if group else chunk_hash


class SaveRun(NamedTuple):
    """Chunks of one request on their way to the pool, in the order of their numbers; their blocks are pinned."""

    run_id: int
    request_id: str
    chunks: tuple[SaveChunk, ...]

    @property
    def chunk_count(self) -> int:
        return len(self.chunks)

    @property
    def block_count(self) -> int:
        return sum(len(chunk.block_ids) for chunk in self.chunks)

    @property
    def names(self) -> list[bytes]:
        return [chunk.name for chunk in self.chunks]


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """``queue_bytes``: engine memory that saves may keep pinned; never more than a quarter of ``block_count``, the
    blocks of the engine."""

    queue_bytes: int
    block_count: int


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

    def __init__(self, options: SaveOptions, form: ChunkForm) -> None:
        self._chunk_tokens = form.chunk_tokens
        self._group_count = len(form.plans)
        # A row is what one index has in all groups: at most this many blocks and bytes are pinned for it.
        self._row_blocks = sum(plan.kept_blocks_max for plan in form.plans)
        row_bytes = sum(p.kept_blocks_max * unit for p, unit in zip(form.plans, form.unit_bytes, strict=True))
        rows = min(options.queue_bytes // row_bytes, options.block_count // 4 // self._row_blocks)
        self._pending_blocks_max = max(1, rows) * self._row_blocks
        self._rows_at_once = max(1, MAX_ITEMS // self._group_count)  # the service takes no more in one request
        self._next_chunk: dict[str, int] = {}
        self._complete: dict[str, int] = {}  # chunks computed so far, of requests that had some to consider
        self._runs: dict[int, SaveRun] = {}
        self._writing: dict[int, int] = {}  # run id -> chunks that a worker may be writing
        self._run_of: dict[bytes, int] = {}  # chunks that are on their way, by name
        self._pending_count = 0
        self._pending_blocks = 0
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
        """What is worth storing of this request's first ``stored_chunk_count`` chunks came from, or is in, the pool."""
        self._next_chunk[request_id] = max(self._next_chunk.get(request_id, 0), stored_chunk_count)

    def due_chunks(self, request_id: str, computed_tokens: int) -> range:
        """Indexes of the chunks to consider when the step now scheduled brings the request to ``computed_tokens``, as
        far as there is room. Cheap: asked for every request of every step."""
        complete = computed_tokens // self._chunk_tokens
        first = self._next_chunk.get(request_id, 0)
        if complete <= first:
            return range(0)
        self._complete[request_id] = complete
        free_rows = (self._pending_blocks_max - self._pending_blocks) // self._row_blocks
        return range(first, min(complete, first + min(free_rows, self._rows_at_once)))

    def take(self, request_id: str, considered: range, chunks: Sequence[SaveChunk]) -> SaveRun | None:
        """The run to ask places for, if any of ``chunks`` is worth asking about: those that the engine has, of the
        indexes ``considered``, the first of which are all that were due. The others will not be considered again."""
        if not considered:
            return None
        assert considered.start == self._next_chunk.get(request_id, 0), (request_id, considered)
        self._next_chunk[request_id] = considered.stop
        names = [chunk.name for chunk in chunks]
        if self._known.has_any(names):
            chunks = [chunk for chunk, name in zip(chunks, names, strict=True) if name not in self._known]
        self._known.add(names)
        self.counters["saves_asked"] += len(chunks)
        return self._new_run(request_id, tuple(chunks)) if chunks else None

    def forget_request(self, request_id: str) -> None:
        """Finished; its pending saves go on, since their blocks are pinned."""
        considered = self._next_chunk.pop(request_id, 0)
        complete = self._complete.pop(request_id, 0)
        self.counters["saves_dropped_queue_full"] += max(0, complete - considered)

    def reserved(self, run_id: int, outcomes: Mapping[ReserveOutcome, int], not_now: Sequence[int]) -> SaveRun | None:
        """The service answered for a run; ``not_now``: which of its chunks got no place, for want of space or of worth,
        or would have become visible only together with one that got none, counted from 0.

        Returns the run when it has ended (nothing was granted): unpin its blocks. None: hand it to the worker.
        """
        run = self._runs[run_id]
        assert sum(outcomes.values()) == run.chunk_count, (run_id, outcomes)
        for outcome, count in outcomes.items():
            self.counters[f"reserve_{outcome.value}"] += count
        self._forget(run, not_now)
        self._not_on_the_way(run, [run.chunks[i].name for i in not_now])
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

    def repeat(self, run: SaveRun, numbers: Sequence[int]) -> SaveRun:
        """Chunks ``numbers`` (from 0) of a run that has ended, to be written to other places: ask for those. Their
        blocks stay."""
        assert run.run_id not in self._runs
        self.counters["saves_repeated"] += len(numbers)
        chunks = tuple(run.chunks[i] for i in numbers)
        self._known.add([chunk.name for chunk in chunks])
        return self._new_run(run.request_id, chunks)

    def run(self, run_id: int) -> SaveRun:
        """A run that has not ended."""
        return self._runs[run_id]

    def not_stored(self, chunk_hashes: Sequence[bytes]) -> None:
        """The service does not have these chunks (any more), in one group or another: they are worth saving again,
        unless on their way."""
        names = {chunk_name(group, chunk_hash) for group in range(self._group_count) for chunk_hash in chunk_hashes}
        self._known.remove(names - self._run_of.keys())

    def save_again_from(self, request_id: str, chunk: int) -> None:
        """A load failed from this chunk on: what is recomputed is worth saving."""
        self._next_chunk[request_id] = min(chunk, self._next_chunk.get(request_id, chunk))

    def forget_known(self) -> None:
        """The pool is another one, or was reset: ask again for everything."""
        self._known.clear()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _new_run(self, request_id: str, chunks: tuple[SaveChunk, ...]) -> SaveRun:
        self._next_id += 1
        run = SaveRun(self._next_id, request_id, chunks)
        self._runs[run.run_id] = run
        self._run_of.update(dict.fromkeys(run.names, run.run_id))
        self._pending_count += run.chunk_count
        self._pending_blocks += run.block_count
        return run

    def _forget(self, run: SaveRun, indexes: Sequence[int]) -> None:
        if indexes:
            self._known.remove([run.chunks[i].name for i in indexes])

    def _not_on_the_way(self, run: SaveRun, names: Sequence[bytes]) -> None:
        """Not with this run; another one may have taken some of them up since it got no space for them."""
        for name in names:
            if self._run_of.get(name) == run.run_id:
                del self._run_of[name]

    def _end(self, run: SaveRun) -> SaveRun:
        del self._runs[run.run_id]
        self._not_on_the_way(run, run.names)
        self._pending_count -= run.chunk_count
        self._pending_blocks -= run.block_count
        return run
