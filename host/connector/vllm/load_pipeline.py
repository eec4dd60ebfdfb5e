"""A load's way to the workers and back: ordered, carried out, reported, and what failed of it found in the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshfusion.dpu.api.tracing import NO_HEADERS, REQUEST_ID, Headers, NobodyCollects, Span, Tracer
from meshfusion.host.connector.estimate import EstimateOptions, LoadEstimate
from meshfusion.host.connector.load_parts import LoadPart
from meshfusion.host.connector.lookups import StartLoad
from meshfusion.host.connector.observations import Observations
from meshfusion.host.connector.read_failures import ReadFailures
from meshfusion.host.connector.vllm.messages import LoadOrder, LoadReport
from meshfusion.host.connector.vllm.rank_reports import RankReports
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.path.load_job import UnitFailure
from meshfusion.host.pool_client import PoolClient


class _Place(NamedTuple):
    """A chunk of a request: ``number`` in its KV group."""

    group: int
    number: int


class LoadEnd(NamedTuple):
    """``first_failed``: the first chunk of the request that did not come to all ranks, from which on it is recomputed;
    None: all came."""

    first_failed: int | None


class LoadPipeline:
    """Lives in the scheduler. ``observations``: where the time of each load goes; ``tracer``: who collects its span."""

    def __init__(
        self,
        client: PoolClient,
        form: ChunkForm,
        observations: Observations | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._client = client
        self._form = form
        self._observations = observations or Observations()
        self._tracer = tracer or NobodyCollects()
        self._spans: dict[str, Span] = {}
        self._loads: dict[str, StartLoad] = {}
        self._reports = RankReports[str, LoadReport](form.rank_count)
        self._orders: list[LoadOrder] = []
        self._read_failures = ReadFailures()
        self.estimate = LoadEstimate(EstimateOptions())
        self.counters: Counter[str] = Counter()

    @property
    def under_way(self) -> frozenset[str]:
        """Requests whose load has not been reported."""
        return frozenset(self._loads)

    def start(self, load: StartLoad, trace: Headers = NO_HEADERS) -> None:
        """``trace``: what it belongs to."""
        self._loads[load.request_id] = load
        self._spans[load.request_id] = self._tracer.begin("meshfusion.load", trace, {REQUEST_ID: load.request_id})
        self._orders.append(
            LoadOrder(
                load.request_id,
                tuple(block_id for part in load.parts for block_id in part.block_ids),
                tuple(part.lbas for part in load.parts),
                tuple(part.digests for part in load.parts),
                self.estimate.abandon_after_s(load.load_bytes),
                load.refusal,
            )
        )

    def take_orders(self) -> tuple[LoadOrder, ...]:
        """What the workers are to load now."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def reported(self, report: LoadReport) -> LoadEnd | None:
        """One rank is done with a load. What came of it, once all are."""
        load = self._loads.get(report.request_id)
        if load is None:
            return None
        reports = self._reports.add(report.request_id, report)
        if reports is None:
            return None
        failures = [failure for one in reports for failure in one.failures]
        seconds = max(one.seconds for one in reports)
        self._count(load, failures, seconds)
        self._count_tokens(load, failures)
        self._observations.add("load_seconds", seconds)
        failed = self._failed_chunks(load, failures)
        self._note(load, failed)
        if all(one.is_whole for one in reports):
            self._count_descriptors(load, reports)
            self.estimate.observe_load(load.load_bytes, seconds)
            return LoadEnd(None)
        return LoadEnd(min((place.number for place in failed), default=0))

    def end(self, request_id: str, *, failed: bool = False) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None:
            attributes = {"meshfusion.tokens": len(load.tokens), "meshfusion.bytes": load.load_bytes}
            self._spans.pop(request_id).end(attributes, error="some of it did not come" if failed else "")
        self._reports.forget(request_id)

    def _count(self, load: StartLoad, failures: Sequence[UnitFailure], seconds: float) -> None:
        """Bytes are those of all ranks. A block is there when every rank has its part of it."""
        failed_bytes = sum(self._unit_bytes(load, failure) for failure in failures)
        failed_blocks = len({failure.index for failure in failures})
        self.counters["loaded_bytes"] += load.load_bytes * self._form.rank_count - failed_bytes
        self.counters["load_us"] += round(seconds * 1e6)
        self.counters["loaded_blocks"] += sum(len(part.block_ids) for part in load.parts) - failed_blocks
        self.counters["failed_blocks"] += failed_blocks

    def _count_tokens(self, load: StartLoad, failures: Sequence[UnitFailure]) -> None:
        """As far as all ranks have them. What a request goes on from without the rest depends on its KV groups."""
        loaded = self._tokens_before(load, [failure for failure in failures if not failure.is_mismatch])
        verified = self._tokens_before(load, failures)
        self.counters["tokens_loaded"] += loaded
        self.counters["tokens_verified"] += verified
        if not failures or self._form.may_load_in_part:
            self.counters["tokens_used"] += verified

    def _tokens_before(self, load: StartLoad, failures: Sequence[UnitFailure]) -> int:
        """Tokens of the load before the first of ``failures``."""
        end = load.tokens.stop
        for failure in failures:
            group, block = self._block_of(load, failure.index)
            end = min(end, block * self._form.plans[group].block_tokens)
        return max(0, end - load.tokens.start)

    def _count_descriptors(self, load: StartLoad, reports: Sequence[LoadReport]) -> None:
        for report in reports:
            if report.path:
                self.counters[f"load_descriptors_{report.path}"] += report.descriptors
                self.counters[f"load_chunks_{report.path}"] += sum(len(self._chunks_of(part)) for part in load.parts)
                self.counters[f"load_bytes_{report.path}"] += load.load_bytes

    def _place_of(self, load: StartLoad, unit: int) -> _Place:
        """The chunk that the load's ``unit`` (from 0) belongs to."""
        group, block = self._block_of(load, unit)
        return _Place(group, block // self._blocks_per_chunk(group))

    def _block_of(self, load: StartLoad, unit: int) -> tuple[int, int]:
        """KV group, and which of the request's blocks of that group ``unit`` is."""
        for part in load.parts:
            if unit < len(part.block_ids):
                return part.group, part.first_block + unit
            unit -= len(part.block_ids)
        raise AssertionError(f"{load.request_id}: no unit {unit}")

    def _unit_bytes(self, load: StartLoad, failure: UnitFailure) -> int:
        return self._form.unit_bytes[self._place_of(load, failure.index).group]

    def _blocks_per_chunk(self, group: int) -> int:
        plan = self._form.plans[group]
        return plan.chunk_tokens // plan.block_tokens

    def _chunks_of(self, part: LoadPart) -> range:
        """The chunks of its group that have blocks in ``part``."""
        per_chunk, end_block = self._blocks_per_chunk(part.group), part.first_block + len(part.block_ids)
        return range(part.first_block // per_chunk, -(-end_block // per_chunk))

    def _failed_chunks(self, load: StartLoad, failures: Sequence[UnitFailure]) -> dict[_Place, UnitFailure]:
        """Each with one reason: wrong bytes before anything else, and that it was not tried after anything else."""
        failed: dict[_Place, UnitFailure] = {}
        for failure in failures:
            place = self._place_of(load, failure.index)
            if failure.is_mismatch:
                self.counters["digest_mismatches"] += 1
            if failure.is_mismatch or place not in failed or failed[place].is_untried:
                failed[place] = failure
        return failed

    def _note(self, load: StartLoad, failed: dict[_Place, UnitFailure]) -> None:
        """Wrong bytes: the chunk goes at once. Unreadable ones: only when load after load fails to read them, while
        others can be read (:class:`ReadFailures`)."""
        read: list[bytes] = []
        for part in load.parts:
            stored = load.stored.groups[part.group]
            for index in self._chunks_of(part):
                if _Place(part.group, index) not in failed:
                    read.append(stored.keys[index - stored.first_chunk])
        self._read_failures.were_read(read)
        for place, failure in failed.items():
            stored = load.stored.groups[place.group]
            key, extent = (
                stored.keys[place.number - stored.first_chunk],
                stored.extents[place.number - stored.first_chunk],
            )
            if failure.is_mismatch or (not failure.is_untried and self._read_failures.is_lost(key)):
                self._client.drop(key, extent, failure.reason)
