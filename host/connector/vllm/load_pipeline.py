"""A load's way to the workers and back: ordered, carried out, reported, and what failed of it found in the pool."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from meshfusion.host.connector.estimate import EstimateOptions, LoadEstimate
from meshfusion.host.connector.lookups import LoadPart, StartLoad
from meshfusion.host.connector.read_failures import ReadFailures
from meshfusion.host.connector.vllm.messages import LoadOrder, LoadReport
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.path.load_job import UnitFailure
from meshfusion.host.pool_client import PoolClient


class _Place(NamedTuple):
    """A chunk of a request: ``number`` in its KV group."""

    group: int
    number: int


class LoadPipeline:
    """Lives in the scheduler."""

    def __init__(self, client: PoolClient, form: ChunkForm) -> None:
        self._client = client
        self._form = form
        self._loads: dict[str, StartLoad] = {}
        self._orders: list[LoadOrder] = []
        self._read_failures = ReadFailures()
        self.estimate = LoadEstimate(EstimateOptions())
        self.counters: Counter[str] = Counter()

    @property
    def under_way(self) -> frozenset[str]:
        """Requests whose load has not been reported."""
        return frozenset(self._loads)

    def start(self, load: StartLoad) -> None:
        self._loads[load.request_id] = load
        self._orders.append(
            LoadOrder(
                load.request_id,
                tuple(len(part.lbas) for part in load.parts),
                tuple(lba for part in load.parts for lba in part.lbas),
                tuple(block_id for part in load.parts for block_id in part.block_ids),
                tuple(digest for part in load.parts for digest in part.digests),
                self.estimate.abandon_after_s(load.load_bytes),
                load.refusal,
            )
        )

    def take_orders(self) -> tuple[LoadOrder, ...]:
        """What the workers are to load now."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def reported(self, report: LoadReport) -> int | None:
        """The workers are done with a load. The first chunk of the request that did not come, if one did not: from
        there on it is recomputed."""
        load = self._loads.get(report.request_id)
        if load is None:
            return None
        failed_bytes = sum(self._unit_bytes(load, failure) for failure in report.failures)
        self.counters["loaded_bytes"] += load.load_bytes - failed_bytes
        self.counters["load_us"] += round(report.seconds * 1e6)
        self.counters["loaded_blocks"] += sum(len(part.lbas) for part in load.parts) - len(report.failures)
        self.counters["failed_blocks"] += len(report.failures)
        failed = self._failed_chunks(load, report.failures)
        self._note(load, failed)
        if report.is_whole:
            if report.path:
                self.counters[f"load_descriptors_{report.path}"] += report.descriptors
                self.counters[f"load_chunks_{report.path}"] += sum(len(self._chunks_of(part)) for part in load.parts)
            self.estimate.observe_load(report.load_bytes, report.seconds)
            return None
        return min((place.number for place in failed), default=0)

    def end(self, request_id: str) -> None:
        self._loads.pop(request_id, None)

    def _place_of(self, load: StartLoad, unit: int) -> _Place:
        """The chunk that the load's ``unit`` (from 0) belongs to."""
        for part in load.parts:
            if unit < len(part.lbas):
                return _Place(part.group, (part.first_block + unit) // self._blocks_per_chunk(part.group))
            unit -= len(part.lbas)
        raise AssertionError(f"{load.request_id}: no unit {unit}")

    def _unit_bytes(self, load: StartLoad, failure: UnitFailure) -> int:
        return self._form.unit_bytes[self._place_of(load, failure.index).group]

    def _blocks_per_chunk(self, group: int) -> int:
        plan = self._form.plans[group]
        return plan.chunk_tokens // plan.block_tokens

    def _chunks_of(self, part: LoadPart) -> range:
        """The chunks of its group that have blocks in ``part``."""
        per_chunk, end_block = self._blocks_per_chunk(part.group), part.first_block + len(part.lbas)
        return range(part.first_block // per_chunk, -(-end_block // per_chunk))

    def _failed_chunks(self, load: StartLoad, failures: tuple[UnitFailure, ...]) -> dict[_Place, UnitFailure]:
        """Each with one reason: wrong bytes before anything else."""
        failed: dict[_Place, UnitFailure] = {}
        for failure in failures:
            place = self._place_of(load, failure.index)
            if failure.is_mismatch:
                self.counters["digest_mismatches"] += 1
            if failure.is_mismatch or place not in failed:
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
            if failure.is_mismatch or self._read_failures.is_lost(key):
                self._client.drop(key, extent, failure.reason)
