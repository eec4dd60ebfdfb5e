"""A run's way into the pool: its blocks are pinned, places are asked for, a worker writes, the service commits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from meshfusion.dpu.api.tracing import REQUEST_ID, NobodyCollects, Span, Tracer
from meshfusion.host.connector.announcements import Announcements, StoredChunk
from meshfusion.host.connector.observations import Observations
from meshfusion.host.connector.saves import SaveChunk, SaveOptions, SaveRun, Saves
from meshfusion.host.connector.vllm.chunking import Chunking
from meshfusion.host.connector.vllm.messages import RunWritten, SaveOrder, WorkerFacts
from meshfusion.host.connector.vllm.rank_reports import RankReports
from meshfusion.host.connector.vllm.request_trace import trace_of
from meshfusion.host.kv.resume import GroupPlan
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import ALONE, GrantedRun, RankDigests, Reserved, ReserveWish

logger = logging.getLogger("meshfusion.saves")

REPEAT_PATIENCE_S: Final = 10.0
FAILED_RUNS_MAX: Final = 3
"""As many in a row of which nothing was saved, and it is tried less and less often: a place that is asked for is used
up whatever comes of it, and what others have stored goes for it."""
PAUSE_MAX_S: Final = 60.0

Snapshots = Mapping[tuple[int, int], int]
"""States that the engine keeps of a request: KV group and boundary in tokens -> device block."""

Describe = Callable[[Any, GroupPlan, int], StoredChunk]
"""Of a request and a KV group: what is to be announced of one of its chunks."""


class SavePipeline:
    """Lives in the scheduler. Blocks stay pinned (referenced in the engine's block pool) until the fate of the run's
    last write is known, so that the engine cannot give them to another request meanwhile. ``describe``: None when
    nothing is to be announced."""

    def __init__(
        self,
        client: PoolClient,
        facts: WorkerFacts,
        chunking: Chunking,
        kv_cache_manager: Any,
        announcements: Announcements,
        *,
        queue_bytes: int,
        describe: Describe | None = None,
        observations: Observations | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._client = client
        self._chunking = chunking
        self._form = facts.form
        self._manager = kv_cache_manager
        self._announcements = announcements
        self._describe = describe
        self._observations = observations or Observations()
        self._tracer = tracer or NobodyCollects()
        self.saves = Saves(SaveOptions(queue_bytes, facts.block_count), facts.form)
        self._pinned: dict[int, list[Any]] = {}
        self._planned: dict[int, _Planned] = {}  # of each run that is pinned
        self._granted: dict[int, GrantedRun] = {}
        self._reports = RankReports[int, RunWritten](facts.form.rank_count)
        self._orders: list[SaveOrder] = []
        self._repeated: set[int] = set()  # runs that are second attempts: there is no third
        self._repeats: list[_Repeat] = []
        self._failed_runs = 0
        self._pause_until_s = float("-inf")
        self.counters: Counter[str] = Counter()

    def may_ask(self, now_s: float) -> bool:
        """Is there hope that what is asked places for can be written?"""
        return now_s >= self._pause_until_s

    @property
    def pinned_count(self) -> int:
        """Runs whose blocks are pinned."""
        return len(self._pinned)

    def plan(
        self, now_s: float, request: Any, computed_tokens: int, snapshots: Snapshots, identity: bytes
    ) -> list[ReserveWish]:
        """The step now scheduled brings ``request`` to ``computed_tokens`` and leaves ``snapshots``: what to ask places
        for, one wish or none."""
        due = self.saves.due_chunks(request.request_id, computed_tokens)
        if not due:
            return []
        tables = self._manager.get_blocks(request.request_id).blocks
        hashes = self._chunking.chunk_hashes(request, due.start, due.stop)
        considered = self._considered(due, len(hashes), tables)
        chunks: list[SaveChunk] = []
        blocks: dict[tuple[int, int], list[Any]] = {}
        for index, chunk_hash in zip(considered, hashes, strict=False):
            for plan in self._form.plans:
                found = self._blocks_of(plan, index, tables[plan.group], snapshots)
                if found:
                    blocks[plan.group, index] = found
                    told = self._describe(request, plan, index) if self._describe is not None else None
                    chunks.append(SaveChunk(plan.group, index, chunk_hash, tuple(b.block_id for b in found), told))
        run = self.saves.take(request.request_id, considered, chunks)
        if run is None:
            return []
        span = self._tracer.begin("meshfusion.save", trace_of(request), {REQUEST_ID: request.request_id})
        self._planned[run.run_id] = _Planned(now_s, span)
        self._pin(run, [block for chunk in run.chunks for block in blocks[chunk.group, chunk.number]])
        return [self._wish(run, request, identity)]

    def _considered(self, due: range, hash_count: int, tables: Sequence[Sequence[Any]]) -> range:
        """As much of ``due`` as is hashed and in the engine's tables."""
        stop = due.start + hash_count
        for plan in self._form.plans:
            if not plan.is_snapshot:
                stop = min(stop, len(tables[plan.group]) * plan.block_tokens // plan.chunk_tokens)
        return range(due.start, max(due.start, min(due.stop, stop)))

    def _blocks_of(self, plan: GroupPlan, index: int, table: Sequence[Any], snapshots: Snapshots) -> list[Any]:
        """The engine's blocks with what is stored of a chunk; none when it does not have all of them (any more)."""
        if plan.is_snapshot:
            block_id = snapshots.get((plan.group, (index + 1) * plan.chunk_tokens))
            return [] if block_id is None else [self._manager.block_pool.blocks[block_id]]
        kept = plan.kept_blocks(index)
        blocks = list(table[kept.start : kept.stop])
        return [] if any(block.is_null for block in blocks) else blocks

    def _pin(self, run: SaveRun, blocks: list[Any]) -> None:
        self._pinned[run.run_id] = blocks
        self._manager.block_pool.touch(blocks)

    def reserved(self, event: Reserved) -> None:
        """The service answered: what got places goes to the worker, a run that got none is unpinned."""
        run = self.saves.run(event.run_id)
        ended = self.saves.reserved(event.run_id, event.outcomes, event.not_now)
        if ended is not None:
            self._repeated.discard(event.run_id)
            self._unpin(ended)
            return
        assert event.granted is not None, event
        self._announcements.gone(event.granted.keys)  # what gets a new place is not stored any more
        self._granted[event.run_id] = event.granted
        granted = [run.chunks[i] for i in event.granted.indexes]
        self._orders.append(
            SaveOrder(
                run.run_id,
                tuple(chunk.group for chunk in granted),
                tuple(chunk.number for chunk in granted),
                tuple(chunk.block_ids for chunk in granted),
                event.granted,
            )
        )

    def refused(self, run_id: int) -> None:
        """The service could not be asked."""
        self._repeated.discard(run_id)
        self._unpin(self.saves.refused(run_id), error="the service could not be asked")

    def take_orders(self) -> tuple[SaveOrder, ...]:
        """What the worker is to write now."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def written(self, now_s: float, results: tuple[RunWritten, ...]) -> None:
        """Workers have written and flushed, or failed. A run is settled when all ranks have."""
        for result in results:
            assert result.run_id in self._granted, f"a run that is settled: {result}"
            reports = self._reports.add(result.run_id, result)
            if reports is not None:
                self._settle(now_s, reports)

    def _settle(self, now_s: float, reports: Sequence[RunWritten]) -> None:
        """By rank. Unpin, then commit or give the places back.

        What is in doubt keeps its place, and is written once more elsewhere by the next incarnation (rule 3).
        """
        run_id = reports[0].run_id
        trace = self._planned[run_id].span.headers
        granted = self._granted.pop(run_id)
        unit_digests = [report.unit_digests for report in reports]
        assert all(len(column) == len(granted.indexes) for column in unit_digests), (run_id, granted.indexes)
        in_doubt = sorted({i for report in reports for i in report.in_doubt})
        withheld = withheld_of(granted.bundles, unit_digests)
        self._failed_runs = self._failed_runs + 1 if len(withheld) == len(granted.indexes) else 0
        if self._failed_runs >= FAILED_RUNS_MAX:
            self._pause(now_s, min(PAUSE_MAX_S, 2.0 ** min(self._failed_runs - FAILED_RUNS_MAX, 10)))
        if withheld:
            reason = next((report.reason for report in reports if report.reason), "")
            logger.warning("%d chunk(s) were not saved: %s", len(withheld), reason)
        if not withheld:
            self._observations.add("save_seconds", now_s - self._planned[run_id].at_s)
        self._count_saved(self.saves.run(run_id), granted, reports, withheld)
        self.counters["saves_in_doubt"] += len(in_doubt)
        ended = self.saves.written(run_id, [granted.indexes[i] for i in withheld])
        if in_doubt and run_id not in self._repeated:
            self._repeat(now_s, ended, granted, in_doubt)
        else:
            self._repeated.discard(run_id)
            self._unpin(ended, error="some of it was not written" if withheld else "")
        self._announce_soon(now_s, ended, granted, withheld)
        self._client.settle(granted, unit_digests, withheld=withheld, in_doubt=in_doubt, trace=trace)
        if in_doubt:
            logger.warning("writes of %s are in doubt: going on as another, so that it is fenced", granted.holder_id)
            self._client.attach_anew(granted.holder_id)

    def _announce_soon(self, now_s: float, run: SaveRun, granted: GrantedRun, withheld: Sequence[int]) -> None:
        """What the service is now asked to make visible."""
        shown = ((i, run.chunks[index].told) for i, index in enumerate(granted.indexes) if i not in withheld)
        self._announcements.settling(
            now_s, granted.identity, [(granted.keys[i], told) for i, told in shown if told is not None]
        )

    def _pause(self, now_s: float, seconds: float) -> None:
        self._pause_until_s = now_s + seconds
        self.counters["save_pauses"] += 1
        logger.warning("of %d saves in a row nothing could be written: none for %.0f s", self._failed_runs, seconds)

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

    def _count_saved(
        self, run: SaveRun, granted: GrantedRun, reports: Sequence[RunWritten], withheld: Sequence[int]
    ) -> None:
        for report in reports:
            if report.path:
                self.counters[f"save_descriptors_{report.path}"] += report.descriptors
                self.counters[f"save_chunks_{report.path}"] += sum(bool(digests) for digests in report.unit_digests)
            for i, (index, digests) in enumerate(zip(granted.indexes, report.unit_digests, strict=True)):
                written_bytes = self._form.unit_bytes[run.chunks[index].group] * len(digests or ())
                if report.path:
                    self.counters[f"save_bytes_{report.path}"] += written_bytes
                if i not in withheld:
                    self.counters["saved_bytes"] += written_bytes

    def _repeat(self, now_s: float, run: SaveRun, granted: GrantedRun, in_doubt: Sequence[int]) -> None:
        """Those in doubt, and with them those of their bundles: these were given back."""
        bundles = {granted.bundles[i] for i in in_doubt} - {ALONE}
        again = [i for i, bundle in enumerate(granted.bundles) if i in in_doubt or bundle in bundles]
        repeat = self.saves.repeat(run, [granted.indexes[i] for i in again])
        numbers = {granted.indexes[i] for i in again}
        kept: list[Any] = []
        released: list[Any] = []
        blocks = iter(self._pinned.pop(run.run_id))
        for number, chunk in enumerate(run.chunks):
            (kept if number in numbers else released).extend(next(blocks) for _ in chunk.block_ids)
        self._pinned[repeat.run_id] = kept
        self._planned[repeat.run_id] = self._planned.pop(run.run_id)
        self._repeated.add(repeat.run_id)
        keys_of = partial(tuple, [granted.keys[i] for i in again])
        wish = ReserveWish(repeat.run_id, repeat.request_id, granted.identity, *_columns(repeat), keys_of=keys_of)
        self._repeats.append(_Repeat(now_s + REPEAT_PATIENCE_S, granted.holder_id, wish))
        self._manager.block_pool.free_blocks(reversed(released))

    def _wish(self, run: SaveRun, request: Any, identity: bytes) -> ReserveWish:
        keys = self._chunking.keys(request, identity)
        groups, indexes = _columns(run)
        hashes = [chunk.chunk_hash for chunk in run.chunks]
        return ReserveWish(
            run.run_id,
            run.request_id,
            identity,
            groups,
            indexes,
            lambda: keys.of(groups, indexes, hashes),
            self._planned[run.run_id].span.headers,
        )

    def _unpin(self, run: SaveRun, *, error: str = "") -> None:
        """Give the blocks back, the last of a prompt first: its first ones are worth keeping longest."""
        self._planned.pop(run.run_id).span.end({"meshfusion.chunks": run.chunk_count}, error=error)
        self._manager.block_pool.free_blocks(reversed(self._pinned.pop(run.run_id)))


class _Planned(NamedTuple):
    """A run since its blocks are pinned."""

    at_s: float
    span: Span


class _Repeat(NamedTuple):
    """Waits until ``until_s`` for another attachment than that of the writes in doubt."""

    until_s: float
    doubted_holder_id: str
    wish: ReserveWish


def _columns(run: SaveRun) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which chunks they are: groups and indexes."""
    return tuple(chunk.group for chunk in run.chunks), tuple(chunk.number for chunk in run.chunks)


def withheld_of(bundles: Sequence[int], unit_digests: Sequence[RankDigests]) -> tuple[int, ...]:
    """Those of the granted chunks (from 0) that must not become visible: one that some rank did not write, and all of
    a bundle that has such a one (rule 1). ``unit_digests``: of each rank."""
    failed = {i for column in unit_digests if None in column for i, digests in enumerate(column) if digests is None}
    if not failed:
        return ()
    broken = {bundles[i] for i in failed} - {ALONE}
    return tuple(i for i, bundle in enumerate(bundles) if i in failed or bundle in broken)
