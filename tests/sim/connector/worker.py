"""The workers' half as the scheduler's half meets it: orders come in, after some steps each is reported, once.

Units move one by one, so that whatever the engine does to their blocks meanwhile is seen.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from meshfusion.host.connector.path_gate import PathState
from meshfusion.host.connector.vllm.messages import LoadOrder, LoadReport, RunWritten, SaveOrder, StepOrders, StepReport
from meshfusion.host.connector.vllm.run_writes import RunWrites
from meshfusion.host.path.load_job import UnitFailure
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from tests.sim.connector.blocks import Block, must
from tests.sim.connector.kv_manager import KvManager
from tests.sim.connector.requests import Status
from tests.sim.connector.service import SimService
from tests.sim.connector.shapes import UNIT_BYTES, Kind, Shape

POOL: Final = b"p" * 16


class StepResult(NamedTuple):
    """What the engine is told at the end of a step."""

    report: StepReport | None
    finished: set[str]
    failed_requests: set[str]
    failed_blocks: set[int]


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    units: tuple[tuple[int, int, int, bytes], ...]
    done: int = 0
    failures: list[UnitFailure] = field(default_factory=list)


@dataclass(slots=True)
class _Save:
    """``writes``: what is left to do."""

    run: RunWrites
    writes: list[ShardWrite]


@dataclass(slots=True)
class Faults:
    """Chances, for each unit or chunk."""

    unreadable: float = 0.0
    unwritable: float = 0.0
    doubtful: float = 0.0
    no_path: float = 0.0


class SimWorker:
    def __init__(
        self, rng: random.Random, shape: Shape, kv: KvManager, service: SimService, seen: Counter[str], rank: int
    ) -> None:
        self.rank = rank
        self.rng = rng
        self.shape = shape
        self.kv = kv
        self.service = service
        self.seen = seen
        self.faults = Faults()
        self.loads: dict[str, _Load] = {}
        self.saves: list[_Save] = []
        self._holder_id = ""
        self._next_holder_id = ""
        self._opening_steps = 0
        self._is_path_told = True
        self._path_problem = ""

    @property
    def is_idle(self) -> bool:
        return not self.loads and not self.saves and self._is_path_told

    # ---- orders --------------------------------------------------------------------------------------------------

    def receive(self, orders: StepOrders) -> None:
        if orders.attachment is not None:
            self._next_holder_id = orders.attachment.holder_id
        self._take_up_attachment()
        for order in orders.loads:
            must(order.request_id not in self.loads, "a load was ordered twice", order.request_id)
            self._check_order(order)
            self.loads[order.request_id] = _Load(order, tuple(order.units_of(self.shape.form, self.rank)))
        for save in orders.saves:
            run = RunWrites(save, self.shape.form, self.rank)
            self.saves.append(_Save(run, run.shard_writes(POOL)))
            self.service.writing.update(save.granted.grant_ids)

    def _check_order(self, order: LoadOrder) -> None:
        """It asks for just the blocks that the engine took for it."""
        request = self.kv.requests[order.request_id]
        must(request.status is Status.LOADING, "a load was ordered of a request that waits for none", order)
        if order.refusal:
            return
        wanted = [
            block.block_id
            for group, table in zip(self.shape.groups, request.tables, strict=True)
            for block in table[request.local_tokens // group.block_tokens :]
            if not block.is_null
        ]
        must(list(order.block_ids) == wanted, "a load was ordered to other blocks", order.block_ids, wanted)

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Some of what is to do is done."""
        failed_requests: set[str] = set()
        failed_blocks: set[int] = set()
        path = self._tend_path()
        reports = []
        for load in list(self.loads.values()):
            if self._advance_load(load):
                del self.loads[load.order.request_id]
                reports.append(self._report(load, failed_requests, failed_blocks))
        written = []
        for save in self.saves[:]:
            result = self._advance_save(save)
            if result is not None:
                self.saves.remove(save)
                self.service.writing.subtract(save.run.order.granted.grant_ids)
                written.append(result)
        paths = () if path is None else (path,)
        report = StepReport(tuple(written), tuple(reports), paths) if written or reports or path else None
        return StepResult(report, {r.request_id for r in reports}, failed_requests, failed_blocks)

    def _take_up_attachment(self) -> None:
        """When nothing is written under the former one."""
        if self._holder_id != self._next_holder_id and not self._is_writing():
            self._holder_id = self._next_holder_id
            self._opening_steps = self.rng.choice((0, 0, 1, 3))
            self._is_path_told = False

    def _tend_path(self) -> PathState | None:
        """Connecting takes its time."""
        self._take_up_attachment()
        if self._opening_steps:
            self._opening_steps -= 1
        elif not self._is_path_told:
            self._is_path_told = True
            self._path_problem = "no way" if self.rng.random() < self.faults.no_path else ""
            return PathState(self._holder_id, self._path_problem, self.rank)
        elif self._path_problem and (not self.faults.no_path or self.rng.random() < 0.5):  # a calm world has its paths
            self._path_problem = ""
            return PathState(self._holder_id, rank=self.rank)
        return None

    def _is_writing(self) -> bool:
        return any(save.run.order.granted.holder_id == self._holder_id for save in self.saves)

    # ---- loads ---------------------------------------------------------------------------------------------------

    def _advance_load(self, load: _Load) -> bool:
        """True: it has ended, well or not."""
        if load.order.refusal:
            self.seen["loads refused"] += 1
            return True
        count = len(load.units)
        for _ in range(self.rng.choice((0, 1, 2, count, count))):
            if load.done == count:
                break
            self._load_unit(load, load.done)
            load.done += 1
        return load.done == count

    def _load_unit(self, load: _Load, unit: int) -> None:
        group, lba, block_id, digest = load.units[unit]
        block = self._target(load, group, block_id)
        if self._path_problem or self.rng.random() < self.faults.unreadable:
            load.failures.append(UnitFailure(unit, False, "unreadable"))
            return
        content: Any = self.service.medium.units.get(lba)
        block.slots[self.rank][: len(content)] = content
        if content != digest:
            load.failures.append(UnitFailure(unit, True, "other bytes"))
            self.seen["mismatches"] += 1

    def _target(self, load: _Load, group: int, block_id: int) -> Block:
        """Where a unit goes is its request's alone, until it was reported."""
        request = self.kv.requests.get(load.order.request_id)
        must(request is not None, "a load outlived its request", load.order.request_id)
        assert request is not None
        block = self.kv.block_pool.blocks[block_id]
        must(not block.is_null, "a unit was loaded into the null block", load.order.request_id)
        must(block in request.tables[group], "a unit was loaded into a block of others", block.block_id)
        must(block.ref_cnt == 1, "a unit was loaded into a block that others hold", block.block_id)
        must(block.cached_as is None, "a unit was loaded into a block that can be found", block.block_id)
        return block

    def _report(self, load: _Load, failed_requests: set[str], failed_blocks: set[int]) -> LoadReport:
        order = load.order
        load_bytes = UNIT_BYTES * len(order.block_ids)
        report = LoadReport(order.request_id, load_bytes, 0.001, tuple(load.failures), order.refusal, rank=self.rank)
        if not report.is_whole:
            self.seen["load failures"] += 1
            if self.can_fail_by_block and not report.refusal:
                failed_blocks.update(order.block_ids[failure.index] for failure in load.failures)
            else:
                failed_requests.add(order.request_id)
        return report

    @property
    def can_fail_by_block(self) -> bool:
        """The engine goes on at the first block that failed. Only where it has all that lies before."""
        return [group.kind for group in self.shape.groups] == [Kind.WHOLE]

    # ---- saves ---------------------------------------------------------------------------------------------------

    def _advance_save(self, save: _Save) -> RunWritten | None:
        """The result when it has ended."""
        holder_id = save.run.order.granted.holder_id
        if save.run.is_empty:
            return save.run.not_begun()
        if holder_id != self._holder_id:
            if holder_id == self._next_holder_id:
                return None
            self.seen["saves refused by the worker"] += 1
            return save.run.not_begun("another holder's")
        if self._opening_steps or not self._is_path_told:
            return None
        result = None
        count = len(save.writes)
        for _ in range(self.rng.choice((0, 1, count, count))):
            if save.writes:
                result = save.run.written(self._save_shard(save.run.order, save.writes.pop(0)), "simulated")
        if result is not None:
            self.seen["saves"] += 1
        return result

    def _save_shard(self, order: SaveOrder, write: ShardWrite) -> ShardWritten:
        number, header = write.save_id[1], write.header
        group = self.shape.groups[header.group]
        slots = 1 if group.kind is Kind.STATE else group.block_tokens
        units: Any = tuple(tuple(self._source(block_id).slots[self.rank][:slots]) for block_id in write.block_ids)
        chance = self.rng.random()
        if chance < self.faults.doubtful:
            self.service.doubtful.add(order.granted.grant_ids[number])
            self.seen["writes in doubt"] += 1
            return ShardWritten(write.save_id, None, "no answer", WriteFate.UNKNOWN)
        if chance < self.faults.doubtful + self.faults.unwritable or not self.service.is_known(order.granted.holder_id):
            self.seen["failed writes"] += 1
            return ShardWritten(write.save_id, None, "it failed", WriteFate.FAILED)
        self.service.medium.write(write.extent, units)
        return ShardWritten(write.save_id, units)

    def _source(self, block_id: int) -> Block:
        """What is written is pinned: nobody else's, and not to be computed over."""
        block = self.kv.block_pool.blocks[block_id]
        must(not block.is_null, "the null block was saved")
        must(block.pin_count > 0, "a block was saved that is not pinned", block_id)
        return block


