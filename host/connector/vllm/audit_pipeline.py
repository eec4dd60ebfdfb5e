"""An audit's way to the workers and back: blocks of both kinds held, compared, given back, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from meshfusion.dpu.api.types import Extent
from meshfusion.host.connector.audits import AuditOptions, Audits, Verdict
from meshfusion.host.connector.vllm.messages import AuditOrder, AuditReport
from meshfusion.host.connector.vllm.rank_reports import RankReports
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import StoredBoundary, StoredGroup

logger = logging.getLogger("meshfusion.audit")

BLOCKS_MAX: Final = 16
"""Of an audit, over all KV groups: as many are lent by the engine meanwhile, and read."""
FREE_PARTS: Final = 4
"""Unless that many times as many blocks are free, the engine needs them more."""
ABANDON_AFTER_S: Final = 30.0


class _Unit(NamedTuple):
    """A block to be compared: its number in its KV group, counted from the start of the request. ``lbas`` and
    ``digests``: of each shard."""

    group: int
    number: int
    block: Any
    lbas: tuple[int, ...]
    digests: tuple[bytes, ...]
    key: bytes
    extent: Extent


class _Held(NamedTuple):
    units: tuple[_Unit, ...]
    spares: list[Any]


class AuditPipeline:
    """Lives in the scheduler. ``free_lookup(request_id)``: its audit has ended, and its lease may go."""

    def __init__(
        self,
        client: PoolClient,
        form: ChunkForm,
        kv_cache_manager: Any,
        options: AuditOptions,
        *,
        draw: Callable[[], float],
        free_lookup: Callable[[str], None],
    ) -> None:
        self._client = client
        self._form = form
        self._manager = kv_cache_manager
        self._free_lookup = free_lookup
        self.audits = Audits(options, draw)
        self._held: dict[int, _Held] = {}
        self._reports = RankReports[int, AuditReport](form.rank_count)
        self._orders: list[AuditOrder] = []
        self._next_id = 0

    def computed(self, request: Any, computed_tokens: int, snapshots: Mapping[tuple[int, int], int]) -> None:
        """The step now scheduled brings ``request`` to ``computed_tokens`` and leaves ``snapshots``: if its audit waits
        for that, hand it to the workers."""
        due = self.audits.due(request.request_id, computed_tokens, self._form.chunk_tokens)
        if due is None:
            return
        units = self._units(request.request_id, *due, snapshots)
        pool = self._manager.block_pool
        if not units or pool.get_num_free_blocks() < FREE_PARTS * len(units):
            self.give_up(request.request_id)
            return
        pool.touch([unit.block for unit in units])
        spares = pool.get_new_blocks(len(units))
        self._next_id += 1
        self._held[self._next_id] = _Held(units, spares)
        self._orders.append(
            AuditOrder(
                self._next_id,
                tuple(unit.group for unit in units),
                tuple(unit.lbas for unit in units),
                tuple(unit.block.block_id for unit in units),
                tuple(spare.block_id for spare in spares),
                tuple(unit.digests for unit in units),
                ABANDON_AFTER_S,
            )
        )
        self.audits.compared()

    def take_orders(self) -> tuple[AuditOrder, ...]:
        """What the workers are to compare now."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def reported(self, reports: Sequence[AuditReport], identity: bytes) -> None:
        """Of ranks that are done. An audit ends when all are, and comes to nothing when it did on one of them."""
        for report in reports:
            assert report.audit_id in self._held, f"an audit that has ended: {report}"
            of_ranks = self._reports.add(report.audit_id, report)
            if of_ranks is not None:
                self._end(report.audit_id, of_ranks, identity)

    def _end(self, audit_id: int, reports: Sequence[AuditReport], identity: bytes) -> None:
        units, spares = self._held.pop(audit_id)
        self._manager.block_pool.free_blocks([unit.block for unit in units] + spares)
        reason = next((report.reason for report in reports if report.reason), "")
        if reason:
            logger.info("an audit came to nothing: %s", reason)
        drifts = [] if reason else [drift for report in reports for drift in report.drifts]
        verdict = self.audits.reported(drifts, max(report.variation for report in reports))
        self._free_lookup(verdict.request_id)
        self._follow(verdict, units, identity)

    def give_up(self, request_id: str) -> None:
        if self.audits.give_up(request_id):
            self._free_lookup(request_id)

    def give_up_late(self, now_s: float) -> None:
        late = self.audits.late(now_s)
        if late is not None:
            self.give_up(late)

    def reset(self) -> None:
        """See :meth:`~meshfusion.host.connector.audits.Audits.void`."""
        waiting = self.audits.void()
        if waiting is not None:
            self.give_up(waiting)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _units(
        self, request_id: str, local_tokens: int, stored: StoredBoundary, snapshots: Mapping[tuple[int, int], int]
    ) -> tuple[_Unit, ...]:
        """What of the request is both stored and just computed: a choice from every KV group.

        The same ones each time, those with the least digests, so that a prefix that is audited again shows how much the
        engine varies. Digests are spread evenly, whatever they are of.
        """
        tables = self._manager.get_blocks(request_id).blocks
        per_group = max(1, BLOCKS_MAX // len(self._form.plans))
        chosen: list[_Unit] = []
        for plan, group in zip(self._form.plans, stored.groups, strict=True):
            units = self._group_units(plan, group, tables[plan.group], local_tokens, stored, snapshots)
            chosen += sorted(sorted(units, key=lambda unit: unit.digests)[:per_group], key=lambda unit: unit.number)
        return tuple(chosen)

    def _group_units(
        self,
        plan: GroupPlan,
        group: StoredGroup,
        table: Sequence[Any],
        local_tokens: int,
        stored: StoredBoundary,
        snapshots: Mapping[tuple[int, int], int],
    ) -> list[_Unit]:
        per_chunk = plan.chunk_tokens // plan.block_tokens
        units = []
        for number in plan.needed_blocks(stored.chunk_count):
            if number * plan.block_tokens < local_tokens:
                continue  # from the engine's own cache, to which it may have come from the pool
            if plan.is_snapshot:
                state = snapshots.get((plan.group, (number + 1) * plan.block_tokens))
                block = None if state is None else self._manager.block_pool.blocks[state]
            else:
                block = table[number] if number < len(table) else None
            if block is None or block.is_null:
                continue
            unit, chunk = number - group.first_block, number // per_chunk - group.first_chunk
            units.append(
                _Unit(
                    plan.group,
                    number,
                    block,
                    tuple(column[unit] for column in group.unit_lbas),
                    tuple(column[unit] for column in group.unit_digests),
                    group.keys[chunk],
                    group.extents[chunk],
                )
            )
        return units

    def _follow(self, verdict: Verdict, units: tuple[_Unit, ...], identity: bytes) -> None:
        if verdict.alarms:
            reason = self._alarm(verdict, units, identity)
            # Which of the two is wrong is not known; nobody shall load it meanwhile.
            for key, extent in {units[drift.unit].key: units[drift.unit].extent for drift, _ in verdict.alarms}.items():
                self._client.drop(key, extent, reason)
        if verdict.is_last_straw:
            logger.error(
                "after that many alarms this engine serves nothing from the pool any more and saves nothing, until it "
                "is started anew (identity %s): compare its configuration with that of the engines that saved, and run "
                "`mfctl verify` with it",
                identity.hex(),
            )

    def _alarm(self, verdict: Verdict, units: tuple[_Unit, ...], identity: bytes) -> str:
        """Tell of the block that stands out most."""
        drift, allowed = max(verdict.alarms, key=lambda alarm: alarm[0].difference / alarm[1])
        unit = units[drift.unit]
        block_tokens = self._form.plans[unit.group].block_tokens
        first = unit.number * block_tokens
        on_rank = f" on rank {drift.rank}" if self._form.rank_count > 1 else ""
        reason = (
            f"audit: tokens {first} to {first + block_tokens} in layer {drift.layer}{on_rank} differ by "
            f"{drift.difference:.3g} of the largest number there from what was computed anew, {allowed:.3g} is allowed"
        )
        logger.error(
            "%s (%d of %d blocks; KV group %d, request %s, chunk %s, identity %s)",
            reason,
            len({alarm.unit for alarm, _ in verdict.alarms}),
            len(units),
            unit.group,
            verdict.request_id,
            unit.key.hex(),
            identity.hex(),
        )
        return reason
