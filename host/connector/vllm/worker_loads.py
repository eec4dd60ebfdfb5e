"""A worker's loads: ordered, waiting for a path or under way, and reported once. No clock: time is an argument."""

from __future__ import annotations

import logging
from typing import NamedTuple

from meshfusion.host.connector.vllm.messages import LoadOrder, LoadReport
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, LoadResult, UnitFailure, UnitRead

logger = logging.getLogger("meshfusion.worker")


class WorkerLoads:
    """Of the worker ``rank``; each order is its rank's part of a load. ``now_s`` is always of the same clock."""

    def __init__(self, form: ChunkForm, rank: int) -> None:
        self._form = form
        self._rank = rank
        self._jobs: dict[str, tuple[LoadOrder, LoadJob | LoadResult]] = {}
        self._waiting: dict[str, _WaitingLoad] = {}  # for the path that is being opened
        self._reports: list[LoadReport] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def start(self, order: LoadOrder, path: DataPath | None) -> None:
        """Over ``path``; it fails without one."""
        self._start(order, path, order.abandon_after_s)

    def wait(self, order: LoadOrder, now_s: float) -> None:
        """For the path that is being opened."""
        self._refuse_second(order)
        self._waiting[order.request_id] = _WaitingLoad(order, now_s + order.abandon_after_s)

    def path_decided(self, path: DataPath | None, now_s: float) -> None:
        """The path that was being opened is open, or cannot be: then there may be a former one, or none."""
        waiting, self._waiting = self._waiting, {}
        for load in waiting.values():
            self._start(load.order, path, load.deadline_s - now_s)

    def give_up_late(self, now_s: float) -> None:
        """A path is not waited for longer than the load may take."""
        for load in [load for load in self._waiting.values() if load.deadline_s <= now_s]:
            del self._waiting[load.order.request_id]
            self._fail(load.order, "abandoned: the path to the pool was not open in time")

    def abandon_all(self, reason: str) -> None:
        for _, job in self._jobs.values():
            if isinstance(job, LoadJob):
                job.abandon(reason)

    # ---- what came of them ---------------------------------------------------------------------------------------

    def take_finished(self, now_s: float) -> set[str]:
        """Requests whose load has ended, well or not; each is returned exactly once."""
        finished: set[str] = set()
        for request_id, (order, job) in list(self._jobs.items()):
            result = job.result(now_s) if isinstance(job, LoadJob) else job
            if result is None:
                continue
            del self._jobs[request_id]
            finished.add(request_id)
            report = LoadReport(
                request_id,
                result.load_bytes,
                result.seconds,
                result.failures,
                order.refusal,
                result.path,
                result.descriptors,
                self._rank,
            )
            self._reports.append(report)
            if not report.is_whole:
                self._failed(order, report)
        return finished

    def take_reports(self) -> tuple[LoadReport, ...]:
        """Of those that were taken as finished."""
        reports, self._reports = tuple(self._reports), []
        return reports

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Of those whose loads have ended, the ones of which nothing may be used."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    # ---- inside --------------------------------------------------------------------------------------------------

    def _start(self, order: LoadOrder, path: DataPath | None, abandon_after_s: float) -> None:
        self._refuse_second(order)
        if path is None:
            self._fail(order, "no pool attached")
            return
        if order.refusal:
            self._jobs[order.request_id] = (order, LoadResult(0, 0.0, ()))
            return
        units = [
            UnitRead(lba, self._form.unit_bytes[group], block_id, digest, group)
            for group, lba, block_id, digest in order.units_of(self._form, self._rank)
        ]
        self._jobs[order.request_id] = (order, path.load(units, abandon_after_s=abandon_after_s))

    def _refuse_second(self, order: LoadOrder) -> None:
        is_known = order.request_id in self._jobs or order.request_id in self._waiting
        assert not is_known, f"{order.request_id} is being loaded already"

    def _fail(self, order: LoadOrder, reason: str) -> None:
        failures = tuple(UnitFailure(i, False, reason, True) for i in range(len(order.block_ids)))
        self._jobs[order.request_id] = (order, LoadResult(0, 0.0, failures))

    def _failed(self, order: LoadOrder, report: LoadReport) -> None:
        """The engine recomputes from the first failed block on, or all that was to be loaded."""
        if self._form.may_load_in_part and not report.refusal:
            self._failed_blocks.update(order.block_ids[failure.index] for failure in report.failures)
        else:
            self._failed_requests.add(order.request_id)
        first = min(report.failures, key=lambda failure: failure.index, default=None)
        logger.warning(
            "%s: %d of %d blocks did not load and are recomputed, the first because: %s",
            order.request_id,
            len(report.failures),
            len(order.block_ids),
            first.reason if first is not None else report.refusal,
        )


class _WaitingLoad(NamedTuple):
    order: LoadOrder
    deadline_s: float