class SimWorkers:
    """One for each rank. What they tell is put together as vLLM does (``KVOutputAggregator``): a load has ended when it
    has on all of them, and has failed when it did on one."""

    def __init__(
        self, rng: random.Random, shape: Shape, kv: KvManager, service: SimService, seen: Counter[str]
    ) -> None:
        self.workers = [SimWorker(rng, shape, kv, service, seen, rank) for rank in range(shape.rank_count)]
        self._ended: Counter[str] = Counter()
        self._failed: set[str] = set()

    def set_faults(self, faults: Faults) -> None:
        for worker in self.workers:
            worker.faults = faults

    @property
    def is_idle(self) -> bool:
        return all(worker.is_idle for worker in self.workers)

    def receive(self, orders: StepOrders) -> None:
        for worker in self.workers:
            worker.receive(orders)

    def has_load(self, request_id: str) -> bool:
        return any(request_id in worker.loads for worker in self.workers)

    def step(self) -> StepResult:
        results = [worker.step() for worker in self.workers]
        report: Any = None
        finished: set[str] = set()
        for result in results:
            if report is None:
                report = result.report
            elif result.report is not None:
                report = report.aggregate(result.report)
            for request_id in result.finished:
                self._ended[request_id] += 1
                if self._ended[request_id] == len(self.workers):
                    del self._ended[request_id]
                    finished.add(request_id)
            self._failed |= result.failed_requests
        failed = self._failed & finished
        self._failed -= failed
        return StepResult(report, finished, failed, set().union(*(result.failed_blocks for result in results)))
