"""Planted bugs. Each breaks one rule in the way a mistake would; the simulation must find every one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

from meshfusion.host import pool_client
from meshfusion.host.connector.lookups import Effect, Lookups, ReleaseLease, StartLoad
from meshfusion.host.connector.path_gate import Gate, PathGate
from meshfusion.host.connector.saves import Saves
from meshfusion.host.connector.vllm import save_pipeline, scheduler
from meshfusion.host.connector.vllm.load_pipeline import LoadPipeline
from meshfusion.host.connector.vllm.messages import LoadOrder, LoadReport, RunWritten
from meshfusion.host.connector.vllm.rank_reports import RankReports
from meshfusion.host.connector.vllm.save_pipeline import SavePipeline
from meshfusion.host.connector.vllm.scheduler import SchedulerSide
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, LastWindow
from meshfusion.host.pool_events import StoredBoundary
from meshfusion.host.pool_replies import ReservedRun, reserved


class Mutant(NamedTuple):
    """``target``'s ``attribute`` becomes ``bug``; ``symptoms``: what is seen of it, one of these (a pattern)."""

    target: Any
    attribute: str
    bug: Any
    symptoms: str

    def planted(self) -> AbstractContextManager[Any]:
        return patch.object(self.target, self.attribute, self.bug)


def _short_window(self: LastWindow, boundary_tokens: int) -> int:
    return min(boundary_tokens, max(0, boundary_tokens - self.window_tokens + 1) + 2)


class _AnyBoundary(dict[tuple[int, int], int]):
    def get(self, key: tuple[int, int], default: Any = None) -> Any:
        return next((block_id for (group, _), block_id in self.items() if group == key[0]), default)


_snapshots_of = scheduler.snapshots_of


def _snapshots_of_any(scheduler_output: Any) -> dict[str, Any]:
    return {request_id: _AnyBoundary(kept) for request_id, kept in _snapshots_of(scheduler_output).items()}


_finished = Lookups.finished


def _keeps_lease(self: Lookups, request_id: str) -> list[Effect]:
    return [effect for effect in _finished(self, request_id) if not isinstance(effect, ReleaseLease)]


_allocated = Lookups.allocated


def _releases_early(self: Lookups, request_id: str, external_tokens: int, block_ids: Any) -> list[Effect]:
    effects = _allocated(self, request_id, external_tokens, block_ids)
    lookup = self._lookups.get(request_id)
    return effects + (self._release(lookup) if lookup is not None else [])


_matched = Lookups.matched


def _keeps_orphans(
    self: Lookups, now_s: float, request_id: str, attempt: int, lease_id: str, stored: StoredBoundary
) -> list[Effect]:
    _matched(self, now_s, request_id, attempt, lease_id, stored)
    return []


def _releases_again(self: Lookups, lookup: Any) -> list[Effect]:
    return [ReleaseLease(lookup.lease_id)] if lookup.lease_id else []


def _keeps_pins(self: SavePipeline, run_id: int) -> None:
    self._repeated.discard(run_id)
    self.saves.refused(run_id)


_start = LoadPipeline.start


def _to_other_blocks(self: LoadPipeline, load: StartLoad, *more: Any) -> None:
    _start(self, load, *more)
    order = self._orders.pop()
    self._orders.append(order._replace(block_ids=tuple(block_id + 1 for block_id in order.block_ids)))


def _withheld_alone(bundles: Sequence[int], unit_digests: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i in range(len(bundles)) if any(column[i] is None for column in unit_digests))


_blocks_of = SavePipeline._blocks_of


def _with_nulls(
    self: SavePipeline, plan: GroupPlan, index: int, table: Sequence[Any], snapshots: Mapping[tuple[int, int], int]
) -> list[Any]:
    if plan.is_snapshot:
        return _blocks_of(self, plan, index, table, snapshots)
    kept = plan.kept_blocks(index)
    return list(table[kept.start : kept.stop])


def _keeps_spare(*args: Any) -> ReservedRun:
    return reserved(*args)._replace(spare_grant_ids=())


def _settles_early(self: SavePipeline, now_s: float, results: Sequence[RunWritten]) -> None:
    for result in results:
        if result.run_id in self._granted:
            self._settle(now_s, [result])


_units_of = LoadOrder.units_of


def _units_of_first(self: LoadOrder, form: ChunkForm, rank: int) -> Any:
    return _units_of(self, form, 0)


_pipeline_of = LoadPipeline.__init__


class _FirstReports(RankReports[str, LoadReport]):
    def add(self, order: str, report: LoadReport) -> list[LoadReport] | None:
        return [report]


def _ends_with_first(self: LoadPipeline, client: Any, form: ChunkForm, *more: Any) -> None:
    _pipeline_of(self, client, form, *more)
    vars(self)["_reports"] = _FirstReports(form.rank_count)


def _opens_for_any(self: PathGate, now_s: float) -> Gate:
    return Gate.OPEN if any(state is not None and not state.problem for state in self._states) else Gate.CLOSED


MUTANTS: dict[str, Mutant] = {
    "promises whole prompts to hybrids": Mutant(
        ChunkForm, "may_end_with_prompt", property(lambda self: True), "another boundary|wrong KV read"
    ),
    "takes windows for a block shorter": Mutant(
        LastWindow, "first_token", _short_window, "another boundary|wrong KV read"
    ),
    "saves the state of another boundary": Mutant(
        scheduler, "snapshots_of", _snapshots_of_any, "wrong content was committed"
    ),
    "keeps the lease of an aborted request": Mutant(Lookups, "finished", _keeps_lease, "a lease outlives its request"),
    "keeps the lease of a late answer": Mutant(Lookups, "matched", _keeps_orphans, "a lease outlives its request"),
    "releases the lease when a load begins": Mutant(Lookups, "allocated", _releases_early, "lease of a load under way"),
    "releases leases twice": Mutant(Lookups, "_release", _releases_again, "released twice"),
    "keeps blocks pinned after a refusal": Mutant(SavePipeline, "refused", _keeps_pins, "held in the end"),
    "loads into other blocks": Mutant(LoadPipeline, "start", _to_other_blocks, "ordered to other blocks"),
    "commits a bundle in part": Mutant(save_pipeline, "withheld_of", _withheld_alone, "committed in part"),
    "saves blocks that were given up": Mutant(SavePipeline, "_blocks_of", _with_nulls, "the null block was pinned"),
    "keeps places it will not use": Mutant(pool_client, "reserved", _keeps_spare, "a grant that nobody will use"),
    "never forgets what it stored": Mutant(Saves, "not_stored", lambda self, hashes: None, "a hit is lost"),
    "settles a run when one rank has written": Mutant(
        SavePipeline, "written", _settles_early, "wrong content was committed|not pinned|that is being written"
    ),
    "loads the first rank's shard on all": Mutant(LoadOrder, "units_of", _units_of_first, "wrong KV read"),
    "ends a load when one rank has it": Mutant(LoadPipeline, "__init__", _ends_with_first, "lease of a load under way"),
    "promises what one rank reaches": Mutant(PathGate, "look", _opens_for_any, "not what was promised"),
    "asks for no steps": Mutant(SchedulerSide, "has_work", property(lambda self: False), "held in the end"),
}
