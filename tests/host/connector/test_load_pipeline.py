"""What several ranks report of one load: together once, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api.types import Extent
from meshfusion.host.connector.load_parts import LoadPart
from meshfusion.host.connector.lookups import StartLoad
from meshfusion.host.connector.vllm.load_pipeline import LoadEnd, LoadPipeline
from meshfusion.host.connector.vllm.messages import LoadReport
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, WholePrefix
from meshfusion.host.path.load_job import UnitFailure
from meshfusion.host.pool_events import StoredBoundary, StoredGroup

RANKS, CHUNKS, BLOCKS_PER_CHUNK, UNIT_BYTES = 3, 3, 2, 100
FORM = ChunkForm((GroupPlan(0, WholePrefix(), 16, 32),), (UNIT_BYTES,), RANKS)
UNITS = CHUNKS * BLOCKS_PER_CHUNK
KEYS = tuple(bytes([i]) * 32 for i in range(CHUNKS))
COLUMNS = (tuple(range(UNITS)),) * RANKS
STORED = StoredGroup(
    0, 0, KEYS, tuple(Extent(1, 0, i, 1, 1) for i in range(CHUNKS)), COLUMNS, ((b"",) * UNITS,) * RANKS
)
PART = LoadPart(0, 0, tuple(range(10, 10 + UNITS)), STORED.unit_lbas, STORED.unit_digests)
LOAD = StartLoad("a", (PART,), UNITS * UNIT_BYTES, StoredBoundary(CHUNKS, (STORED,)), tokens=range(UNITS * 16))


class Drops:
    """In place of the client: the keys that were dropped."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def drop(self, key: bytes, extent: Extent, reason: str) -> None:
        self.keys.append(key)


def started() -> tuple[LoadPipeline, Drops]:
    drops: Any = Drops()
    pipeline = LoadPipeline(drops, FORM)
    pipeline.start(LOAD)
    return pipeline, drops


def report(rank: int, failed: dict[int, bool], seconds: float = 1.0) -> LoadReport:
    """``failed``: units, and whether they have other bytes."""
    failures = tuple(UnitFailure(unit, is_mismatch, "-") for unit, is_mismatch in sorted(failed.items()))
    return LoadReport("a", LOAD.load_bytes, seconds, failures, "", "staged", 5 + rank, rank)


FAILED = st.dictionaries(st.integers(0, UNITS - 1), st.booleans(), max_size=3)


@given(st.lists(FAILED, min_size=RANKS, max_size=RANKS), st.permutations(range(RANKS)))
def test_a_load_ends_with_its_last_rank_whatever_their_order(failed: list[dict[int, bool]], order: list[int]) -> None:
    pipeline, drops = started()
    reports = [report(rank, failed[rank], seconds=1.0 + rank) for rank in order]
    assert [pipeline.reported(each) for each in reports[:-1]] == [None] * (RANKS - 1)
    end = pipeline.reported(reports[-1])
    units = {unit for of_rank in failed for unit in of_rank}
    assert end == LoadEnd(min(units) // BLOCKS_PER_CHUNK if units else None)
    wrong = {unit // BLOCKS_PER_CHUNK for of_rank in failed for unit, is_mismatch in of_rank.items() if is_mismatch}
    assert sorted(drops.keys) == [KEYS[chunk] for chunk in sorted(wrong)], "each once"
    counts, failure_count = pipeline.counters, sum(map(len, failed))
    assert counts["loaded_bytes"] == (RANKS * UNITS - failure_count) * UNIT_BYTES
    assert (counts["loaded_blocks"], counts["failed_blocks"]) == (UNITS - len(units), len(units))
    assert counts["load_us"] == RANKS * 1_000_000, "the slowest"
    lost = {unit for of_rank in failed for unit, is_mismatch in of_rank.items() if not is_mismatch}
    assert counts["tokens_loaded"] == min(lost, default=UNITS) * 16
    assert counts["tokens_verified"] == counts["tokens_used"] == min(units, default=UNITS) * 16
    is_whole = not units
    assert counts["load_descriptors_staged"] == is_whole * (5 + 6 + 7)
    assert counts["load_chunks_staged"] == is_whole * RANKS * CHUNKS


@pytest.mark.parametrize("again", [lambda former: former, lambda former: former._replace(failures=())])
def test_a_rank_that_reports_twice_is_our_mistake(again: Callable[[LoadReport], LoadReport]) -> None:
    pipeline, _ = started()
    first = report(1, {0: False})
    pipeline.reported(first)
    with pytest.raises(AssertionError, match="reported twice"):
        pipeline.reported(again(first))


def test_a_report_of_a_load_that_has_ended_changes_nothing() -> None:
    pipeline, _ = started()
    for rank in range(RANKS):
        pipeline.reported(report(rank, {}))
    pipeline.end("a")
    before = dict(pipeline.counters)
    assert pipeline.reported(report(1, {0: True})) is None
    assert dict(pipeline.counters) == before
    assert not pipeline.under_way
